#!/usr/bin/env bash
# The benchmarks, part by part: the Google Benchmark binaries (kernels, ops), training steps beside
# the Transformer (models), and on a GPU the ops beside other libraries (baselines, sweep, gla,
# attention), the error of decays (gla_errors), gated_rnn beside cuDNN's GRU and the copying task's
# training step. JSON under benchmarks/results/local/ (only results that are meant to be kept are
# committed, one folder up). `make bench PARTS="ops gla"` runs these parts alone. Arguments go to the
# Google Benchmark binaries, e.g. scripts/bench.sh --benchmark_filter=cpu/hgru, and leave all else
# out. A part that fails does not keep the others from running; then the end is 1.
set -uo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

on_gpu="baselines sweep gla attention gla_errors gated_rnn copying_step"
all="kernels ops models $on_gpu"
read -ra parts <<<"${TIDEGATE_PARTS:-$all}"
(($# == 0)) || parts=(kernels ops)
for part in "${parts[@]}"; do
  [[ " $all " == *" $part "* ]] || die "PARTS: there is no part $part; there are $all"
done

out=benchmarks/results/local
mkdir -p "$out" || die "cannot write to $out"
facts='import harness, torch; print(harness.commit(), torch.__version__, torch.cuda.is_available())'
facts=$(PYTHONPATH="benchmarks:$PYTHONPATH" "$python" -c "$facts") ||
  die "the package cannot be imported, as said above"
read -r commit torch gpu <<<"$facts"

# obstacle PART: why it cannot run here, or nothing.
obstacle() {
  if [[ $gpu == False && " $on_gpu " == *" $1 "* ]]; then
    printf '%s' "no CUDA device is visible to $python"
  elif [[ " kernels ops " == *" $1 "* && ! -x build/bin/bench_$1 ]]; then
    printf '%s' "no Google Benchmark (Debian: libbenchmark-dev)"
  fi
}

# run PART ARGUMENT...
run() {
  local part=$1
  shift
  case $part in
    kernels | ops)
      "build/bin/bench_$part" --benchmark_out="$out/bench_$part.json" \
        --benchmark_out_format=json --benchmark_context="commit=$commit,torch=$torch" "$@"
      ;;
    models) build/bin/bench_models --json "$out/models.json" --commit "$commit" ;;
    baselines) "$python" benchmarks/baselines.py --groups aims extra --out "$out/baselines.json" ;;
    sweep | gla | attention)
      "$python" benchmarks/baselines.py --groups "$part" --out "$out/baselines_$part.json"
      ;;
    *) "$python" "benchmarks/$part.py" --out "$out/$part.json" ;;
  esac
}

failed=()
for part in "${parts[@]}"; do
  why=$(obstacle "$part")
  if [[ -n $why ]]; then
    say "$part left out: $why"
    [[ -z ${TIDEGATE_PARTS:-} ]] || failed+=("$part") # asked for by name
    continue
  fi
  begin=$SECONDS
  run "$part" "$@" || failed+=("$part")
  say "$part: $((SECONDS - begin)) s"
done
say "results are in $out"
((${#failed[@]} == 0)) || die "FAILED: ${failed[*]}"
