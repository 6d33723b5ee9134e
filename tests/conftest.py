"""Markers, the `device` fixture and the import path that all Python tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

_MARKERS = {
    "gpu": "needs a CUDA device (skipped elsewhere)",
    "large": "needs tens of GiB of device memory",
    "sanitize": "the reduced set that runs under compute-sanitizer",
    "slow": "takes more than ten seconds",
    "xdist_group": "these share a module's fixtures: one worker of pytest-xdist runs them all",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in _MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


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
