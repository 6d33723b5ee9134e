#!/usr/bin/env bash
# Builds the package alone, no tests, and trains the demo's language model into runs/demo.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
scripts/build.sh tidegate_package
exec "$python" -m tidegate demo --out runs/demo
