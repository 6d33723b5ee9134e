#!/usr/bin/env bash
# Makes .venv with the pinned dependencies (nothing when it is up to date), and says in one line what
# is missing: a compiler, Python, venv, disk. With PYTHON=... given, only checks that Python.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

need_gb=9 # .venv 5.0 and the build 1.3; while pip unpacks, 2.6 more than .venv
oldest=3.10
newest=3.14 # of the pinned torch's wheels

check_compiler() {
  local cxx=${CXX:-g++}
  command -v "$cxx" >/dev/null ||
    die "no C++ compiler: $cxx is not on PATH (Debian: apt-get install g++)"
  printf '#include <bit>\n#include <concepts>\n#include <span>\nint main() {}\n' |
    "$cxx" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    die "$cxx ($("$cxx" -dumpfullversion -dumpversion)) does not compile C++20: g++ 11 or later is needed (Debian: apt-get install g++)"
}

# version_fits PYTHON: between $oldest and $newest.
version_fits() {
  "$1" -I -c "import sys; sys.exit(not tuple(map(int, '$oldest'.split('.'))) <= sys.version_info[:2] <= tuple(map(int, '$newest'.split('.'))))" 2>/dev/null
}

version_of() { "$1" -I -c 'import platform; print(platform.python_version())' 2>/dev/null; }

base_python() {
  local name found=""
  for name in python3 python3.13 python3.12 python3.11 python3.10 python3.14; do
    version_of "$name" >/dev/null || continue
    if version_fits "$name"; then
      command -v "$name"
      return
    fi
    found+=" $name is $(version_of "$name");"
  done
  if [[ -z $found ]]; then
    die "no python3 on PATH (Debian: apt-get install python3 python3-venv)"
  fi
  die "Python $oldest to $newest is needed;${found%;} (Debian: apt-get install python3 python3-venv, or put another python3 first on PATH)"
}

check_venv_module() {
  "$1" -I -c 'import venv, ensurepip' 2>/dev/null && return
  die "$1 cannot make a virtual environment (Debian: apt-get install python$("$1" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv)"
}

check_disk() {
  local free
  free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
  ((free >= need_gb)) || die "no disk: $free GB free in $PWD, about $need_gb GB are needed (torch and its CUDA libraries)"
}

# One line for the pinned files and the interpreter: when it is the same, nothing is to be done.
stamp_text() {
  printf '%s %s\n' "$(cat requirements.txt requirements-dev.txt | sha256sum | cut -c1-16)" \
    "$(.venv/bin/python -I -c 'import sys; print(sys.version.split()[0], sys.base_prefix)' 2>/dev/null)"
}

install_pins() {
  local base
  [[ -f .venv/.stamp && $(<.venv/.stamp) == "$(stamp_text)" ]] && return
  if ! version_fits .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    base=$(base_python)
    check_venv_module "$base"
    check_disk
    say "making .venv with $base ($(version_of "$base"))"
    rm -rf .venv
    "$base" -m venv .venv || die "$base -m venv .venv failed"
  fi
  say "installing the pinned dependencies into .venv (2.5 GB to download the first time: 3 to 6 minutes)"
  mkdir -p .venv/tmp # wheels unpack beside .venv, not in a /tmp that may be small
  TMPDIR=$PWD/.venv/tmp .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    -r requirements-dev.txt </dev/null ||
    die "pip could not install requirements-dev.txt (its message is above; the first time needs network access)"
  rm -rf .venv/tmp
  stamp_text >.venv/.stamp
}

# Offline: the Python given must bring what .venv would.
check_given_python() {
  version_of "$python" >/dev/null || die "PYTHON=$TIDEGATE_PYTHON does not run"
  version_fits "$python" || die "PYTHON=$TIDEGATE_PYTHON is $(version_of "$python"): $oldest to $newest is needed"
  local missing
  missing=$("$python" -c '
import importlib.util as u
names = ("torch", "numpy", "safetensors", "tokenizers", "tqdm", "matplotlib", "pytest")
print(" ".join(n for n in names if u.find_spec(n) is None))')
  [[ -z $missing ]] || die "PYTHON=$TIDEGATE_PYTHON lacks: $missing (pip install them there, or leave PYTHON out to get a .venv)"
  local cmake version
  cmake=$(tool cmake) || die "no cmake: neither beside $python nor on PATH (pip install cmake)"
  version=$("$cmake" --version | sed -n '1s/[^0-9]*//p')
  [[ $(printf '3.25\n%s\n' "$version" | sort -V | head -n 1) == 3.25 ]] ||
    die "$cmake is $version: 3.25 or later is needed, 3.28 for CUDA kernels (pip install cmake)"
}

check_compiler
if [[ -n ${TIDEGATE_PYTHON:-} ]]; then
  check_given_python
else
  install_pins
fi
