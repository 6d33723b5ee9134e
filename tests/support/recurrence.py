"""What every recurrence's oracle needs: the order of tokens, states before them, dtypes, sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_STATE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_WIDE = {torch.complex64: torch.complex128, torch.complex128: torch.complex128}


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a recurrence over `dtype` keeps its state."""
    return _STATE.get(dtype, dtype)


def single_dtype(dtype: torch.dtype) -> torch.dtype:
    """Single precision of the same kind: gates, bounds and states may come in it, too."""
    return torch.complex64 if dtype.is_complex else torch.float32


def compute_dtype(dtype: torch.dtype, exact: bool) -> torch.dtype:
    return _WIDE.get(dtype, torch.float64) if exact else state_dtype(dtype)


@dataclass(frozen=True)
class TokenOrder:
    """Sequences that are scanned together: time steps in order, and their rows of the state."""

    steps: range
    rows: slice


def token_order(time: int, cu_seqlens: Tensor | None, reverse: bool) -> Iterator[TokenOrder]:
    """The sequences of a [B, time] layout (B = 1 when packed)."""
    if cu_seqlens is None:
        bounds = [(slice(None), 0, time)]
    else:
        offsets = [int(v) for v in cu_seqlens]
        pairs = zip(offsets, offsets[1:], strict=False)
        bounds = [(slice(n, n + 1), start, end) for n, (start, end) in enumerate(pairs)]
    for rows, start, end in bounds:
        steps = range(end - 1, start - 1, -1) if reverse else range(start, end)
        yield TokenOrder(steps, rows)


def initial_state(x: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    n = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return x.new_zeros(n, x.shape[2]) if h0 is None else h0.to(x.dtype)


def previous(h: Tensor, h0: Tensor, cu_seqlens: Tensor | None, reverse: bool) -> Tensor:
    """h_{t-1} for every t, each sequence's own h0 before its first token."""
    previous = torch.empty_like(h)
    for order in token_order(h.shape[1], cu_seqlens, reverse):
        if len(order.steps):
            steps = torch.tensor(order.steps)
            previous[:, steps[0]] = h0[order.rows]
            previous[:, steps[1:]] = h[:, steps[:-1]]
    return previous


def sum_over_time(terms: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
    """[B, T, D] -> the sum [D], and the size of its terms: what its roundings are relative to.

    Added one step after another as a loop over time would, or as torch.sum does.
    """
    sizes = torch.linalg.vector_norm(terms, dim=(0, 1))
    if fused or not terms.shape[1]:
        return terms.sum((0, 1)), sizes
    return terms.cumsum(1)[:, -1].sum(0), sizes


def rounded(value: Tensor | None, like: Tensor | None, exact: bool) -> Tensor | None:
    return value if exact or value is None or like is None else value.to(like.dtype)
