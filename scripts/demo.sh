#!/usr/bin/env bash
# Builds the package alone, no tests, and trains the demo's language model into runs/demo.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
scripts/build.sh tidegate_package
# By default torch's threads spin at every barrier; beside other work that costs most of the speed.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
exec "$python" -m tidegate demo --out runs/demo
