"""Run folders: config.json, metrics.jsonl, checkpoint.pt, model/.

A file is written beside its place, flushed to disk and renamed, so that a kill at any moment leaves
the earlier one whole. metrics.jsonl only grows; the checkpoint records how long it was, and a
resumed run cuts it there, so that no step is in it twice.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch

from .errors import UserError

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINT_FILE = "checkpoint.pt"
LOSS_PLOT = "loss.png"
MODEL_FOLDER = "model"
FORMAT = 1


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Writes `data` to a temporary file of the same folder, flushes it to disk, renames it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
    """Reads a checkpoint.

    Raises:
        UserError: it is missing, truncated, damaged, or of another format.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # zip, pickle and storage errors of many types
        size = path.stat().st_size
        raise UserError(
            f"{path}: the checkpoint is truncated or damaged ({size} bytes); nothing was changed: "
            "delete it to start over, or put a whole one in its place"
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise UserError(f"{path}: expected a checkpoint of format {FORMAT}, got {found!r}")
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


class RunFolder:
    """A run's folder on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / CONFIG_FILE
        self.metrics = self.path / METRICS_FILE
        self.checkpoint = self.path / CHECKPOINT_FILE
        self.model = self.path / MODEL_FOLDER

    def make(self) -> None:
        """Makes the folder and keeps other processes out of it as long as this object is there;
        UserError when nothing can be written there, or another process trains in it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock.take(self.path)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            for left_by_a_kill in self.path.glob(f".{CHECKPOINT_FILE}.*"):
                left_by_a_kill.unlink()
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

    def append_metrics(self, values: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def metrics_size(self) -> int:
        """Bytes of metrics.jsonl."""
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def cut_metrics(self, size: int) -> None:
        """Drops what was written to metrics.jsonl after it had `size` bytes."""
        if self.metrics_size() > size:
            with self.metrics.open("r+b") as file:
                file.truncate(size)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line cut short by a kill is passed over."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: byte {error.start}") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            if number + 1 == len(lines):
                break
            raise UserError(f"{path}: line {number + 1} is not JSON") from error
    return rows
