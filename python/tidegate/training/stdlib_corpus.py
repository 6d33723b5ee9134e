"""The named corpus `stdlib`: real text that every machine with Python has.

The sources of the Python standard library, as this interpreter sees them, without what would make
the figures of two machines differ for no good reason: tests, packages that Linux distributions ship
apart (IDLE, tkinter, distutils, lib2to3, ensurepip, turtle), files made for one machine
(_sysconfigdata), and character tables written by a generator, which are not text that anybody
wrote. About 8.6 MB with Python 3.11.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

from .errors import UserError

NAME = "stdlib"

_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "distutils",
    "ensurepip",
    "idle_test",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}
_SKIPPED_FILES = {"turtle.py"}
# One file larger than this would be most of the validation split by itself.
_LARGEST_VALIDATION_FILE = 200_000


def stdlib_files(root: str | os.PathLike[str] | None = None) -> list[str]:
    """Paths relative to the standard library's folder (default: this interpreter's), sorted."""
    root = Path(sysconfig.get_path("stdlib") if root is None else root)
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not name.startswith("config-")
        ]
        for name in names:
            if name.endswith(".py") and name not in _SKIPPED_FILES:
                found.append(Path(folder, name).relative_to(root).as_posix())
    found.sort()
    return [name for name in found if not _is_made(root / name)]


def _is_made(path: Path) -> bool:
    """Whether a program wrote the file: build settings, or a character table by gencodec.py."""
    if path.name.startswith("_sysconfigdata"):
        return True
    with path.open("rb") as file:
        return b"gencodec" in file.read(400)


def split_files(sizes: dict[str, int], largest: int | None = None) -> tuple[list[str], list[str]]:
    """Splits files 9:1 by bytes into train and validation, the same way every time.

    Goes through the names in order and gives a file to validation whenever validation holds no more
    than a tenth of what was seen before it, so that validation is drawn from the whole range of
    names. Files larger than `largest` bytes always train.
    """
    train: list[str] = []
    valid: list[str] = []
    seen = held_out = 0
    for name in sorted(sizes):
        small = largest is None or sizes[name] <= largest
        if small and held_out * 10 <= seen:
            valid.append(name)
            held_out += sizes[name]
        else:
            train.append(name)
        seen += sizes[name]
    return train, valid


def load_stdlib(root: str | os.PathLike[str] | None = None) -> tuple[list[bytes], list[bytes]]:
    """(train, validation): the contents of the files.

    Training files come in the order of a hash of their names, which mixes subjects; validation
    files in the order of their names.

    Raises:
        UserError: this interpreter has no readable sources of its standard library.
    """
    root = Path(sysconfig.get_path("stdlib") if root is None else root)
    names = stdlib_files(root)
    if len(names) < 20:
        raise UserError(
            f"stdlib: found {len(names)} source files of the standard library in {root}, expected "
            "some hundreds: this Python was installed without sources; name a text file or folder"
        )
    train, valid = split_files(
        {name: (root / name).stat().st_size for name in names}, _LARGEST_VALIDATION_FILE
    )
    train.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return [(root / name).read_bytes() for name in train], [
        (root / name).read_bytes() for name in valid
    ]
