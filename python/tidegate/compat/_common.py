"""What the stand-ins share."""

from __future__ import annotations

import torch
from torch import Tensor


def no_counterpart(owner: str, name: str, instead: str = "") -> NotImplementedError:
    """The error for an argument that tidegate has nothing for."""
    hint = f" ({instead})" if instead else ""
    return NotImplementedError(f"{owner}: {name} has no counterpart in tidegate{hint}")


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype that holds all of them: theirs, where they are of one."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def gate_for(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """A gate beside data of `dtype`: as it is where an op takes it, else in the state's dtype."""
    if gate.dtype in (dtype, torch.float32) and dtype != torch.float64:
        return gate
    return gate.to(torch.float64 if dtype == torch.float64 else torch.float32)


def state_for(state: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A state to start from, which other libraries take in any dtype: in the op's own."""
    if state is None:
        return None
    return state.to(torch.float64 if dtype == torch.float64 else torch.float32)
