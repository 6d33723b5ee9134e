#!/usr/bin/env bash
# The Google Benchmark binaries; JSON under benchmarks/results/local/ (only results that are meant to
# be kept are committed, one folder up).
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

out=benchmarks/results/local
mkdir -p "$out"
found=0
for binary in build/bin/bench_*; do
  [[ -x $binary ]] || continue
  found=1
  "$binary" --benchmark_out="$out/$(basename "$binary").json" --benchmark_out_format=json "$@"
done
((found)) || die "no benchmark was built: no Google Benchmark (Debian: apt-get install libbenchmark-dev)"
say "results are in $out"
