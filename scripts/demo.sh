#!/usr/bin/env bash
# Trains the demo's language model into runs/demo.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
exec "$python" -m tidegate demo --out runs/demo
