"""What the ops' functions check before torch sees the arguments, which would take some of them for
others, and offsets that come from the CPU."""

import torch
from torch import Tensor


def offsets_on(
    op: str, cu_seqlens: Tensor | None, data: Tensor, name: str = "cu_seqlens"
) -> Tensor | None:
    """``cu_seqlens``, copied to the data's device when it is on the CPU."""
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        kind = type(cu_seqlens).__name__
        raise RuntimeError(f"{op}: {name} must be a tensor of int32 or int64, got {kind}")
    if cu_seqlens is None or cu_seqlens.device.type != "cpu" or data is None:
        return cu_seqlens  # without data the op says so
    device = data.device
    if device == cu_seqlens.device:
        return cu_seqlens
    # A compiler that traces this cannot ask about capture.
    if device.type == "cuda" and not torch.compiler.is_compiling() and _is_capturing(device):
        raise RuntimeError(
            f"{op}: {name} must be on {device} while a CUDA graph is captured, got it on cpu"
        )
    return cu_seqlens.to(device)


def check_switch(op: str, name: str, value: object) -> None:
    if value is not True and value is not False:  # torch would take 2, and None for False
        raise RuntimeError(f"{op}: {name} must be True or False, got {value!r}")


def check_text(op: str, name: str, value: object) -> None:
    if not isinstance(value, str):  # torch would take bytes
        raise RuntimeError(f"{op}: {name} must be a string, got {value!r}")


def check_number(op: str, name: str, value: object) -> None:
    if isinstance(value, bool):  # torch would take it for 0 or 1
        raise RuntimeError(f"{op}: {name} must be a number, got {value!r}")


def check_numbers(op: str, p: object, **numbers: object) -> None:
    """Checks an initialiser's arguments: p is a tensor, the others are numbers."""
    check_tensor(op, "p", p)
    for name, value in numbers.items():
        check_number(op, name, value)


def check_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise RuntimeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")


def _is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device`, which may not be the current one, is captured."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def packed_bounds(owner: str, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The bounds ``[N + 1]`` of the sequences packed into x ``[1, T, ...]``: int64, on x's device.

    For modules that read them outside an op: the checks are the ops', in the name of `owner`.
    """
    cu_seqlens = offsets_on(owner, cu_seqlens, x)
    return torch.ops.tidegate.packed_bounds(x, cu_seqlens, owner)
