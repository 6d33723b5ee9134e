"""What sweeps over training runs share: many processes over all GPUs, results kept as they come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

import harness
import torch

import tidegate
from tidegate.training.runtime import resolve_device

Job = TypeVar("Job")


def places(device: str) -> list[str]:
    """The devices that `device` stands for: every GPU where it is "auto" or "cuda" on a machine
    with some."""
    found = resolve_device(device)
    if found.type == "cuda" and found.index is None:
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [str(found)]


def earlier_runs(
    path: Path | None, jobs: Sequence[Job], job_of: Callable[[dict[str, Any]], Job]
) -> list[dict[str, Any]]:
    """The runs of an earlier sweep's JSON that are none of these jobs'."""
    if path is None:
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return [row for row in rows if job_of(row) not in jobs]


def sweep(
    jobs: Sequence[Job],
    run: Callable[[Job, int], dict[str, Any]],
    keep: Callable[[list[dict[str, Any]]], dict[str, Any]],
    *,
    processes: int,
    limit_minutes: float,
) -> dict[str, Any]:
    """``run(job, number)`` for every job, `processes` at a time, in their order.

    keep: is given all rows so far after every run, writes them, and returns the result. No run
    begins after limit_minutes.

    Raises:
        SystemExit: none began.
    """
    end = time.monotonic() + 60 * limit_minutes
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}

    def work(number: int) -> dict[str, Any] | None:
        return run(jobs[number], number) if time.monotonic() < end else None

    with ThreadPoolExecutor(processes) as pool:
        for done in as_completed([pool.submit(work, number) for number in range(len(jobs))]):
            if (row := done.result()) is not None:
                rows.append(row)
                result = keep(rows)
    if not rows:
        raise SystemExit("sweep: no run began within --limit-minutes")
    return result


def record(
    rows: Sequence[dict[str, Any]], *, jobs: int, devices: int, begun: float, commit: str | None
) -> dict[str, Any]:
    """What the JSON of every sweep begins with. begun: time.monotonic() at the start."""
    return {
        "machine": {**rows[0]["machine"], "devices": devices},
        "tidegate": tidegate.__version__,
        "commit": harness.commit(commit),
        "date": harness.today(),
        "wall_seconds": round(time.monotonic() - begun, 1),
        "left_out": jobs - len(rows),
    }


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes the result where there is a path."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
