"""Where the checkpoints of several processes lie, for those who do not read them: `sharded` does,
and takes a second to import."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from .distributed import Group
from .errors import UserError

FOLDER = "checkpoints"
TEMPORARY = ".tmp"  # ends the name of what is not whole
_NAME = re.compile(r"step-(\d{1,18})(?:\.(\d{1,9}))?")


def found_in(folder: Path) -> list[Path]:
    """The checkpoints below a run folder, the newest first."""
    if not (folder / FOLDER).is_dir():
        return []
    paths = [path for path in (folder / FOLDER).iterdir() if _NAME.fullmatch(path.name)]
    return sorted(paths, key=order_of, reverse=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint is of, by its name."""
    return order_of(path)[0]


def order_of(path: Path) -> tuple[int, int]:
    """What checkpoints are ordered by: the step, and which of that step it is."""
    step, again = _NAME.fullmatch(path.name).groups()
    return int(step), int(again or 0)


def clear(folder: Path) -> None:
    """Removes what killed processes left half written below a run folder."""
    for left in (folder / FOLDER).glob(f".*{TEMPORARY}"):
        shutil.rmtree(left, ignore_errors=True)


def remove(paths: Iterable[Path]) -> None:
    """Removes checkpoints: first their names, so that a kill leaves no half one under it."""
    for path in paths:
        going = path.with_name(f".{path.name}{TEMPORARY}")
        shutil.rmtree(going, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.replace(path, going)
        shutil.rmtree(going, ignore_errors=True)


def find_by_all(folder: Path, group: Group) -> None:
    """UserError where a process does not see the run folder that rank 0 made."""

    def mark() -> str:
        handle, name = tempfile.mkstemp(prefix=".found.", suffix=TEMPORARY, dir=folder)
        os.close(handle)
        return os.path.basename(name)

    def look() -> None:
        end = time.monotonic() + 10.0  # a network's file system may show it late
        while not marker.exists():
            if time.monotonic() > end:
                raise UserError(
                    f"out: {folder.absolute()} is not the folder that rank 0 made: name one that "
                    "all nodes share"
                )
            time.sleep(0.1)

    if group.size == 1:
        return
    marker = folder / group.first(mark)
    group.everywhere(look)
    if group.leads:
        marker.unlink()
