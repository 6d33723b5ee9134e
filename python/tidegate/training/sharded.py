"""Checkpoints that several processes write, each its part, by torch.distributed.checkpoint.

A checkpoint is a folder of the run's `checkpoints/`:

    step-12/__0_0.distcp, __1_0.distcp, ...   tensors, an archive with checksums each
    step-12/.metadata                         what lies where
    step-12/run.json                          the rest, and what the files must look like

It is written under another name and renamed when all of it is on the disk, so that what has the
name `step-N` is whole. Any number of processes reads it, one included.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from .._sharding import is_sharded
from ..models._files import write_atomically
from .checkpoint_content import run_problem
from .distributed import ALONE, Group, OfAll
from .errors import DamagedCheckpoint, UserError
from .muon import Muon
from .sharded_folders import FOLDER, TEMPORARY, found_in, order_of, step_of

_RUN = "run.json"
_METADATA = ".metadata"
_FORMAT = 1
_READERS = 8


# ---- tensors by name: "model.embedding.weight", "optimizer.muon.state.3.momentum", "rng.0.cpu"


def _optimizers(states: dict[str, Any], name: str = "optimizer") -> list[tuple[str, dict]]:
    """Each optimiser's state dict, with its name: one, or those that step as one."""
    if "state" in states:
        return [(name, states)]
    return [pair for part, each in states.items() for pair in _optimizers(each, f"{name}.{part}")]


def _tensors(content: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of model and optimiser by name."""
    found = {f"model.{name}": t for name, t in content["model"].items()}
    for part, states in _optimizers(content["optimizer"]):
        for number, state in states["state"].items():
            found.update({f"{part}.state.{number}.{key}": t for key, t in state.items()})
    return found


def _likes(model: dict[str, Tensor], optimizer: Any) -> dict[str, Tensor]:
    """What _tensors() of a checkpoint of this model and optimiser holds after a step, by name and
    placed as they are: a parameter stands for the states that are laid out as it is."""
    found = {f"model.{name}": t for name, t in model.items()}
    parts = vars(optimizer) if hasattr(optimizer, "muon") else {"": optimizer}
    for part, each in parts.items():
        name = f"optimizer.{part}" if part else "optimizer"
        parameters = [p for group in each.param_groups for p in group["params"]]
        for number, p in enumerate(parameters):
            is_muon = isinstance(each, Muon)
            for key in ("momentum",) if is_muon else ("exp_avg", "exp_avg_sq"):
                found[f"{name}.state.{number}.{key}"] = p.detach()
            if not is_muon:
                found[f"{name}.state.{number}.step"] = torch.zeros((), device=p.device)
    return found


def _nested(tensors: dict[str, Tensor], groups: dict[str, list[list[int]]]) -> dict[str, Any]:
    """model and optimizer of a checkpoint from its tensors by name."""
    model, states = {}, {part: {} for part in groups}
    for name, t in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            model[rest] = t
        elif kind == "optimizer":
            part, _, rest = name.rpartition(".state.")
            number, _, key = rest.partition(".")
            if part not in states or not number.isdecimal():
                raise DamagedCheckpoint(f"tensor {name!r} has no place")
            states[part].setdefault(int(number), {})[key] = t
    optimizer: dict[str, Any] = {}
    for part, found in states.items():
        own = {"state": found, "param_groups": [{"params": params} for params in groups[part]]}
        _, _, name = part.partition(".")
        if name:
            optimizer[name] = own
        else:
            optimizer.update(own)
    return {"model": model, "optimizer": optimizer}


# ---- writing


class Saver:
    """Writes a run's checkpoints beside the training that goes on.

    group: every process calls the same methods at the same steps. prune: given the last checkpoint,
    removes all but it and the one before.
    """

    def __init__(
        self, folder: Path, group: Group, device: torch.device, prune: Callable[[Path], None]
    ) -> None:
        self._folder = folder
        self._prune = prune
        self._group = group
        # Memory that the device copies into at full speed is dear to get, so it is kept.
        self._stager = BlockingAsyncStager(device.type == "cuda")
        self._pending: Future | None = None
        self._target: Path | None = None
        self._renamed: Future[str | None] = Future()  # what went wrong then

    def prepare(self, model: dict[str, Tensor], optimizer: Any, rng: dict[str, Tensor]) -> None:
        """Takes the memory that save() copies into, before training begins: on a GPU the first
        save would stand still for it."""
        if self._stager.cache_staged_state_dict:
            self._stager.stage({**self._own(_likes(model, optimizer)), **self._named(rng)})

    def save(self, content: dict[str, Any]) -> None:
        """Copies a checkpoint's content, with this process's parts as DTensors where they are
        sharded, and starts to write it.

        Raises:
            UserError: the checkpoint before could not be written.
        """
        self.wait()
        step = content["position"]["step"]
        written = [path for path in found_in(self._folder) if step_of(path) == step]
        again = 1 + max((order_of(path)[1] for path in written), default=-1)
        name = self._group.first(lambda: f"step-{step}" + (f".{again}" if again else ""))
        target = self._folder / FOLDER / name
        temporary = target.with_name(f".{name}{TEMPORARY}")
        self._group.first(lambda: _make(temporary))
        values = {
            "format": _FORMAT,
            **{k: content[k] for k in ("position", "samples", "metrics_size", "fingerprint")},
            "groups": {
                part: [group["params"] for group in states["param_groups"]]
                for part, states in _optimizers(content["optimizer"])
            },
            "processes": self._group.size,
        }
        own = {**self._own(_tensors(content)), **self._named(content["rng"])}
        kept = self._stager.state_dict_cache
        if kept is not None and kept.keys() != own.keys():
            self._stager.state_dict_cache = None
        self._target = target
        pending = dcp.async_save(
            own,
            storage_writer=dcp.FileSystemWriter(temporary),
            async_stager=self._stager,
            process_group=self._group.checkpoints,
        )
        if self._group.leads:
            self._renamed = renamed = Future()

            def end(written: Future) -> None:  # in the thread that wrote
                failed = written.exception() is not None
                renamed.set_result(None if failed else self._commit(temporary, target, values))

            pending.add_done_callback(end)
        self._pending = pending

    def _named(self, rng: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"rng.{self._group.rank}.{key}": t for key, t in rng.items()}

    def _own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this process writes: its part of what is sharded, and of what all hold as many bytes
        as the others."""
        own = {name: t for name, t in tensors.items() if is_sharded(t)}
        sizes = [0] * self._group.size
        alike = [(t.numel() * t.element_size(), name) for name, t in tensors.items()]
        for size, name in sorted(alike, reverse=True):
            if name in own:
                continue
            rank = sizes.index(min(sizes))
            sizes[rank] += size
            if rank == self._group.rank:
                own[name] = tensors[name]
        return own

    def _commit(self, temporary: Path, target: Path, values: dict[str, Any]) -> str | None:
        """Gives a checkpoint that is written its name; what went wrong."""
        try:
            _write_run(temporary, values)
            os.rename(temporary, target)
            _sync(target.parent)
            self._prune(target)
        except Exception as error:
            return _detail(error)
        return None

    def wait(self) -> None:
        """Until what was begun is on the disk.

        Raises:
            UserError: it could not be written; the checkpoint before is untouched.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        problem: str | None = None
        try:
            pending.result()
        except dcp.CheckpointException as error:  # every process has the same one
            problem = _detail(_first_failure(error))
        problem = problem or self._group.first(lambda: self._renamed.result())
        if problem is not None:
            raise OfAll(
                f"{self._target}: cannot write the checkpoint: {problem}; the earlier one is "
                "untouched"
            )


def _detail(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error).partition("\n")[0] or repr(error)


def _make(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{folder.parent}: cannot write the checkpoint: {error.strerror}; the earlier one is "
            "untouched"
        ) from error


def _first_failure(error: dcp.CheckpointException) -> BaseException:
    """What went wrong in the lowest rank that says so."""
    return min(error.failures.items())[1][0]


def _write_run(folder: Path, values: dict[str, Any]) -> None:
    """run.json, and everything that the folder holds to the disk."""
    files = {path.name: path.stat().st_size for path in sorted(folder.glob("*.distcp"))}
    values = {**values, "files": files, _METADATA: zlib.crc32((folder / _METADATA).read_bytes())}
    values["crc32"] = _checksum(values)
    write_atomically(folder / _RUN, (json.dumps(values, indent=1) + "\n").encode())
    _sync(folder)


def _checksum(values: dict[str, Any]) -> int:
    rest = {name: value for name, value in values.items() if name != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _sync(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError:  # a file system that cannot
        pass
    finally:
        os.close(handle)


# ---- reading


def check(path: Path) -> dict[str, Any]:
    """run.json of a checkpoint, all of whose bytes are as they were written.

    Raises:
        DamagedCheckpoint: they are not.
        UserError: it cannot be read, or is of another format.
    """
    try:
        values = _read_run(path)
        metadata = dcp.FileSystemReader(path).read_metadata()  # a pickle: its checksum is right
        places: dict[str, list] = {name: [] for name in values["files"]}
        for info in metadata.storage_data.values():
            places[info.relative_path].append((info.offset, info.length))
        with ThreadPoolExecutor(_READERS) as pool:
            for name, wrong in pool.map(lambda each: _check_file(path, *each), places.items()):
                if wrong:
                    raise _damaged(path, f"{name}, {wrong}")
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise _damaged(path, f"{Path(error.filename or path).name} is missing") from error
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    return values


def _read_run(path: Path) -> dict[str, Any]:
    try:
        values = json.loads((path / _RUN).read_bytes())
    except ValueError as error:
        raise _damaged(path, _RUN) from error
    if not isinstance(values, dict) or values.get("crc32") != _checksum(values):
        raise _damaged(path, _RUN)
    if values.get("format") != _FORMAT:
        raise UserError(
            f"{path}: expected a checkpoint of format {_FORMAT}, got {values.get('format')!r}"
        )
    if problem := run_problem(values):
        raise _damaged(path, f"{_RUN}: {problem}")
    if zlib.crc32((path / _METADATA).read_bytes()) != values[_METADATA]:
        raise _damaged(path, _METADATA)
    return values


def _check_file(path: Path, name: str, places: list[tuple[int, int]]) -> tuple[str, str]:
    """The file's name, and where an archive in it is not what its checksums say."""
    with (path / name).open("rb") as file:
        for offset, length in sorted(places):
            file.seek(offset)
            data = file.read(length)
            try:
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    broken = archive.testzip() is not None
            except Exception:  # of many types
                broken = True
            if broken or len(data) < length:
                return name, f"byte {offset}"
    return name, ""


def _damaged(path: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{path}: the checkpoint is truncated or damaged ({what}); nothing was changed: delete it "
        "to start over, or put a whole one in its place"
    )


def read(
    path: Path,
    values: dict[str, Any],
    *,
    likes: tuple[dict[str, Tensor], Any] | None = None,
    group: Group = ALONE,
) -> dict[str, Any]:
    """What `checkpoint.load_checkpoint` returns, of a checkpoint that check() has looked at.

    values: what it returned. likes: the model's state dict and its optimiser, as whose tensors
    those of the checkpoint are placed; None: whole, on the CPU. Its "rng" is None where this
    process's generators are not in it.
    """
    reader = dcp.FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    given = {} if likes is None else _likes(*likes)
    rng = f"rng.{group.rank}."
    has_own = group.rank == 0 or values["processes"] == group.size
    tensors: dict[str, Tensor] = {}
    for name, what in stored.items():
        if name.startswith("rng.") and not (has_own and name.startswith(rng)):
            continue
        like = given.get(name)
        if like is not None and like.shape == what.size and like.dtype == what.properties.dtype:
            tensors[name] = torch.empty_like(like)
        else:
            tensors[name] = torch.empty(what.size, dtype=what.properties.dtype)
    alone = group.checkpoints is None
    try:
        with warnings.catch_warnings():
            # It warns that one process reads alone, as it was told.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader, process_group=group.checkpoints, no_dist=alone)
        nested = _nested(tensors, values["groups"])
    except dcp.CheckpointException as error:
        raise UserError(f"{path}: cannot be read: {_first_failure(error)}") from error
    except UserError as error:
        raise _damaged(path, str(error)) from error
    own = {key.removeprefix(rng): t for key, t in tensors.items() if key.startswith(rng)}
    kept = ("position", "samples", "metrics_size", "fingerprint")
    return {**nested, **{name: values[name] for name in kept}, "rng": own or None}
