"""What scripts/setup.sh says when something is missing: one line, and nothing is made. Tools that
are not what they should be lie first on PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("python3", *(f"python3.{minor}" for minor in range(10, 15)))
# Asked for its version by `platform`; whether that fits, by its exit status.
OLD_PYTHON = 'case "$*" in *platform*) echo 3.8.20 ;; *) exit 1 ;; esac'
NOT_RUNNING = "exit 127"
# Fits, but has no ensurepip.
WITHOUT_VENV = f'case "$*" in *ensurepip*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac'
# Fits, lacks nothing, and has its programs beside it.
SOUND = f"""case "$*" in
*sysconfig*) dirname "$0" ;;
*ensurepip* | *importlib*) exit 0 ;;
*) exec {sys.executable} "$@" ;;
esac"""
FULL_DISK = "echo head; echo /dev/x 100 90 3145728 97% /"
OLD_COMPILER = 'case "$*" in *-dump*) echo 9.4.0 ;; *) exit 1 ;; esac'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts and the pins of a checkout without .venv, and tools/, which is first on PATH."""
    if os.name != "posix" or shutil.which("g++") is None:
        pytest.skip("needs bash and g++, as setup.sh does")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tools").mkdir()
    return tmp_path


def put(checkout: Path, name: str, script: str) -> str:
    """A program in tools/; its path."""
    path = checkout / "tools" / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def refusal(checkout: Path, **environment: str) -> str:
    """The one line, without the project's name."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CXX", "TIDEGATE_PYTHON")}
    done = subprocess.run(
        ["bash", checkout / "scripts" / "setup.sh"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**kept, "PATH": f"{checkout / 'tools'}:{os.environ['PATH']}", **environment},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    assert not (checkout / ".venv").exists()
    (line,) = done.stderr.splitlines()
    return line.removeprefix("tidegate: ")


def test_no_compiler(checkout: Path) -> None:
    line = refusal(checkout, CXX="no-such-compiler")
    assert line.startswith("no C++ compiler: no-such-compiler is not on PATH (")


def test_a_compiler_that_is_too_old(checkout: Path) -> None:
    old = put(checkout, "old-g++", OLD_COMPILER)
    line = refusal(checkout, CXX=old)
    assert line.startswith(f"{old} (9.4.0) does not compile C++20: g++ 11 or later is needed")


def test_no_python(checkout: Path) -> None:
    for name in PYTHONS:
        put(checkout, name, NOT_RUNNING)
    assert refusal(checkout).startswith("no python3 on PATH (")


def test_every_python_is_too_old(checkout: Path) -> None:
    for name in PYTHONS:
        put(checkout, name, NOT_RUNNING)
    put(checkout, "python3", OLD_PYTHON)
    assert refusal(checkout).startswith(
        "Python 3.10 to 3.14 is needed; python3 is 3.8.20 (Debian: apt-get install"
    )


def test_a_python_without_venv(checkout: Path) -> None:
    python = put(checkout, "python3", WITHOUT_VENV)
    assert refusal(checkout).startswith(f"{python} cannot make a virtual environment (Debian:")


def test_no_disk(checkout: Path) -> None:
    put(checkout, "python3", SOUND)
    put(checkout, "df", FULL_DISK)
    assert refusal(checkout).startswith(f"no disk: 3 GB free in {checkout}, about 9 GB are needed")


def test_a_given_python_that_is_not_there(checkout: Path) -> None:
    line = refusal(checkout, TIDEGATE_PYTHON="no-such-python")
    assert line == "PYTHON=no-such-python: no such program"


def test_a_given_python_that_does_not_run(checkout: Path) -> None:
    broken = put(checkout, "broken", NOT_RUNNING)
    assert refusal(checkout, TIDEGATE_PYTHON=broken) == f"PYTHON={broken} does not run"


def test_a_given_python_that_is_too_old(checkout: Path) -> None:
    old = put(checkout, "old", OLD_PYTHON)
    line = refusal(checkout, TIDEGATE_PYTHON=old)
    assert line == f"PYTHON={old} is 3.8.20: 3.10 to 3.14 is needed"


def test_a_given_python_without_torch(checkout: Path) -> None:
    bare = put(checkout, "bare", f'exec {sys.executable} -I -S "$@"')
    line = refusal(checkout, TIDEGATE_PYTHON=bare)
    assert line.startswith(f"PYTHON={bare} lacks: torch numpy ")


def test_a_cmake_that_is_too_old(checkout: Path) -> None:
    given = put(checkout, "given", SOUND)
    cmake = put(checkout, "cmake", "echo cmake version 3.22.1")
    line = refusal(checkout, TIDEGATE_PYTHON=given)
    assert (
        line
        == f"{cmake} is 3.22.1: 3.25 or later is needed, 3.28 for CUDA kernels (pip install cmake)"
    )
