"""What the processes of a run tell each other when one of them fails, hangs or is killed, so that
one line says so and all of them end.

Collectives do not carry it: they break, or wait without end. So it goes through a store. Every
process asks it twice a second, in a thread of its own, whether another has failed, and ends even
where it hangs itself; whoever holds the store ends last. Every process holds one: where a store
goes with its holder, all turn to the same next one.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from .errors import UserError

T = TypeVar("T")

_EVERY = 0.5  # seconds between two questions
ANSWER = 5.0  # a store that takes longer is gone: its holder may be stopped, or cut off
_NOTICES = 3.0  # what still runs so long after another failed does not notice by itself
STAYS = 10.0  # whoever holds the store waits that long for the others to look into it
_FAILURE = "failure"
_GONE = (RuntimeError, ValueError, OSError, concurrent.futures.TimeoutError)


class OfAll(UserError):
    """What every process of a run raises alike, or says about another: the line names none."""


class Elsewhere(UserError):
    """What ends this process happened in another one, which says so."""


class Unreachable(UserError):
    """This process does not reach the others, so it has to say so itself."""


class NoStore(RuntimeError):
    """Whoever held a store is gone."""

    def __init__(self) -> None:
        super().__init__("no connection to a process that holds a store")


def connect(host: str, port: int, seconds: float, *, holds: bool = False) -> dist.TCPStore:
    """The store at that address, which this process holds or reaches within the time."""
    return dist.TCPStore(
        host,
        port,
        is_master=holds,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,  # the roll call says who is missing
        multi_tenant=True,
    )


class Board:
    """Keys that all processes see: in a first store, and where that does not answer, in the next
    that does. Threads may share it.

    others: set later; by the rank that holds it, how each is reached, in an order that is the same
    everywhere. holder: whose store it is now, None of the first.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._notes: dict[str, str] = {}
        self._heard: str | None = None
        self._lock = threading.Lock()
        self.others: dict[int, Callable[[], dist.Store]] = {}
        self.holder: int | None = None

    def note(self, key: str, value: str = "") -> None:
        """Writes a key; again wherever this process turns to."""
        self._notes[key] = value
        self._ask(lambda store: store.set(key, value))

    def has(self, *keys: str) -> bool:
        """Whether all of the keys were written."""
        return self._ask(lambda store: store.check(list(keys)))

    def failure(self) -> str | None:
        """What the first to fail said, if any did: once heard, known for good."""
        if self._heard is None:
            self._heard = self._ask(_failure_in)
        return self._heard

    def claim(self, problem: str) -> str:
        """Says why this process fails; what the first to fail said."""
        if self._heard is None:
            found = self._ask(lambda store: store.compare_set(_FAILURE, "", problem))
            self._heard = found.decode()
        return self._heard

    def look_around(self) -> None:
        """Asks in the stores that come after this one whether somebody failed, for a process that
        was not there when the others turned to them."""
        for reach in list(self.others.values()):
            with contextlib.suppress(*_GONE):
                found = _within(ANSWER, lambda reach=reach: _failure_in(reach()))
                self._heard = self._heard or found

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        while True:
            store = self._store
            try:
                return _within(ANSWER, lambda store=store: question(store))
            except _GONE:
                self._turn_from(store)

    def _turn_from(self, store: dist.Store) -> None:
        with self._lock:
            if self._store is not store:  # another thread did
                return
            while self.others:
                rank = next(iter(self.others))
                reach = self.others.pop(rank)
                with contextlib.suppress(*_GONE):
                    self._store = _within(ANSWER, lambda reach=reach: self._opened(reach))
                    self.holder = rank
                    return
            raise NoStore

    def _opened(self, reach: Callable[[], dist.Store]) -> dist.Store:
        store = reach()
        for key, value in list(self._notes.items()):
            store.set(key, value)
        return store


def _failure_in(store: dist.Store) -> str | None:
    return store.get(_FAILURE).decode() if store.check([_FAILURE]) else None


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns; a TimeoutError where it takes longer."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(timeout=seconds)


class Watch:
    """Watches, beside the work of a process, whether another one failed and how long this one
    stands still.

    hear: told that another failed. end: ends the process, which did not stop() the watch since.
    """

    def __init__(self, board: Board, hear: Callable[[], None], end: Callable[[], None]) -> None:
        self._board = board
        self._hear, self._end = hear, end
        self._done = threading.Event()
        self._longest, self._last = 0.0, time.monotonic()
        self._threads = [
            threading.Thread(target=each, daemon=True) for each in (self._ask, self._measure)
        ]
        for thread in self._threads:
            thread.start()
        # A thread that comes back to a Python that has been taken down would abort the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the watch: from here on this process ends by itself."""
        self._done.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        atexit.unregister(self.stop)

    def meet(self) -> None:
        """All processes are here: standing still before has kept none of them waiting too long."""
        self._longest = 0.0

    def stillness(self) -> float:
        """For how long this process as a whole stood still since the last meeting, at most."""
        now = 0.0 if self._done.is_set() else time.monotonic() - self._last
        return max(self._longest, now)

    def _measure(self) -> None:
        while not self._done.wait(_EVERY):
            now = time.monotonic()
            self._longest, self._last = max(self._longest, now - self._last), now

    def _ask(self) -> None:
        with contextlib.suppress(NoStore):  # the process notices that the others are gone
            while not self._done.wait(_EVERY):
                if self._board.failure() is not None:
                    self._hear()
                    if not self._done.wait(_NOTICES):
                        self._end()
                    return


def stay(board: Board, keys: Callable[[], Sequence[str]]) -> None:
    """Until all keys, of which there may be fewer every time, are on the board; STAYS at most."""
    end = time.monotonic() + STAYS
    with contextlib.suppress(NoStore):
        while (left := keys()) and not board.has(*left) and time.monotonic() < end:
            time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether a process of this host has not ended; one that nobody asked about yet has."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def put_off_termination() -> None:
    """The first SIGTERM from here on is let pass: when one process has ended, torchrun ends the
    others by it, before they have said which. A second one, or torchrun's SIGKILL, is meant."""

    def pass_once(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)

    with contextlib.suppress(ValueError):  # not in the main thread: signals stay as they are
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, pass_once)


def leave_without_a_word() -> None:
    """Ends the process as one that another's failure ends."""
    os._exit(2)
