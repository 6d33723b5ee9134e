"""The processes of a run: who they are, what they agree on, and which of them is missing.

torchrun starts them and torch.distributed carries what they send; `parallel` says how the model is
shared. What is here is what a run needs beside that: every process takes the same decisions at the
same step, and when one fails, is killed or hangs, all of them end with one line that names it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UserError
from .failures import (
    ANSWER,
    STAYS,
    Board,
    Elsewhere,
    NoStore,
    OfAll,
    Unreachable,
    Watch,
    connect,
    is_running,
    leave_without_a_word,
    put_off_termination,
    stay,
)
from .runtime import resolve_device

T = TypeVar("T")

PARALLEL = ("none", "ddp", "fsdp")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The device's collectives wait longer than those between hosts, which can name who is missing.
_DEVICE_MARGIN = 60.0
_CHECKPOINT_TIMEOUT = timedelta(hours=2)  # disks may be slow
_LONGEST_GRACE = 20.0  # torchrun kills what has not ended 30 s after it was told to


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


class _Present(NamedTuple):
    """A process: where it is, and the port of its store."""

    process: int
    host: str
    address: str
    port: int


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
        self._absent: list[int] = []  # of the roll call
        self._watch: Watch | None = None
        self._present: list[_Present] = []
        kind = self.device(device)
        self._store = self._reach()
        self._own_store = connect("localhost", 0, timeout, holds=True)
        _joined = self
        self._present = self._roll_call()
        self._name_holders()
        self._watch = Watch(self._board, self._hear, self._end)
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
        self._holds_first = self.leads and not _torchrun_holds_store()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"tidegate/{restart}/{_joins}"
        try:
            store = connect(host, int(port), self._timeout, holds=self._holds_first)
            # The board has a connection of its own: the other may be busy with a wait.
            asked = connect(host, int(port), self._timeout)
            self._board = Board(dist.PrefixStore(prefix, asked))
        except (RuntimeError, ValueError, OSError) as error:
            raise Unreachable(
                f"train: rank {self.rank} on {self._host} cannot reach {host}:{port} within "
                f"{self._timeout:g} s: start all {self.size} processes within that time, and look "
                f"whether that host answers at that port"
            ) from error
        return dist.PrefixStore(prefix, store)

    def _name_holders(self) -> None:
        """Tells the board whom to ask where the first store goes, perhaps with the whole host."""

        def reach(rank: int) -> dist.Store:
            if rank == self.rank:
                return self._own_store
            if self._has_ended(rank):
                raise OSError
            return connect(self._present[rank].address, self._present[rank].port, ANSWER)

        hosts = [each.host for each in self._present]
        order = sorted(range(1, self.size), key=lambda rank: hosts[rank] == hosts[0])
        self._board.others = {rank: functools.partial(reach, rank) for rank in order}

    def _roll_call(self) -> list[_Present]:
        """Every rank, once all are there."""
        keys = [f"here/{rank}" for rank in range(self.size)]
        own = _Present(os.getpid(), self._host, _own_address(), self._own_store.port)
        self._store.set(keys[self.rank], json.dumps(own))
        end = time.monotonic() + self._timeout
        while not self._store.check(keys):
            self._refuse_to_wait()
            if time.monotonic() > end:
                self._absent = [r for r, key in enumerate(keys) if not self._store.check([key])]
                raise OfAll(
                    f"train: {_ranks(self._absent)} of {self.size} did not come within "
                    f"{self._timeout:g} s: start all processes within that time (--timeout), on "
                    "every node with the same --nnodes and --nproc-per-node"
                )
            time.sleep(0.02)
        return [_Present(*json.loads(self._store.get(key))) for key in keys]

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
        if (problem := self._board.failure()) is not None:
            raise Elsewhere(f"train: {problem}")

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
        self._watch.meet()
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
                put_off_termination()
                raise self._what_happened(str(error), where()) from error
            raise

    def _what_happened(self, text: str, where: str) -> UserError:
        """Why a collective failed: every process that gets here says so on the board, and those
        that do not are gone or hang. A process sees which ones of its own host are gone; they may
        keep others, which wait for somebody that waits for them, from getting here."""
        grace = min(2.0 + 2.0 * self._interval, _LONGEST_GRACE)
        keys = [f"failed/{rank}" for rank in range(self.size)]
        was_still = self._watch.stillness()
        is_late = was_still >= min(self._timeout, STAYS)
        try:
            if is_late:
                self._board.look_around()
            if "imeout" in text or "imed out" in text:
                self._board.note("waited")
            self._board.note(keys[self.rank])
            end = time.monotonic() + grace
            gone: list[int] = []
            while time.monotonic() < end and not gone and not self._board.has(*keys):
                self._refuse_to_wait()
                time.sleep(0.05)
                gone = self._find_gone()
            missing = gone or [r for r, key in enumerate(keys) if not self._board.has(key)]
            hangs = not gone and self._board.has("waited")
            self._refuse_to_wait()
            is_late = is_late and len(gone) == self.size - 1
        except Elsewhere as error:
            return error
        except NoStore:
            missing, hangs = [0], False
        if is_late:  # that it hangs is what the others have said, and ended
            return Elsewhere(f"train: {self.name()} stood still for {was_still:.0f} s {where}")
        again = "the same command goes on from the last checkpoint"
        if not missing:
            return OfAll(f"train: the connection between the processes broke {where}: {text}")
        names = ", ".join(
            f"{_ranks([r])} of {self.size} on {self._present[r].host}" for r in missing
        )
        if hangs:
            return OfAll(
                f"train: {names} did not answer for {self._timeout:g} s (--timeout) {where}: end "
                f"it if it still hangs; {again}"
            )
        return OfAll(f"train: {names} is gone {where}, killed or crashed: {again}")

    def _find_gone(self) -> list[int]:
        """The ranks whose processes ended, as far as anybody saw."""
        for rank in range(self.size):
            if self._has_ended(rank):
                self._board.note(f"gone/{rank}")
        return [rank for rank in range(self.size) if self._board.has(f"gone/{rank}")]

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank's process, of this host, is seen to have ended."""
        if rank in self._absent:
            return True
        if not self._present or self._present[rank].host != self._host:
            return False
        return not is_running(self._present[rank].process)

    def leave(self) -> None:
        global _joined
        if _joined is not self:
            return
        self._watch.stop()
        key = self._key()
        self._store.set(f"{key}/{self.rank}", b"")
        if self.leads:  # it may hold the store, so it goes last
            end = time.monotonic() + self._timeout
            keys = [f"{key}/{rank}" for rank in range(self.size)]
            while not self._store.check(keys) and time.monotonic() < end:
                time.sleep(0.01)
        _joined = None
        dist.destroy_process_group()

    def claim(self, problem: str) -> bool:
        """Whether this process is the first to fail, and so the one to say why."""
        own = f"{self.rank}: {problem}"
        try:
            return self._board.claim(own) == own
        except NoStore:  # the process that held it has nothing more to say
            return True

    def end(self) -> None:
        """Before this process ends because one failed: it hears of nothing more, and if it holds
        the store, waits until the others have heard."""
        if self._watch is not None:
            self._watch.stop()
        self._hear()
        self._stay()

    def _hear(self) -> None:
        with contextlib.suppress(NoStore):
            self._board.note(f"heard/{self.rank}")

    def _stay(self) -> None:
        holds = self._holds_first if self._board.holder is None else self._board.holder == self.rank
        if holds:
            stay(
                self._board,
                lambda: [f"heard/{r}" for r in range(self.size) if not self._has_ended(r)],
            )

    def _end(self) -> None:
        self._stay()
        leave_without_a_word()

    def name(self) -> str:
        """This process, in words."""
        return f"{_ranks([self.rank])} of {self.size} on {self._host}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _torchrun_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own_address() -> str:
    """This host's address on its way to rank 0's."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM
    ):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # which sends nothing
            return probe.getsockname()[0]
    return socket.gethostname()


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
    put_off_termination()
    if not isinstance(error, Elsewhere) and _joined.claim(problem):
        if not isinstance(error, OfAll):
            line = f"tidegate: {_joined.name()}: {' '.join(problem.split())}"
        print(line, file=sys.stderr, flush=True)
    _joined.end()


def is_joined() -> bool:
    """Whether other processes may wait for this one."""
    return _joined is not None
