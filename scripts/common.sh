# Shared by the scripts of this folder; sourced, not run.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

say() { printf 'tidegate: %s\n' "$*"; }

# One line on what is missing, then out.
die() {
  printf 'tidegate: %s\n' "$*" >&2
  exit 1
}

# The Python that everything runs with: the one given (offline), or .venv's.
python_path() {
  if [[ -n ${TIDEGATE_PYTHON:-} ]]; then
    local found
    found=$(command -v "$TIDEGATE_PYTHON") || die "PYTHON=$TIDEGATE_PYTHON: no such program"
    realpath --no-symlinks "$found" # a virtual environment's python is a link: not followed
  else
    printf '%s\n' "$PWD/.venv/bin/python"
  fi
}

# tool NAME: its path; the chosen Python's own first, then PATH.
tool() {
  local folder
  folder=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
  if [[ -x $folder/$1 ]]; then
    printf '%s\n' "$folder/$1"
  else
    command -v "$1"
  fi
}

# Compilers at once: one a core, but 2 GB of free memory each.
jobs() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable/ { print int($2 / 2097152) }' /proc/meminfo)
  ((memory >= 1)) || memory=1
  printf '%s\n' "${TIDEGATE_JOBS:-$((cores < memory ? cores : memory))}"
}

# run_pytest ARGUMENT...: with pytest-xdist, as many workers as jobs says, 24 at most (they share the
# GPU, if there is one). Two threads each: the tests are many and small, and more would wait for
# each other.
run_pytest() {
  local workers=() count
  count=$(jobs)
  ((count <= 24)) || count=24
  if ((count > 1)) && "$python" -c 'import xdist' 2>/dev/null; then
    workers=(-n "$count" --dist loadgroup --no-loadscope-reorder)
  fi
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} \
    "$python" -m pytest "${workers[@]}" "$@"
}

# choose_demo_build: without a GPU the demo needs no CUDA kernels, which are most of what there is to
# compile. Where an nvcc would have them compiled all the same, they are left out in a build folder of
# the demo's own: build/ goes to pip too, whose package may be meant for another machine.
choose_demo_build() {
  [[ ! -f build/lib/libtidegate.so ]] || return 0
  [[ -n ${CUDACXX:-}${CUDA_HOME:-}${CUDA_PATH:-} ]] || command -v nvcc >/dev/null || return 0
  ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || return 0
  export TIDEGATE_BUILD=build/demo CMAKE_ARGS="-DTIDEGATE_CUDA=OFF ${CMAKE_ARGS:-}"
  export PYTHONPATH="$PWD/build/demo/python:$PYTHONPATH"
}

python=$(python_path) || exit 1
export PYTHONPATH="$PWD/build/python${PYTHONPATH:+:$PYTHONPATH}"
