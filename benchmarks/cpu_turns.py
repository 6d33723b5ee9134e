"""What the benchmarks of single ops on the CPU share: errors, and times taken in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def both_passes(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], d_out: Tensor
) -> list[Tensor]:
    """What the function makes of the inputs, and the gradient of each of them."""
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, d_out)]


def error_against(exact: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest relative error in norm among the result and all gradients."""
    pairs = [(a.detach(), b.detach().double()) for a, b in zip(exact, found, strict=True)]
    return max(float((b - a).norm() / a.norm()) for a, b in pairs)


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each call: medians of the wall time (ms) and of the processor time of all
    threads (cpu_ms), and the fastest rounds (best_ms, best_cpu_ms)."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin, used = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - begin, time.process_time() - used))
    figures: dict[str, dict[str, float]] = {}
    for name, pairs in times.items():
        wall, processor = zip(*pairs, strict=True)
        figures[name] = {
            "ms": 1e3 * statistics.median(wall),
            "cpu_ms": 1e3 * statistics.median(processor),
            "best_ms": 1e3 * min(wall),
            "best_cpu_ms": 1e3 * min(processor),
        }
    return figures
