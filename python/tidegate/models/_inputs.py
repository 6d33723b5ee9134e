"""Checks of what models are called with. Ids and labels are looked at where that waits for no
device: on the CPU, and not while a compiler traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # a label that asks for nothing


def check_ids(owner: str, ids: Tensor, vocab_size: int, dims: str = "B, T") -> None:
    """Raises ValueError unless ids is ``[B, T]`` (`dims`) of int32 or int64, below vocab_size as
    far as can be seen."""
    if not isinstance(ids, Tensor):
        given = " ".join(repr(ids).split())[:80]
        raise ValueError(f"{owner}: ids: expected an int32 or int64 tensor [{dims}]; got {given}")
    if ids.dim() != dims.count(",") + 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{owner}: ids: expected int32 or int64 [{dims}]; got {ids.dtype} {tuple(ids.shape)}"
        )
    _check_range(owner, "ids", ids, 0, vocab_size, f"0 to below vocab_size={vocab_size}")


def lengths_tensor(lengths: Any, rows: int) -> Tensor:
    """The lengths of so many rows as a tensor; ValueError for what cannot be one."""
    try:
        return torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        given = " ".join(repr(lengths).split())[:80]
        raise ValueError(f"lengths: expected int32 or int64 [B={rows}]; got {given}") from None


def check_labels(owner: str, labels: Tensor, shape: tuple[int, ...], like: str, end: int) -> None:
    """Raises ValueError unless labels are integers of `shape`, called `like`, and, as far as can be
    seen, -100 or from 0 to below `end`."""
    if not isinstance(labels, Tensor):
        raise ValueError(f"{owner}: labels: expected a tensor; got a {type(labels).__name__}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{owner}: labels: expected int64; got {labels.dtype}")
    if labels.shape != shape:
        raise ValueError(
            f"{owner}: labels: expected {like}, {tuple(shape)}; got {tuple(labels.shape)}"
        )
    if can_be_read(labels):
        asked = labels[labels != IGNORED]
        _check_range(owner, "labels", asked, 0, end, f"-100, or 0 to below {end}")


def refuse_own_labels(owner: str, ids: Tensor, labels: Tensor) -> None:
    """Raises ValueError where labels are the ids themselves, from which a model that sees a token
    before it predicts it learns nothing; as far as can be seen, also where they are equal, unless
    every id is the next one, too."""
    same = labels is ids
    if not same and can_be_read(labels) and can_be_read(ids):
        varies = bool((ids[:, 1:] != ids[:, :-1]).any())
        same = varies and torch.equal(labels, ids.to(labels.dtype))
    if same:
        raise ValueError(
            f"{owner}: labels: expected what each position should predict; got ids themselves: "
            'labels="next" predicts the token that follows'
        )


def check_positions(owner: str, positions: Tensor, ids: Tensor) -> None:
    """Raises ValueError unless positions is int64 ``[B, P]``, of tokens that ids ``[B, T]`` has, as
    far as can be seen."""
    if not isinstance(positions, Tensor):
        given = f"a {type(positions).__name__}"
        raise ValueError(f"{owner}: positions: expected an int64 tensor [B, P]; got {given}")
    if positions.dim() != 2 or positions.size(0) != ids.size(0):
        raise ValueError(
            f"{owner}: positions: expected [B={ids.size(0)}, P]; got {tuple(positions.shape)}"
        )
    if positions.dtype != torch.int64:
        raise ValueError(f"{owner}: positions: expected int64; got {positions.dtype}")
    _check_range(owner, "positions", positions, 0, ids.size(1), f"0 to below T={ids.size(1)}")


def can_be_read(t: Tensor) -> bool:
    """Whether values of `t` can be looked at for nothing."""
    return (
        not torch.compiler.is_compiling()
        and t.device.type == "cpu"
        and type(t) is Tensor
        and not torch.jit.is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
    )


def _check_range(owner: str, name: str, t: Tensor, low: int, end: int, expected: str) -> None:
    if not can_be_read(t) or t.numel() == 0:
        return
    least, most = (int(value) for value in t.aminmax())
    if least < low or most >= end:
        given = least if least < low else most
        raise ValueError(f"{owner}: {name}: expected {expected}; got {given}")
