#!/usr/bin/env bash
# Only what needs a GPU: the GoogleTest suites named *Cuda*, and pytest's marker gpu.
set -uo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  die "no CUDA device is visible to $python: make test skips these tests and says so"

failed=()
rm -rf build/gtest
for folder in kernels ops nn; do
  [[ -x build/bin/test_$folder ]] || continue
  "build/bin/test_$folder" --gtest_filter='*Cuda*:*CUDA*' --gtest_brief=1 \
    --gtest_output="xml:build/gtest/$folder.xml" || failed+=("test_$folder")
done
"$python" scripts/gtest_summary.py build/gtest
# With pytest-xdist, PYTEST_ADDOPTS="-n 8" shares the GPU among workers; tests that need most of its
# memory come last, alone.
"$python" -m pytest -m "gpu and not large" "$@" || failed+=(pytest)
env -u PYTEST_ADDOPTS "$python" -m pytest -m "gpu and large" "$@" || failed+=("pytest -m large")
((${#failed[@]} == 0)) || die "FAILED: ${failed[*]}"
