#!/usr/bin/env bash
# The demo beside other models that are given the same wall time (benchmarks/demo.py), each with the
# waiting policy that suits it (docs/training_memory.md, "Threads that wait"). About a quarter of an hour,
# for which the machine should be left alone.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

others=runs/demo_others
[[ ! -e $others ]] || die "$others is there already: delete it to train them again"
choose_demo_build
scripts/demo.sh # trains, or reports a demo that is finished
out=benchmarks/results/local
mkdir -p "$out"
common=(--out "$others" --demo runs/demo)
# One process a policy: HGRN2 as the demo, GRUs with threads that spin.
OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" "$python" benchmarks/demo.py "${common[@]}" \
  --models hgrn2 --json "$out/demo_hgrn2.json"
OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-active}" "$python" benchmarks/demo.py "${common[@]}" \
  --models gru-muon gru-adamw --add "$out/demo_hgrn2.json" --json "$out/demo.json"
rm "$out/demo_hgrn2.json"
say "results are in $out/demo.json"
