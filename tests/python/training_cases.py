"""Tiny runs that the tests of training and of the command line share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

# Small enough for a run to take a second; one thread, so that machines busy with other work do not
# spend their time at OpenMP barriers.
MODEL = {"mixer": "hgrn", "mixer_options": {"complex": False}, "dim": 16, "layers": 2}
TRAIN = {
    "steps": 6,
    "batch_size": 4,
    "context": 16,
    "precision": "fp32",
    "device": "cpu",
    "threads": 1,
    "eval_every": 0,
}
# The copying task at a tiny size, for `prepare`; no checkpoint by the clock, which logs a line too.
COPYING = {
    "data": "copying",
    "task_options": {"dummies": 20},
    "context": 40,
    "batch_size": 8,
    "lr": 1e-3,
    "checkpoint_seconds": 0.0,
    "model": {"mixer": "gated-linear-rnn", "mixer_options": {}, "dim": 32},
}
FLAGS = [
    "--mixer=hgrn",
    "--dim=16",
    "--layers=2",
    "--set=mixer_options.complex=false",
    "--batch-size=4",
    "--context=16",
    "--precision=fp32",
    "--device=cpu",
    "--threads=1",
]


def write_text(path: Path, size: int = 20_000, seed: int = 0) -> Path:
    """A text of `size` bytes with some structure: words drawn from a short list."""
    generator = np.random.default_rng(seed)
    words = [b"def", b"return", b"self", b"gate", b"state", b"(", b")", b":\n", b"    "]
    text = b" ".join(words[i] for i in generator.integers(0, len(words), size))
    path.write_bytes(text[:size])
    return path


def prepare(out: Path, data: Path | str, **changes: Any):
    """A tiny run in folder `out`; `model` among the changes replaces model fields."""
    from tidegate.training import prepare_run

    model = {**MODEL, **changes.pop("model", {})}
    return prepare_run(str(out), {**TRAIN, "data": str(data), **changes}, model)


def tidegate(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess:
    """Runs the command line in a process of its own."""
    result = subprocess.run(command(*arguments), capture_output=True, text=True, env=environment())
    if check:
        assert result.returncode == 0, result.stderr
    return result


def command(*arguments: str | Path) -> list[str]:
    """The command line that starts `tidegate` with this Python."""
    return [sys.executable, "-m", "tidegate", *map(str, arguments)]


def environment() -> dict[str, str]:
    """The environment of a child: this process's import path, one thread."""
    import tidegate

    folder = str(Path(tidegate.__file__).parents[1])
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
