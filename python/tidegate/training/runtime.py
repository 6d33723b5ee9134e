"""Device, precision, threads: what a run resolves once, at its start."""

from __future__ import annotations

import contextlib
import functools

import torch

from .errors import UserError

# "bf16" is autocast over fp32 weights, "bf16-weights" over bf16 ones, whose fp32 masters the
# optimiser has.
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "bf16-weights")
AUTOCAST = ("bf16", "bf16-weights")
EXACT = ("fp32", "tf32")  # what "auto" never narrows afterwards
RESIDUALS = ("auto", "fp32", "bf16")


def resolve_device(name: str) -> torch.device:
    """ "auto" = CUDA where there is one, else the CPU. UserError when the device is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device: expected cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UserError(f"device: {name} is not there: torch sees {count} CUDA devices")
    return device


def cpu_has_fast_bf16() -> bool:
    """Whether the CPU has instructions that multiply bf16 matrices about twice as fast as fp32: AMX
    tiles, or AVX512-BF16 but for Intel's, which without AMX is slower than fp32 (2048 x 256 by
    256 x 768 on two cores of a Xeon: 50 against 101 GFLOP/s)."""
    if getattr(torch.cpu, "_is_amx_tile_supported", bool)():
        return True
    has_products = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    return has_products and "Intel" not in cpu_name()


def resolve_precision(name: str, device: torch.device) -> str:
    """ "auto" = bf16 autocast where the device is faster with it. UserError for what is no
    precision, which would otherwise compute in fp32."""
    if name not in PRECISIONS:
        raise UserError(f"precision: expected one of {', '.join(PRECISIONS)}, got {name!r}")
    if name != "auto":
        return name
    fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_has_fast_bf16()
    return "bf16" if fast else "fp32"


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """The context that forward passes run in; backward passes run outside of it."""
    if precision in AUTOCAST:
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def set_products(precision: str) -> None:
    """Lets matrix products of fp32 numbers on CUDA run in TF32, for "tf32", or keeps them fp32."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def set_threads(threads: int) -> None:
    """Sets torch's CPU threads; 0 leaves its own choice, one a core."""
    if threads:
        torch.set_num_threads(threads)


def describe_machine(device: torch.device) -> dict[str, object]:
    """What figures depend on: versions, device name, threads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "torch": torch.__version__,
        "device": str(device),
        "device_name": name,
        "threads": torch.get_num_threads(),
    }


@functools.cache
def cpu_name() -> str:
    """The CPU's name, as Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "CPU"
