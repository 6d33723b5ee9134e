#!/usr/bin/env bash
# ruff, clang-format and the wall around kernels/. With --fix, formats in place instead of checking.
set -uo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

failed=()
mapfile -t cpp < <(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' ':!third_party')
if [[ ${1:-} == --fix ]]; then
  "$(tool ruff)" check --quiet --fix . || failed+=("ruff check")
  "$(tool ruff)" format --quiet .
  "$(tool clang-format)" -i "${cpp[@]}"
else
  "$(tool ruff)" check --quiet . || failed+=("ruff check")
  "$(tool ruff)" format --quiet --diff . || failed+=("ruff format")
  "$(tool clang-format)" --dry-run -Werror "${cpp[@]}" || failed+=(clang-format)
fi

# Kernels are plain C++ and CUDA: a torch header there would cost minutes a build, and the wall.
if grep -rnE '#[[:space:]]*include[[:space:]]*[<"](torch|ATen|c10|caffe2)/' kernels; then
  failed+=("kernels/ includes torch")
fi
if command -v shellcheck >/dev/null; then
  shellcheck scripts/*.sh .ci/run || failed+=(shellcheck)
fi
((${#failed[@]} == 0)) || die "lint FAILED: ${failed[*]} (make format repairs the layout)"
say "lint passed"
