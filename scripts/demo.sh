#!/usr/bin/env bash
# Builds the package alone, no tests, and trains the demo's language model into runs/demo.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
scripts/build.sh tidegate_package
# By default torch's threads spin for long at every barrier; beside other work that costs most of the
# speed. This many turns (some tenths of a millisecond) cover the gaps between two operations.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
exec "$python" -m tidegate demo --out runs/demo
