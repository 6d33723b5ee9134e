#!/usr/bin/env bash
# GoogleTest under CTest, then pytest. Both run even if one fails.
set -uo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

failed=()
rm -rf build/gtest
# Its programs side by side, with as many threads each as they would have alone; these sleep while
# they wait, so that they leave the cores to the others.
OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} "$(tool ctest)" --test-dir build --output-on-failure \
  --parallel "$(jobs)" || failed+=(GoogleTest)
"$python" scripts/gtest_summary.py build/gtest
run_pytest "$@" || failed+=(pytest)

if ((${#failed[@]})); then
  die "FAILED: ${failed[*]}"
fi
say "all tests passed (tests that need a GPU are skipped where there is none: see the counts above)"
