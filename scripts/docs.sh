#!/usr/bin/env bash
# Builds the site from docs/, the Python docstrings and the C++ headers into build/docs/html; a
# warning is an error. Nothing needs to be compiled for it: torch and what requirements-docs.txt
# lists are enough.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

missing() {
  "$python" -c '
import importlib.util as u
names = ("torch", "sphinx", "myst_parser", "furo")
print(" ".join(n for n in names if u.find_spec(n) is None))'
}

if [[ -n $(missing) && -z ${TIDEGATE_PYTHON:-} ]]; then
  say "installing what requirements-docs.txt lists into .venv (20 MB)"
  "$python" -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt </dev/null ||
    die "pip could not install requirements-docs.txt (its message is above; the first time needs network access)"
fi
lacks=$(missing)
[[ -z $lacks ]] || die "$python lacks: $lacks ($python -m pip install -r requirements-docs.txt)"

"$python" -m sphinx -b html -W --keep-going -q -d build/docs/doctrees docs build/docs/html ||
  die "the site has warnings (above), which count as errors"
say "the site is in build/docs/html/index.html"
