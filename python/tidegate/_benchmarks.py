"""`tidegate bench`: the benchmark programs of a build tree, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import _library
from .training.errors import UserError

# Training steps beside the Transformer; takes flags of its own.
_MODELS = "bench_models"
_SECONDS = 1.5  # that a benchmark takes, about: half a second of measuring, and what leads to it


def _binaries() -> list[Path]:
    """The programs, by name. Raises UserError where there are none, as in an installed package."""
    folder = Path(_library.library_dir()).parent / "bin"
    found = sorted(path for path in folder.glob("bench_*") if os.access(path, os.X_OK))
    if not found:
        raise UserError(
            f"bench: no benchmark binary in {folder}: they are built in a checkout (`make build`, "
            "then `make bench`)"
        )
    return found


def _with_torch() -> dict[str, str]:
    """The environment in which a program finds this torch's libraries: the package it comes with
    may lie elsewhere than torch does."""
    root = Path(torch.__file__).parent
    folders = [
        root / "lib",
        *{file.parent for file in root.parent.glob("nvidia/*/lib/libcudart.so*")},
    ]
    known = os.environ.get("LD_LIBRARY_PATH")
    paths = [*map(str, folders), *([known] if known else [])]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def _run(binary: Path, flags: Sequence[str]) -> int:
    return subprocess.run([binary, *flags], check=False, env=_with_torch()).returncode


def _names(binary: Path, name_filter: str) -> list[str]:
    """The benchmarks of a program that match."""
    flags = ["--benchmark_list_tests=true", f"--benchmark_filter={name_filter or '.'}"]
    result = subprocess.run(
        [binary, *flags], capture_output=True, text=True, check=False, env=_with_torch()
    )
    if result.returncode != 0:
        return []  # it says "Failed to match any benchmarks" on stderr, among other things
    return [line for line in result.stdout.splitlines() if line and " " not in line]


def _chosen(name_filter: str) -> dict[Path, list[str]]:
    """The benchmarks that match, by program.

    Raises:
        UserError: none does, or kernels and ops were built without Google Benchmark.
    """
    binaries = [path for path in _binaries() if path.name != _MODELS]
    if not binaries:
        raise UserError("bench: built without Google Benchmark (Debian: libbenchmark-dev)")
    chosen = {binary: found for binary in binaries if (found := _names(binary, name_filter))}
    if not chosen:
        raise UserError(
            f"bench: filter: expected part of a benchmark's name (`tidegate bench --list`), got "
            f"{name_filter!r}, which none has"
        )
    return chosen


def list_benchmarks(name_filter: str = "") -> int:
    """Prints the benchmarks' names, and, without a filter, what `--models` knows."""
    for names in _chosen(name_filter).values():
        print("\n".join(names))
    models = [path for path in _binaries() if path.name == _MODELS]
    if models and not name_filter:
        sys.stdout.flush()
        return _run(models[0], ["--list"])
    return 0


def run_benchmarks(name_filter: str = "", *, json_path: str | None, plot_path: str | None) -> int:
    """Runs the benchmarks of kernels and ops that match a regular expression.

    json_path: where Google Benchmark's results go, of all programs in one file. plot_path: where a
    picture of the times goes. Returns the first exit status that is not 0.
    """
    chosen = _chosen(name_filter)
    count = sum(map(len, chosen.values()))
    print(f"{count} benchmarks, about {count * _SECONDS:.0f} s", file=sys.stderr, flush=True)
    record: dict[str, Any] = {"context": {}, "benchmarks": []}
    with tempfile.TemporaryDirectory() as scratch:
        for binary in chosen:
            print(f"== {binary.name}", flush=True)
            out = Path(scratch) / f"{binary.name}.json"
            flags = [f"--benchmark_out={out}", "--benchmark_out_format=json"]
            flags += [f"--benchmark_filter={name_filter}"] if name_filter else []
            status = _run(binary, flags)
            if status != 0:
                return status
            found = json.loads(out.read_text("utf-8"))
            record["context"] |= found["context"]
            record["benchmarks"] += found["benchmarks"]
    if json_path is not None:
        Path(json_path).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    if plot_path is not None:
        from .plots_bench import plot_times

        plot_times(record, plot_path)
        print(plot_path)
    return 0


def run_model_benchmark(arguments: Sequence[str]) -> int:
    """Runs bench_models: training and decoding of every mixer beside Transformers of as many
    parameters, and after them flash-linear-attention's models of the same sizes where they are
    installed (on a GPU; `--no-fla` among the arguments leaves them out). `--plot PATH` draws speed
    and memory over the context. Returns the exit status: 1 where a row failed."""
    from . import bench_fla

    binary = next((path for path in _binaries() if path.name == _MODELS), None)
    if binary is None:
        raise UserError(f"bench: {_MODELS} was not built (`make build` builds it)")
    flags, plot_path = _without(list(arguments), "--plot")
    has_fla = "--no-fla" not in flags and torch.cuda.is_available() and bench_fla.is_installed()
    flags = [flag for flag in flags if flag != "--no-fla"]
    if plot_path is None and not has_fla:
        return _run(binary, flags)
    _, json_path = _without(list(flags), "--json")
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch) / "models.json"
        given = flags if json_path is not None else [*flags, "--json", str(own)]
        status = _run(binary, given)
        written = own if json_path is None else Path(json_path)
        if status not in (0, 1) or not written.is_file():  # 1: a row failed
            return status
        if has_fla:
            status |= bench_fla.add_fla(written)
        if plot_path is not None:
            from .plots_bench import plot_models

            plot_models(json.loads(written.read_text("utf-8")), plot_path)
            print(plot_path)
    return status


def _without(arguments: list[str], flag: str) -> tuple[list[str], str | None]:
    """The arguments without a flag and its value, and that value.

    Raises:
        UserError: it has none.
    """
    for place, word in enumerate(arguments):
        if word.startswith(f"{flag}="):
            return arguments[:place] + arguments[place + 1 :], word.partition("=")[2]
        if word == flag:
            if place + 1 == len(arguments):
                raise UserError(f"bench: {flag}: expected a path, got none")
            return arguments[:place] + arguments[place + 2 :], arguments[place + 1]
    return arguments, None
