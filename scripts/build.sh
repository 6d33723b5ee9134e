#!/usr/bin/env bash
# build.sh [TARGET...]: configures build/ (or the folder $TIDEGATE_BUILD) and builds the targets, or
# everything: the library, tests, benchmarks, the pybind11 module.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

build=${TIDEGATE_BUILD:-build}
# A tree of another kind or source folder cannot be reused.
generator="Unix Makefiles"
arguments=()
if ninja=$(tool ninja); then
  generator=Ninja
  arguments+=("-DCMAKE_MAKE_PROGRAM=$ninja")
fi
cache=$build/CMakeCache.txt
if [[ -f $cache ]] && { ! grep -qx "CMAKE_GENERATOR:INTERNAL=$generator" "$cache" ||
  ! grep -qx "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$cache"; }; then
  say "$build/ belongs to another generator or folder: starting it anew"
  rm -rf "$build"
fi

cmake=$(tool cmake)
# shellcheck disable=SC2206 # CMAKE_ARGS is a list of words
arguments+=(${CMAKE_ARGS:-})
mkdir -p "$build"
# AUTO: what is built here runs here. CMAKE_ARGS come last, so that they can ask for something else.
if ! "$cmake" -S . -B "$build" -G "$generator" -DPython_EXECUTABLE="$python" -DTIDEGATE_BUILD_TESTS=ON \
  -DTIDEGATE_BUILD_BENCHMARKS=ON -DTIDEGATE_CUDA_SM80=AUTO "${arguments[@]}" >"$build/configure.log" 2>&1; then
  cat "$build/configure.log" >&2
  die "cmake failed: its output is above"
fi
grep -o 'tidegate: .*' "$build/configure.log"
targets=()
(($# == 0)) || targets=(--target "$@")
"$cmake" --build "$build" --parallel "$(jobs)" "${targets[@]}"
