#!/usr/bin/env bash
# The Google Benchmark binaries, and on a GPU the ops beside other libraries (benchmarks/peers.py).
# JSON under benchmarks/results/local/ (only results that are meant to be kept are committed, one
# folder up). Arguments go to the binaries, e.g. --benchmark_filter=cpu/hgru.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

out=benchmarks/results/local
mkdir -p "$out"
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
torch=$("$python" -c 'import torch; print(torch.__version__)')
ran=0
for binary in build/bin/bench_*; do
  [[ -x $binary ]] || continue
  ran=1
  "$binary" --benchmark_out="$out/$(basename "$binary").json" --benchmark_out_format=json \
    --benchmark_context="commit=$commit,torch=$torch" "$@"
done
((ran)) || say "no benchmark binary was built: no Google Benchmark (Debian: libbenchmark-dev)"
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  "$python" benchmarks/peers.py --out "$out/peers.json" --commit "$commit"
  "$python" benchmarks/peers.py --groups gla --out "$out/peers_gla.json" --commit "$commit"
  "$python" benchmarks/peers.py --groups attention --out "$out/peers_attention.json" \
    --commit "$commit"
  "$python" benchmarks/gla_errors.py --out "$out/gla_errors.json" --commit "$commit"
elif ((!ran)); then
  die "nothing to run: no benchmark binary, and no CUDA device for benchmarks/peers.py"
fi
say "results are in $out"
