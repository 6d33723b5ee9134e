#!/usr/bin/env bash
# Only what needs a GPU: the GoogleTest suites named *Cuda*, and pytest's marker gpu.
set -uo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  die "no CUDA device is visible to $python: make test skips these tests and says so"

failed=()
rm -rf build/gtest
mkdir -p build/gtest
# The many tests of the kernels in four processes at once: one alone leaves most of a GPU idle.
for folder in kernels ops nn; do
  [[ -x build/bin/test_$folder ]] || continue
  shards=1
  [[ $folder == kernels ]] && shards=4
  running=()
  for ((shard = 0; shard < shards; ++shard)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard "build/bin/test_$folder" \
      --gtest_filter='*Cuda*:*CUDA*' --gtest_brief=1 \
      --gtest_output="xml:build/gtest/$folder.$shard.xml" >"build/gtest/$folder.$shard.log" 2>&1 &
    running+=($!)
  done
  for shard in "${!running[@]}"; do
    wait "${running[shard]}" || failed+=("test_$folder, part $((shard + 1)) of $shards")
    cat "build/gtest/$folder.$shard.log"
  done
done
"$python" scripts/gtest_summary.py build/gtest
run_pytest -m "gpu and not large" "$@" || failed+=(pytest)
# Tests that need most of the memory come last, one at a time.
"$python" -m pytest -m "gpu and large" "$@" || failed+=("pytest -m large")
((${#failed[@]} == 0)) || die "FAILED: ${failed[*]}"
