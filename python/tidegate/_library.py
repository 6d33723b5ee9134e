"""Finds libtidegate.so and loads it, after checking that it fits the torch that is here.

Built against one torch and loaded by another, a C++ library fails with an undefined symbol that
names neither. So the build records torch's version and CUDA variant in ``build_info.json`` beside
the library, and both are compared before anything is loaded.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import torch

_LIBRARY = "libtidegate.so"
_INFO = "build_info.json"
_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


class LibraryError(ImportError):
    """libtidegate.so is missing, or was built for another torch."""


@functools.cache
def library_dir() -> Path:
    """The folder that holds libtidegate.so: ``lib/`` of an installed package or of a build tree.

    Raises:
        LibraryError: there is no library in either.
    """
    # An editable install has its sources in one folder and its libraries in another; both are in
    # __path__. Nothing is resolved: build/python/tidegate is a link to the sources.
    packages = [Path(folder).absolute() for folder in sys.modules[__package__].__path__]
    candidates = [package / "lib" for package in packages] + [packages[0].parent.parent / "lib"]
    for folder in candidates:
        if (folder / _LIBRARY).is_file():
            return folder
    looked = " and ".join(str(folder) for folder in candidates)
    raise LibraryError(
        f"tidegate: {_LIBRARY} is not in {looked}. From a checkout, run `make build` and put "
        "build/python on PYTHONPATH, or install the package: pip install --no-build-isolation ."
    )


def build_info() -> dict[str, str]:
    """What the library was built for and with.

    Keys: version, torch, torch_variant ("cu130", "cpu"), cuda ("nvcc 13.0.88", or "off: why"),
    architectures ("" without CUDA), compiler, build_type, commit, library (its path).
    """
    folder = library_dir()
    try:
        info = json.loads((folder / _INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LibraryError(f"tidegate: cannot read {folder / _INFO}: {error}") from error
    info["library"] = str(folder / _LIBRARY)
    return info


def _variant(cuda: str | None) -> str:
    """torch.version.cuda as the suffix of torch's wheels: "13.0" -> "cu130", None -> "cpu"."""
    return "cu" + "".join(cuda.split(".")[:2]) if cuda else "cpu"


def _major_minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def check_torch(info: dict[str, str], version: str, cuda: str | None) -> None:
    """Raises LibraryError unless the library that `info` describes fits this torch: its version,
    and, with CUDA kernels, its CUDA; without them nothing in it depends on that."""
    same_version = _major_minor(info["torch"]) == _major_minor(version)
    if same_version and (info["torch_variant"] == _variant(cuda) or not info["architectures"]):
        return
    built = f"{info['torch']} ({info['torch_variant']})"
    found = f"{version.split('+')[0]} ({_variant(cuda)})"
    raise LibraryError(
        f"tidegate was built for torch {built}, found {found}: "
        f"in tidegate's source folder run `{_REBUILD}`"
    )


@functools.cache
def load() -> None:
    """Loads libtidegate.so: registers torch.ops.tidegate.*. Once a process.

    Raises:
        LibraryError: the library is missing, was built for another torch, or cannot be loaded.
    """
    info = build_info()
    check_torch(info, torch.__version__, torch.version.cuda)
    try:
        torch.ops.load_library(info["library"])
    except OSError as error:
        raise LibraryError(f"tidegate: {info['library']} cannot be loaded: {error}") from error


def stand_ins(names: Iterable[str]) -> dict[str, Callable[..., NoReturn]]:
    """For every op of `names` that the loaded library lacks, a function that says so when called:
    the Python sources are newer than the build. Nothing is put in the way of those it has."""
    return {name: _stand_in(name) for name in names if not hasattr(torch.ops.tidegate, name)}


def _stand_in(name: str) -> Callable[..., NoReturn]:
    def stale(*_args: object, **_keywords: object) -> NoReturn:
        raise LibraryError(
            f"tidegate.ops.{name}: {library_dir() / _LIBRARY} has no such op: it is older than "
            "these Python sources. Rebuild: make build (an installed package: "
            f"`{_REBUILD}` in tidegate's source folder)"
        )

    return stale
