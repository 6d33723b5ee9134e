#!/usr/bin/env bash
# Builds the package alone, no tests, and trains the demo's language model into runs/demo.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
scripts/build.sh tidegate_package
# Threads that wait sleep instead of spinning: as fast on an idle machine, and faster beside other
# work (figures in docs/training.md, "Threads that wait").
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
exec "$python" -m tidegate demo --out runs/demo
