"""What `tidegate info` and `tidegate bench` say about this machine and this build."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from . import _library
from .training.errors import UserError
from .training.runtime import cpu_has_fast_bf16, cpu_name

# The portable CUDA kernels use cp.async and mma.sync, which begin with Ampere.
_LOWEST_CAPABILITY = (8, 0)
# Training steps beside the Transformer; takes flags of its own.
_MODELS = "bench_models"


def info_lines() -> list[str]:
    """Versions, devices, kernels that were built, and why one would not be used."""
    info = _library.build_info()
    lines = [
        f"tidegate       {info['version']} ({info['build_type']}, {info['compiler']})",
        f"library        {info['library']}",
        f"python         {platform.python_version()}",
        f"torch          {torch.__version__}, built for {info['torch']} ({info['torch_variant']})",
        f"cpu            {cpu_name()}, {os.cpu_count()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        + (", bf16 faster than fp32" if cpu_has_fast_bf16() else ""),
        "cpu kernels    built: generic, AVX2, AVX-512; the best that this CPU has is used",
    ]
    return lines + _cuda_lines(info)


def _cuda_lines(info: dict[str, str]) -> list[str]:
    architectures = info["architectures"]
    built = f"built for {architectures} by {info['cuda']}" if architectures else "not built"
    lines = [f"cuda kernels   {built}"]
    if not architectures:
        return [*lines, f"               not used: {info['cuda'].removeprefix('off: ')}"]
    count = torch.cuda.device_count()
    if count == 0:
        why = "torch has no CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        return [*lines, f"               not used: {why}"]
    for index in range(count):
        capability = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        line = f"cuda:{index}         {name}, compute capability {capability[0]}.{capability[1]}"
        if capability < _LOWEST_CAPABILITY:
            line += ": not used: the kernels need 8.0 or later"
        lines.append(line)
    return lines


def _benchmark_binaries() -> list[Path]:
    """The benchmark binaries of the build tree this package came from, by name."""
    folder = Path(_library.library_dir()).parent / "bin"
    binaries = sorted(path for path in folder.glob("bench_*") if os.access(path, os.X_OK))
    if not binaries:
        raise UserError(
            f"bench: no benchmark binary in {folder}: they are built in a checkout (`make build`, "
            "then `make bench`)"
        )
    return binaries


def run_benchmarks(name_filter: str = "") -> int:
    """Runs the kernels' and ops' benchmark binaries.

    name_filter: a regular expression on the benchmarks' names. Returns the first exit status that
    is not 0. Raises UserError where there are no binaries, as in an installed package or without
    Google Benchmark.
    """
    binaries = [path for path in _benchmark_binaries() if path.name != _MODELS]
    if not binaries:
        raise UserError("bench: built without Google Benchmark (Debian: libbenchmark-dev)")
    for binary in binaries:
        print(f"== {binary.name}", flush=True)
        arguments = [f"--benchmark_filter={name_filter}"] if name_filter else []
        status = subprocess.run([str(binary), *arguments], check=False).returncode
        if status != 0:
            return status
    return 0


def run_model_benchmark(arguments: list[str]) -> int:
    """Runs bench_models: training and decoding of every mixer beside Transformers of as many
    parameters. Returns its exit status."""
    for binary in _benchmark_binaries():
        if binary.name == _MODELS:
            command = [str(binary), *arguments]
            return subprocess.run(command, check=False, env=_with_torch()).returncode
    raise UserError(f"bench: {_MODELS} was not built (`make build` builds it)")


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
