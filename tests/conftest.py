"""Markers, the `device` fixture and the import path that all Python tests share."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
# Imports and the collection make millions of objects that all stay: looking for garbage among them
# takes a third of the collection's time. pytest_collection_finish turns it on again.
gc.disable()
# Code that torch.compile makes for a CPU is not vectorised: to find what the CPU can do, inductor
# starts six Pythons with torch in every process that compiles. (The kernels here are our own.)
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# torch.manual_seed notes the seed for every kind of device that nobody has used yet, each with a
# stack trace, which takes as long as a small test. Kinds that are not there are left out.
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    if not _kind.is_available():
        _kind.manual_seed_all = lambda seed: None

# torch takes exp, log and their like on the CPU from oneMKL, which chooses the code for a function
# when it is first called. Where several threads call it for the first time at once, one of them may
# get code of low accuracy for that call (1e-9 in float64, on Intel's CPUs: pytorch/pytorch issue
# 188792), and an oracle is wrong. So each is called with one number first.
_VECTOR_MATH = (torch.exp, torch.expm1, torch.log, torch.log1p, torch.log2, torch.log10, torch.sqrt)
_VECTOR_MATH += (torch.sin, torch.cos, torch.tan, torch.tanh, torch.asin, torch.acos, torch.atan)
_VECTOR_MATH += (torch.erf, torch.erfc)
for _dtype in (torch.float32, torch.float64):
    for _function in _VECTOR_MATH:
        _function(torch.full((1,), 0.5, dtype=_dtype))

_MARKERS = {
    "gpu": "needs a CUDA device (skipped elsewhere)",
    "large": "needs tens of GiB of device memory",
    "sanitize": "the reduced set that runs under compute-sanitizer",
    "slow": "takes some ten seconds or more where nothing else runs; begins first",
    # "inductor": the first test compiles the headers that every compiled graph includes.
    "xdist_group": "these share a module's fixtures, or what the first of them leaves in a cache: "
    "one worker of pytest-xdist runs them all",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in _MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long, or has to stay on one worker, comes first: begun last, it would keep one
    worker busy while the others have nothing left to do (--no-loadscope-reorder keeps this order).
    """

    def later(item: pytest.Item) -> bool:
        return not any(item.get_closest_marker(name) for name in ("slow", "xdist_group"))

    items.sort(key=later)
    _show_groups(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """The garbage collector leaves out what has been imported and collected by now, which stays,
    and looks for garbage less often: tests of torch.export and torch.compile would spend a sixth
    of their time there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def _show_groups(items: list[pytest.Item]) -> None:
    """In a worker of pytest-xdist 3.8: the ids that it gives items, with their groups, are what
    pytest 9.2 shows its scheduler. That has ids of its own, and no group would hold together."""
    for item in items:
        named = getattr(item, "_nodeid", item.nodeid)
        if named != item.nodeid:
            item._id = type(item._id).parse(named)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's scheduler of --dist loadgroup, which forgets the groups that are done.

    Its own goes through every group that a worker has ever had, after every test: of these many
    thousand tests, each a group, that takes a core some ten seconds.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):
        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            scope = self._split_scope(self.registered_collections[node][item_index])
            work = self.assigned_work[node]
            if all(work[scope].values()):
                del work[scope]

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Where no GPU can be used, the thousands of tests that need one are reported as skipped, and
    that is all: their fixtures and the other reports of a test would take half a minute."""
    if not (reason := item.get_closest_marker("gpu") and why_no_cuda()):
        return None
    path, line, _ = item.location
    report = pytest.TestReport(
        item.nodeid,
        item.location,
        keywords={},
        outcome="skipped",
        longrepr=(path, (line or 0) + 1, f"Skipped: {reason}"),
        when="setup",
    )
    item.ihook.pytest_runtest_logreport(report=report)
    item.session._setupstate.teardown_exact(nextitem)  # of tests before, which it came after
    return True


@functools.cache
def why_no_cuda() -> str | None:
    """Why tests cannot run tidegate on a CUDA device here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    from tidegate._library import build_info

    built = build_info()["cuda"]
    return f"tidegate was built without CUDA ({built})" if built.startswith("off") else None


def require_cuda() -> None:
    if reason := why_no_cuda():
        pytest.skip(reason)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn; CUDA is skipped, with the reason, where it cannot run."""
    if request.param == "cuda":
        require_cuda()
    return request.param


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of many tiny tensors, where a pool of threads costs more than it does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts processes that train together; see `support.ranks`."""
    from support.ranks import Ranks

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started
