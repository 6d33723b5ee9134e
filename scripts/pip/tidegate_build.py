"""What pip calls: scikit-build-core, behind two things that pip itself would say too late or not.

Without torch nothing can be built; pip would first download what tidegate depends on, torch among
it, for minutes, and then fail. And pip shows nothing of a build that takes minutes.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

from scikit_build_core import build as _inner
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_NO_TORCH = """
tidegate is compiled against the torch that is installed, and this Python has none:

    {python} -m pip install torch

comes first (2.11 or later; --index-url https://download.pytorch.org/whl/cpu for one without CUDA).
"""
_NOTICE = (
    "tidegate: compiling takes about 7 minutes on two cores with CUDA kernels, about 3 without "
    "(CMAKE_ARGS=-DTIDEGATE_CUDA=OFF); pip install -v shows every step"
)


def _check_torch() -> None:
    """Exits with what to do where the user's Python has no torch. -I: in pip's isolation the build
    has an import path of its own, and only so the user's is seen (cmake/TidegateTorch.cmake)."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode != 0:
        raise SystemExit(_NO_TORCH.format(python=sys.executable))


def _notice() -> None:
    """One line to whoever waits: pip keeps what a build prints to itself, unless asked by -v."""
    print(_NOTICE, file=sys.stderr)
    with contextlib.suppress(OSError), open("/dev/tty", "w", encoding="utf-8") as terminal:
        print(f"\n  {_NOTICE}", file=terminal)


def prepare_metadata_for_build_wheel(*arguments: Any, **keywords: Any) -> str:
    _check_torch()
    return _inner.prepare_metadata_for_build_wheel(*arguments, **keywords)


def prepare_metadata_for_build_editable(*arguments: Any, **keywords: Any) -> str:
    _check_torch()
    return _inner.prepare_metadata_for_build_editable(*arguments, **keywords)


def build_wheel(*arguments: Any, **keywords: Any) -> str:
    _check_torch()
    _notice()
    return _inner.build_wheel(*arguments, **keywords)


def build_editable(*arguments: Any, **keywords: Any) -> str:
    _check_torch()
    return _inner.build_editable(*arguments, **keywords)
