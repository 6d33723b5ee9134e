#!/usr/bin/env bash
# The demo beside a torch.nn.GRU that is given the same wall time (benchmarks/demo_gru.py), each with
# the waiting policy that suits it (docs/training.md, "Threads that wait"). About ten minutes, for
# which the machine should be left alone. Arguments go to demo_gru.py.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

gru=runs/demo_gru
[[ ! -e $gru ]] || die "$gru is there already: delete it to train the GRU again"
scripts/demo.sh # trains, or reports a demo that is finished
out=benchmarks/results/local
mkdir -p "$out"
OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-active}" "$python" benchmarks/demo_gru.py --out "$gru" \
  --demo runs/demo --json "$out/demo_gru.json" "$@"
say "results are in $out/demo_gru.json"
