"""Run folders: config.json, metrics.jsonl, checkpoint.pt or checkpoints/, model/.

A file is written beside its place, flushed to disk and renamed, so that a kill at any moment leaves
the earlier one whole. The checkpoint before the last is kept, for the case that a disk damages the
last. metrics.jsonl only grows; the checkpoint records how long it was, and a resumed run cuts it
there, so that no step is in it twice.

One process writes checkpoint.pt, several write checkpoints/ (`sharded`). Either reads both.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import sys
import tempfile
import weakref
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..models._files import clear_temporaries, write_atomically
from . import sharded_folders
from .checkpoint_content import content_problem
from .errors import DamagedCheckpoint, UserError
from .metrics import read_metrics

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINT_FILE = "checkpoint.pt"
PREVIOUS_FILE = "checkpoint.previous.pt"
LOSS_PLOT = "loss.png"
MODEL_FOLDER = "model"
FORMAT = 1


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Writes tensors and plain containers atomically; UserError when the disk refuses."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)
    try:
        write_atomically(path, buffer.getbuffer())
    except OSError as error:
        raise UserError(
            f"{path}: cannot write the checkpoint: {error.strerror}; the earlier one is untouched"
        ) from error


def load_checkpoint(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Reads a checkpoint, and compares every part of it with the checksum that its archive holds.

    Raises:
        DamagedCheckpoint: it is truncated or damaged, or a field is missing or of another type.
        UserError: it is missing, cannot be read, or is of another format.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        with path.open("rb") as file:
            with zipfile.ZipFile(file) as archive:  # torch.load() looks at no checksum
                broken = archive.testzip()
            if broken is not None:
                raise zipfile.BadZipFile(broken)
            file.seek(0)
            content = torch.load(file, map_location=map_location, weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # zip, pickle and storage errors of many types
        size = path.stat().st_size
        raise DamagedCheckpoint(
            f"{path}: the checkpoint is truncated or damaged ({size} bytes); nothing was changed: "
            "delete it to start over, or put a whole one in its place"
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if type(found) is not int or found != FORMAT:
        raise UserError(f"{path}: expected a checkpoint of format {FORMAT}, got {found!r}")
    if problem := content_problem(content):
        raise DamagedCheckpoint(
            f"{path}: not the checkpoint of a run: {problem}; nothing was changed: delete it to "
            "start over, or put a whole one in its place"
        )
    return content


class FolderLock:
    """Keeps other processes out of a folder until this object goes or this process ends, however it
    ends (the system drops the lock, so nothing is left behind by a kill). One process may hold a
    folder several times: a run that is prepared again goes on where the first object stopped.
    """

    _held: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()

    def __init__(self, handle: int) -> None:
        weakref.finalize(self, os.close, handle)

    @classmethod
    def take(cls, path: Path) -> FolderLock:
        """The lock of a folder; BlockingIOError when another process has it."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        status = os.fstat(handle)
        key = (status.st_dev, status.st_ino)
        lock = cls._held.get(key)
        if lock is not None:
            os.close(handle)
            return lock
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise
        except OSError:  # a file system without locks: trained on without one
            pass
        lock = cls._held[key] = cls(handle)
        return lock


class Choice(NamedTuple):
    """A checkpoint that is whole. values: the content of checkpoint.pt, None in a process that did
    not look at it; else of run.json."""

    path: Path
    step: int
    values: dict[str, Any] | None

    def told(self) -> Choice:
        """What the other processes of a group need to know."""
        return self._replace(values=None) if self.path.suffix == ".pt" else self


def _looked_at(path: Path) -> dict[str, Any]:
    """The values of a Choice."""
    if path.suffix == ".pt":
        return load_checkpoint(path)
    from . import sharded

    return sharded.check(path)


def _is_newer(several: Path, file: Path) -> bool:
    """Whether a checkpoint of several processes is of a later step than one of one process, or of
    the same and written later."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        steps = sharded_folders.step_of(several), int(content["position"]["step"])
    except Exception:  # damaged, which is said where it is read
        steps = (0, 0)
    if steps[0] != steps[1]:
        return steps[0] > steps[1]
    return several.stat().st_mtime_ns > file.stat().st_mtime_ns


class RunFolder:
    """A run's folder on disk; UserError where its name is empty, which would be the folder that the
    process is in."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):
            raise UserError("out: expected the name of a run folder, got ''")
        self.path = Path(path)
        self.config = self.path / CONFIG_FILE
        self.metrics = self.path / METRICS_FILE
        self.checkpoint = self.path / CHECKPOINT_FILE
        self.previous = self.path / PREVIOUS_FILE
        self.model = self.path / MODEL_FOLDER
        self._is_whole = True  # checkpoint.pt, as far as anybody looked
        self._is_last = False  # and known to be newer than what several processes wrote

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, of one process or of several."""
        return self.checkpoint.exists() or bool(sharded_folders.found_in(self.path))

    def make(self) -> None:
        """Makes the folder, keeps other processes out of it as long as this object is there, and
        clears what killed ones left half written.

        Raises:
            UserError: nothing can be written there, or another process trains in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock.take(self.path)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            for folder in (self.path, self.model):
                clear_temporaries(folder)
            sharded_folders.clear(self.path)
            for left in self.path.glob(f".{CHECKPOINT_FILE}.*"):  # earlier versions' name
                left.unlink(missing_ok=True)
        except BlockingIOError as error:
            raise UserError(
                f"out: another process is training in {self.path}: wait until it is done, or name "
                "another --out"
            ) from error
        except OSError as error:
            raise UserError(
                f"out: cannot write to the run folder {self.path}: {error.strerror}"
            ) from error

    def write_config(self, values: dict[str, Any]) -> None:
        """Writes config.json atomically."""
        write_atomically(self.config, (json.dumps(values, indent=2) + "\n").encode())

    def save(self, content: dict[str, Any]) -> None:
        """Writes checkpoint.pt and keeps the one before beside it; UserError when the disk refuses,
        which leaves the last one where it is."""
        before = sharded_folders.found_in(self.path)
        if self._is_whole and self.checkpoint.exists() and not self._is_older(before):
            try:
                self._keep_previous()
            except OSError as error:
                raise UserError(
                    f"{self.previous}: cannot keep the checkpoint before: {error.strerror}; the "
                    "last one is untouched"
                ) from error
            sharded_folders.remove(before)
        save_checkpoint(self.checkpoint, content)
        self._is_whole = True
        self._is_last = True

    def prune(self) -> None:
        """After several processes wrote a checkpoint: removes all but it and the one before."""
        several = sharded_folders.found_in(self.path)
        sharded_folders.remove(several[2:])
        self.previous.unlink(missing_ok=True)
        if len(several) > 1:
            self.checkpoint.unlink(missing_ok=True)

    def forget(self) -> None:
        """Removes the checkpoints of a run that begins anew."""
        self.previous.unlink(missing_ok=True)  # of a run whose last one somebody deleted

    def _is_older(self, others: list[Path]) -> bool:
        """Whether the last checkpoint is one of `others`, which several processes wrote."""
        return bool(others) and not self._is_last

    def _keep_previous(self) -> None:
        """Gives the last checkpoint its second name; there is no moment without a checkpoint.pt."""
        second = self.path / f".{PREVIOUS_FILE}.tmp"
        second.unlink(missing_ok=True)
        try:
            os.link(self.checkpoint, second)
        except OSError:  # a file system without links
            write_atomically(self.previous, self.checkpoint.read_bytes())
            return
        os.replace(second, self.previous)
        second.unlink(missing_ok=True)  # of two names of one file, replace() keeps both

    def load(self) -> dict[str, Any]:
        """The last checkpoint, whole and on the CPU; where that is damaged, the one before, which
        stderr is told.

        Raises:
            UserError: there is none, or none that is whole.
        """
        return self.read(self.choose())

    def choose(self) -> Choice:
        """The last checkpoint that is whole; see load()."""
        problem: UserError | None = None
        for path in self._by_age():
            try:
                values = _looked_at(path)
            except UserError as error:
                if problem is None and not isinstance(error, DamagedCheckpoint):
                    raise
                problem = problem or error
                continue
            found = Choice(path, values["position"]["step"], values)
            self._is_last = path == self.checkpoint
            if problem is not None:
                self._is_whole = self._is_last
                what = str(problem).partition(";")[0]
                print(f"{what}; {path}, of step {found.step}, is used instead", file=sys.stderr)
            return found
        raise problem or UserError(f"{self.checkpoint}: no such checkpoint")

    def _by_age(self) -> list[Path]:
        """The checkpoints, the newest first."""
        files = [self.checkpoint, self.previous] if self.checkpoint.exists() else []
        files = [path for path in files if path.is_file()]
        several, ordered = sharded_folders.found_in(self.path), []
        while several and files:
            ordered.append((several if _is_newer(several[0], files[0]) else files).pop(0))
        return [*ordered, *several, *files]

    def read(self, choice: Choice, **how: Any) -> dict[str, Any]:
        """The content of a checkpoint that was chosen, here or in another process; how: see
        `sharded.read`."""
        if choice.path.suffix != ".pt":
            from . import sharded

            return sharded.read(choice.path, choice.values, **how)
        if choice.values is not None:
            return choice.values
        return torch.load(choice.path, map_location="cpu", weights_only=True, mmap=True)

    def append_metrics(self, values: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl, or, where the disk refuses, none of it."""
        line = memoryview((json.dumps(values) + "\n").encode())
        before = self.metrics_size()
        try:
            with self.metrics.open("ab", buffering=0) as file:
                while line:
                    line = line[file.write(line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self.cut_metrics(before)
            raise UserError(
                f"{self.metrics}: cannot be written: {error.strerror}; the last checkpoint is "
                "untouched"
            ) from error

    def metrics_size(self) -> int:
        """Bytes of metrics.jsonl."""
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def cut_metrics(self, size: int) -> None:
        """Drops what was written to metrics.jsonl after it had `size` bytes, and a line without an
        end, which the next one would continue."""
        if not self.metrics.exists():
            return
        with self.metrics.open("rb") as file:
            kept = file.read(size).rfind(b"\n") + 1
        if kept < self.metrics_size():
            os.truncate(self.metrics, kept)


__all__ = ["RunFolder", "load_checkpoint", "read_metrics", "save_checkpoint", "write_atomically"]
