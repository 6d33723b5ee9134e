"""What `tidegate info` says about this machine and this build."""

from __future__ import annotations

import os
import platform

import torch

from . import _library
from .training.runtime import cpu_has_fast_bf16, cpu_name

# The portable CUDA kernels use cp.async and mma.sync, which begin with Ampere.
_LOWEST_CAPABILITY = (8, 0)


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
        elif capability[0] == 8 and "sm_80" not in architectures.split():
            line += ": compiles kernels at first use (a build with TIDEGATE_CUDA_SM80=ON: not)"
        lines.append(line)
    return lines
