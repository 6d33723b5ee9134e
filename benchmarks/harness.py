"""Timing shared by the benchmarks: calls over rotating inputs, implementations in turn, medians.

A `Runner` holds K calls, one for each of K input sets, and keeps all K results, so that together
they touch far more memory than a cache holds. On CUDA the K calls are captured in one CUDA graph:
a replay costs one launch whatever the calls do on the host, so Python and C++ implementations are
treated alike; device events lie between replays. What a graph cannot capture is enqueued behind a
sleeping kernel, so that its host time is hidden too. On the CPU the calls are timed one by one.
"""

from __future__ import annotations

import datetime
import gc
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import tidegate
from tidegate.training import runtime

Call = Callable[[], object]


class Runner:
    """K calls and their latest results; `seconds(n)` is the time of one call, n times over."""

    timing = "host clock"

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.results = [call() for call in calls]

    def replay(self) -> None:
        """Runs all calls once."""
        for i, call in enumerate(self.calls):
            self.results[i] = call()

    def seconds(self, replays: int) -> list[float]:
        """Seconds a call, one figure a replay."""
        times = []
        for _ in range(replays):
            begin = time.perf_counter()
            self.replay()
            times.append((time.perf_counter() - begin) / len(self.calls))
        return times

    def free(self) -> None:
        """Lets go of results and inputs."""
        self.calls = ()
        self.results = []


class GraphRunner(Runner):
    """The K calls in one CUDA graph."""

    timing = "CUDA graph"

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        calls[0]()  # compiles, tunes and loads what a graph cannot
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [call() for call in calls]

    def replay(self) -> None:
        self.graph.replay()

    def seconds(self, replays: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        self.replay()  # the device is busy while the host fills its queue
        for event in events[:-1]:
            event.record()
            self.replay()
        events[-1].record()
        torch.cuda.synchronize()
        pairs = zip(events, events[1:], strict=False)
        return [a.elapsed_time(b) * 1e-3 / len(self.calls) for a, b in pairs]

    def free(self) -> None:
        super().free()
        self.graph.reset()


class EventRunner(Runner):
    """Calls enqueued behind a sleeping kernel, between two events."""

    timing = "events behind a sleeping kernel"
    _CYCLES_A_CALL = 300_000  # about 0.15 ms: more than any of these calls takes on the host

    def seconds(self, replays: int) -> list[float]:
        times = []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(replays):
            torch.cuda._sleep(self._CYCLES_A_CALL * len(self.calls))
            begin.record()
            self.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / len(self.calls))
        return times


def make_runner(calls: Sequence[Call], device: torch.device, graph: bool = True) -> Runner:
    """A runner that has run each call at least once, with results that can be checked."""
    if device.type != "cuda":
        return Runner(calls)
    try:
        runner: Runner = GraphRunner(calls) if graph else EventRunner(calls)
    except RuntimeError as error:
        if "captur" not in str(error).lower():
            raise
        torch.cuda.synchronize()
        runner = EventRunner(calls)
    runner.replay()
    torch.cuda.synchronize()
    return runner


def measure(
    runners: dict[str, Runner], rounds: int, budget: float, pause: float = 0
) -> dict[str, list[float]]:
    """Seconds a call for each runner, the runners taking turns; `budget`: seconds for each.

    After matrix products a GPU is slower for 0.1 s, as if they had used its power up: `pause`
    seconds lie before each turn, and each round has an order of its own, so that no one always
    comes next.
    """
    times: dict[str, list[float]] = {name: [] for name in runners}
    replays = {}
    for name, runner in runners.items():
        whole = runner.seconds(1)[0] * len(runner.calls)
        replays[name] = max(1, min(10, int(budget / rounds / max(whole, 1e-9))))
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(runners), len(runners)):
            time.sleep(pause)
            times[name] += runners[name].seconds(replays[name])
    return times


def free(runners: dict[str, Runner]) -> None:
    """Gives the memory of the runners back before the next piece of work."""
    for runner in runners.values():
        runner.free()
    runners.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summary(times: Sequence[float], bytes_moved: int) -> dict[str, float]:
    """Median in microseconds, its spread (the middle 80%) and GB/s."""
    ordered = sorted(times)
    median = statistics.median(ordered)
    low = ordered[len(ordered) // 10]
    high = ordered[-1 - len(ordered) // 10]
    return {
        "us": round(median * 1e6, 2),
        "us_low": round(low * 1e6, 2),
        "us_high": round(high * 1e6, 2),
        "gb_per_s": round(bytes_moved / median * 1e-9, 1),
        "samples": len(ordered),
    }


def sets_needed(bytes_moved: int, device: torch.device, tiny: bool) -> int:
    """How many input sets make one turn overflow the L2 cache many times over (1.5 GB)."""
    if tiny or device.type != "cuda":
        return 2
    return max(2, min(40, -(-1_500_000_000 // max(bytes_moved, 1))))


# ---- what figures depend on ----


def describe_gpu() -> dict[str, object]:
    """Name, driver, clocks and limits of the GPU, as nvidia-smi tells them."""
    fields = (
        "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,"
        "power.limit,temperature.gpu"
    )
    machine: dict[str, object] = {
        "name": torch.cuda.get_device_name(),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size,
    }
    try:
        line = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return machine
    values = (value.strip() for value in line.split(","))
    return machine | dict(zip(fields.split(","), values, strict=False))


def describe_machine(device: torch.device) -> dict[str, object]:
    """The machine that the figures were measured on."""
    machine: dict[str, object] = {
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        return machine | {"gpu": describe_gpu(), "cuda": torch.version.cuda}
    return machine | {"threads": torch.get_num_threads()}


def commit(given: str | None = None) -> str:
    """The commit measured: given, the checkout's (with "+" when changed), or "unknown"."""
    if given:
        return given

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", *arguments],
                cwd=Path(__file__).parent,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no")
    return head + ("+" if changed else "")


def today() -> str:
    """The date, for the record."""
    return datetime.date.today().isoformat()


def cpu_record(kind: str, op: str, shape: dict[str, int], results: object) -> dict[str, object]:
    """What a comparison on the CPU writes: an op's fp32 forward and backward pass of one shape."""
    return {
        "kind": kind,
        "work": f"{op} fp32 " + " ".join(f"{k}{v}" for k, v in shape.items()),
        "direction": "forward and backward",
        "machine": runtime.describe_machine(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "versions": {"torch": torch.__version__, "tidegate": tidegate.__version__},
        "commit": commit(),
        "date": today(),
        "results": results,
    }
