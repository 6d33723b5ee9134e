#!/usr/bin/env bash
# torch_versions.sh [VERSION...]: builds the library for the CPU and runs the tests of its ops, modules
# and models with each torch that cmake/TidegateTorch.cmake says was tried, or with the ones given.
# Each gets a folder of its own in build/torch-VERSION, where its environment stays: 6 GB and ten
# minutes apiece.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

versions=("$@")
if ((${#versions[@]} == 0)); then
  read -ra versions < <(sed -n 's/^set(TIDEGATE_TORCH_TRIED \(.*\))$/\1/p' cmake/TidegateTorch.cmake)
fi
((${#versions[@]} > 0)) || die "cmake/TidegateTorch.cmake names no version"

for version in "${versions[@]}"; do
  say "torch $version"
  folder=$PWD/build/torch-$version
  mkdir -p "$folder"
  [[ -x $folder/venv/bin/python ]] || "$python" -m venv "$folder/venv"
  sed "s/^torch==.*/torch==$version/; s/^-r .*//" requirements.txt requirements-dev.txt >"$folder/requirements.txt"
  "$folder/venv/bin/pip" install -q -r "$folder/requirements.txt"
  TIDEGATE_PYTHON=$folder/venv/bin/python TIDEGATE_BUILD=$folder/build CMAKE_ARGS=-DTIDEGATE_CUDA=OFF \
    scripts/build.sh tidegate tidegate_cpp test_ops test_nn
  "$folder/build/bin/test_ops" --gtest_brief=1
  "$folder/build/bin/test_nn" --gtest_brief=1
  PYTHONPATH=$folder/build/python OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m pytest -q -n "$(jobs)" \
    tests/python/test_parity{,_errors,_files}.py tests/python/test_models{,_files}.py \
    tests/python/test_ops_errors.py tests/python/test_ops_torch.py tests/python/test_nn_hgru.py \
    tests/python/test_nn_forgetting_attention.py
done
say "built and tested with torch ${versions[*]}"
