#!/usr/bin/env bash
# Builds the library alone and trains the demo's language model into runs/demo.
#
# The demo is Python's modules over the library's ops: it needs no tests, no benchmarks and no
# pybind11 module, and without a GPU no CUDA kernels either, which are more than half of the build.
# A tree that is built already is used as it is.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
if [[ ! -f build/CMakeCache.txt || -f build/cuda_left_out ]] &&
  ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  export TIDEGATE_CPU_ALONE=1
fi
scripts/build.sh tidegate
# Threads that wait sleep instead of spinning: as fast on an idle machine, and faster beside other
# work (figures in docs/training.md, "Threads that wait").
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
exec "$python" -m tidegate demo --out runs/demo
