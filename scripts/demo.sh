#!/usr/bin/env bash
# Builds the library alone and trains the demo's language model into runs/demo
# (without tests, benchmarks and pybind11 module: the demo is Python's modules over its ops).
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
choose_demo_build
scripts/build.sh tidegate
# Threads that wait sleep instead of spinning: as fast on an idle machine, and faster beside other
# work (docs/training_memory.md, "Threads that wait").
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
exec "$python" -m tidegate demo --out runs/demo
