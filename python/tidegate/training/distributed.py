"""The processes of a run: who they are, what they agree on, and which of them is missing.

torchrun starts them and torch.distributed carries what they send; `parallel` says how the model is
shared. What is here is what a run needs beside that: every process takes the same decisions at the
same step, and when one fails, is killed or hangs, all of them end with one line that names it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UserError
from .runtime import resolve_device

T = TypeVar("T")

PARALLEL = ("none", "ddp", "fsdp")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FAILURE = "failure"
# The device's collectives wait longer than those between hosts, which can name who is missing.
_DEVICE_MARGIN = 60.0
_CHECKPOINT_TIMEOUT = timedelta(hours=2)  # disks may be slow
_LONGEST_GRACE = 20.0  # torchrun kills what has not ended 30 s after it was told to


class OfAll(UserError):
    """What every process of a run raises alike, or says about another: the line names none."""


class Elsewhere(UserError):
    """What ends this process happened in another one, which says so."""


class Unreachable(UserError):
    """This process does not reach the others, so it has to say so itself."""


class Group:
    """The processes that train together. This class is of one that trains alone, in which there is
    nothing to agree on.

    rank: this process among `size`. mode: "none", "ddp" or "fsdp". local_rank: among those of its
    host.
    """

    rank = 0
    size = 1
    mode = "none"
    local_rank = 0
    checkpoints: Any = None  # the process group that checkpoints are written with

    @property
    def leads(self) -> bool:
        """Whether this process shows progress and writes the run folder's own files."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of this process by the setting `name`."""
        return resolve_device(name)

    def first(self, work: Callable[[], T]) -> T:
        """What `work` returns in rank 0, which alone does it; the others wait for it."""
        return work()

    def everywhere(self, work: Callable[[], T]) -> T:
        """What `work` returns in this process, once all have done it."""
        return work()

    def error(self, error: UserError) -> UserError:
        """An error that every process raises at this place."""
        return error

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        return tensor

    def agree(self, stop: bool, seconds: float) -> tuple[bool, float]:
        """Whether any process is asked to stop, and the time by rank 0's clock."""
        return stop, seconds

    def meet(self) -> None:
        """Waits until every process is here. A device waits for the others without end or words, so
        what makes the host wait for the device comes after this."""

    def watch(self, where: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """Within it, that another process is gone or hangs is an OfAll that names it; where: what
        this one is at, in words."""
        return contextlib.nullcontext()

    def leave(self) -> None:
        """At the end of a run: nothing is sent any more."""


ALONE = Group()
_joined: Processes | None = None  # the group of this process, for complain()


_joins = 0  # every process of a run joins as often


def is_launched() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return all(name in os.environ for name in _VARIABLES)


def join(mode: str, *, device: str, timeout: float) -> Group:
    """The processes that torchrun started, once all are there.

    mode: "none", "ddp" or "fsdp". timeout: seconds that one waits for another.

    Raises:
        UserError: mode does not fit how this process was started, or some do not come.
    """
    if mode not in PARALLEL:
        raise UserError(f"train: parallel: expected one of {', '.join(PARALLEL)}, got {mode!r}")
    if mode == "none":
        if is_launched() and int(os.environ["WORLD_SIZE"]) > 1:
            raise UserError(
                "train: parallel: expected ddp (every process holds the model) or fsdp (each holds "
                f"its share) with the {os.environ['WORLD_SIZE']} processes that torchrun started, "
                "got none"
            )
        return ALONE
    if not is_launched():
        raise UserError(
            f"train: parallel: {mode} takes processes that torchrun starts: torchrun "
            "--nproc-per-node N -m tidegate train ...; got one by itself"
        )
    if dist.is_initialized():
        raise UserError("train: parallel: expected no process group yet, got one")
    return Processes(mode, device, timeout)


class Processes(Group):
    """The processes that torchrun started."""

    def __init__(self, mode: str, device: str, timeout: float) -> None:
        global _joined
        self.mode = mode
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self._host = socket.gethostname()
        self._timeout = timeout
        self._calls = 0
        self._last_meeting = time.monotonic()
        self._interval = 0.0
        self._processes: list[int] = []
        kind = self.device(device)
        self._store = self._reach()
        _joined = self
        self._hosts = self._roll_call()
        waits = timedelta(seconds=timeout)
        is_cuda = kind.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(kind)
        with self.watch(lambda: "at the start"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
                store=dist.PrefixStore("groups", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout + _DEVICE_MARGIN) if is_cuda else waits,
            )
            self._control = dist.new_group(backend="gloo", timeout=waits)
            self.checkpoints = dist.new_group(backend="gloo", timeout=_CHECKPOINT_TIMEOUT)

    def device(self, name: str) -> torch.device:
        """The GPU of this process's place on its host, or the CPU."""
        device = resolve_device(name)
        if device.type != "cuda":
            return device
        if device.index is not None:
            raise UserError(
                f"device: expected auto, cpu or cuda with --parallel {self.mode}, where each "
                f"process takes the GPU of its place on the host; got {name}"
            )
        if self.local_rank >= torch.cuda.device_count():
            raise Unreachable(
                f"device: rank {self.rank} is process {self.local_rank + 1} on {self._host}, which "
                f"has {torch.cuda.device_count()} GPUs: lower --nproc-per-node"
            )
        return torch.device("cuda", self.local_rank)

    def _reach(self) -> dist.Store:
        """The store that all processes see, for this run alone."""
        global _joins
        _joins += 1
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        self.holds_store = self.leads and not _torchrun_holds_store()
        try:
            store = dist.TCPStore(
                host,
                int(port),
                is_master=self.holds_store,
                timeout=timedelta(seconds=self._timeout),
                wait_for_workers=False,  # the roll call says who is missing
                multi_tenant=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise Unreachable(
                f"train: rank {self.rank} on {self._host} cannot reach {host}:{port} within "
                f"{self._timeout:g} s: start all {self.size} processes within that time, and look "
                f"whether that host answers at that port"
            ) from error
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"tidegate/{restart}/{_joins}", store)

    def _roll_call(self) -> list[str]:
        """Every rank's host, once all are there."""
        keys = [f"here/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], f"{os.getpid()} {self._host}")
        end = time.monotonic() + self._timeout
        while not self._store.check(keys):
            if time.monotonic() > end:
                missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                raise OfAll(
                    f"train: {_ranks(missing)} of {self.size} did not come within "
                    f"{self._timeout:g} s: start all processes within that time (--timeout), on "
                    "every node with the same --nnodes and --nproc-per-node"
                )
            time.sleep(0.02)
        told = [self._store.get(key).decode().partition(" ") for key in keys]
        self._processes = [int(process) for process, _, _ in told]
        return [host for _, _, host in told]

    # What rank 0 tells the others goes through the store, which waits as long as somebody is there:
    # rank 0 may train a tokenizer, or read a terabyte.

    def _key(self) -> str:
        self._calls += 1
        return f"call/{self._calls}"

    def _wait(self, keys: list[str]) -> None:
        """Until all keys are there; Elsewhere when a process fails before. The store's own wait()
        warns of every second."""
        pause = 0.001
        while not self._store.check(keys):
            self._refuse_to_wait()
            time.sleep(pause)
            pause = min(1.5 * pause, 0.2)

    def _refuse_to_wait(self) -> None:
        if self._store.check([_FAILURE]):
            raise Elsewhere(f"train: {self._store.get(_FAILURE).decode()}")

    def first(self, work: Callable[[], T]) -> T:
        key = self._key()
        if not self.leads:
            self._wait([key])
            return pickle.loads(self._store.get(key))
        try:
            result = work()
        except UserError as error:
            raise self.error(error) from error
        self._store.set(key, pickle.dumps(result))
        return result

    def everywhere(self, work: Callable[[], T]) -> T:
        key = self._key()
        result = work()
        self._store.set(f"{key}/{self.rank}", b"done")
        self._wait([f"{key}/{rank}" for rank in range(self.size)])
        return result

    def error(self, error: UserError) -> UserError:
        return error if isinstance(error, (OfAll, Elsewhere)) else OfAll(str(error))

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def agree(self, stop: bool, seconds: float) -> tuple[bool, float]:
        told = torch.tensor([float(stop), seconds if self.leads else 0.0], dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._control)
        now = time.monotonic()
        self._interval, self._last_meeting = now - self._last_meeting, now
        return bool(told[0]), float(told[1])

    def meet(self) -> None:
        self.agree(False, 0.0)

    @contextlib.contextmanager
    def watch(self, where: Callable[[], str]) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if _is_of_the_connection(error):
                raise self._what_happened(str(error), where()) from error
            raise

    def _what_happened(self, text: str, where: str) -> UserError:
        """Why a collective failed: every process that gets here says so in the store, and those
        that do not are gone or hang. Of its own host a process sees which are gone; they may keep
        others, which wait for somebody that waits for them, from getting here."""
        hangs = "imeout" in text or "imed out" in text
        grace = min(2.0 + 2.0 * self._interval, _LONGEST_GRACE)
        keys = [f"failed/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], b"")
            end = time.monotonic() + grace
            gone: list[int] = []
            while time.monotonic() < end and not gone and not self._store.check(keys):
                self._refuse_to_wait()
                time.sleep(0.05)
                gone = self._find_gone()
            missing = gone or [r for r, key in enumerate(keys) if not self._store.check([key])]
            hangs = hangs and not gone
            self._refuse_to_wait()
        except Elsewhere as error:
            return error
        except RuntimeError:  # the store went with the process that holds it
            missing, hangs = [0], False
        again = "the same command goes on from the last checkpoint"
        if not missing:
            return OfAll(f"train: the connection between the processes broke {where}: {text}")
        names = ", ".join(f"{_ranks([r])} of {self.size} on {self._hosts[r]}" for r in missing)
        if hangs:
            return OfAll(
                f"train: {names} did not answer for {self._timeout:g} s (--timeout) {where}: end "
                f"it where it hangs; {again}"
            )
        return OfAll(f"train: {names} is gone {where}, killed or crashed: {again}")

    def _find_gone(self) -> list[int]:
        """The ranks whose processes ended, as far as anybody saw."""
        for rank, (process, host) in enumerate(zip(self._processes, self._hosts, strict=True)):
            if host == self._host and not _is_running(process):
                self._store.set(f"gone/{rank}", b"")
        return [rank for rank in range(self.size) if self._store.check([f"gone/{rank}"])]

    def leave(self) -> None:
        global _joined
        if _joined is not self:
            return
        key = self._key()
        self._store.set(f"{key}/{self.rank}", b"")
        if self.leads:  # it may hold the store, so it goes last
            self._wait([f"{key}/{rank}" for rank in range(self.size)])
        _joined = None
        dist.destroy_process_group()

    def claim(self, problem: str) -> bool:
        """Whether this process is the first to fail, and so the one to say why."""
        own = f"{self.rank}: {problem}"
        try:
            found = self._store.compare_set(_FAILURE, "", own).decode()
        except RuntimeError:  # the store is gone, and whoever held it
            return True
        return found == own

    def name(self) -> str:
        """This process, in words."""
        return f"{_ranks([self.rank])} of {self.size} on {self._host}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _torchrun_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_running(process: int) -> bool:
    """Whether a process of this host has not ended; one that nobody asked about yet has."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _is_of_the_connection(error: Exception) -> bool:
    """Whether it is what torch.distributed raises when another process does not answer."""
    text = str(error)
    if isinstance(error, dist.DistError) or "NCCL" in text or "gloo" in text:
        return True
    return isinstance(error, RuntimeError) and ("onnection" in text or "imed out wait" in text)


def complain(error: BaseException, problem: str) -> None:
    """Says on stderr, once for all processes, what ended this one; the others hear of it."""
    line = f"tidegate: {' '.join(problem.split())}"
    if _joined is None:
        if os.environ.get("RANK", "0") == "0" or isinstance(error, Unreachable):
            print(line, file=sys.stderr, flush=True)
        return
    if isinstance(error, Elsewhere) or not _joined.claim(problem):
        return
    if not isinstance(error, OfAll):
        line = f"tidegate: {_joined.name()}: {' '.join(problem.split())}"
    print(line, file=sys.stderr, flush=True)
    if _joined.holds_store:
        time.sleep(2.0)  # the others look into it


def is_joined() -> bool:
    """Whether other processes may wait for this one."""
    return _joined is not None
