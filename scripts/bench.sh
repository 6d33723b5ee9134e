#!/usr/bin/env bash
# The Google Benchmark binaries, training steps beside the Transformer (bench_models), and on a GPU
# the ops beside other libraries (benchmarks/peers.py). JSON under benchmarks/results/local/ (only
# results that are meant to be kept are committed, one folder up). Arguments go to the Google
# Benchmark binaries, e.g. scripts/bench.sh --benchmark_filter=cpu/hgru, and leave all else out.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

out=benchmarks/results/local
mkdir -p "$out"
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
torch=$("$python" -c 'import torch; print(torch.__version__)')
ran=0
for binary in build/bin/bench_kernels build/bin/bench_ops; do
  [[ -x $binary ]] || continue
  ran=1
  "$binary" --benchmark_out="$out/$(basename "$binary").json" --benchmark_out_format=json \
    --benchmark_context="commit=$commit,torch=$torch" "$@"
done
((ran)) || say "kernels and ops left out: no Google Benchmark (Debian: libbenchmark-dev)"
(($# == 0)) || exit 0
build/bin/bench_models --json "$out/models.json" --commit "$commit" ||
  say "bench_models: some rows failed, as said above"
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  "$python" benchmarks/peers.py --out "$out/peers.json" --commit "$commit"
  "$python" benchmarks/peers.py --groups gla --out "$out/peers_gla.json" --commit "$commit"
  "$python" benchmarks/peers.py --groups attention --out "$out/peers_attention.json" \
    --commit "$commit"
  "$python" benchmarks/gla_errors.py --out "$out/gla_errors.json" --commit "$commit"
fi
say "results are in $out"
