"""What attention remembers of the tokens it has read, and how room is made in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

GROWS = -1  # in place of a fixed capacity
_FIRST_CAPACITY = 64


class AttentionState(NamedTuple):
    """What `Attention` and `ForgettingAttention` remember of N sequences.

    Args:
        k, v: keys and values ``[N, capacity, Hkv, D]``, keys normed and rotated, in the module's
            dtype.
        gates: log forget gates ``[N, capacity, H]``, fp32 or fp64; no heads where there is no
            gate.
        lengths: how many tokens each sequence holds, int32 ``[N]``.
        seen: how many tokens each has read, int64 ``[N]``: the next one's position.
        last_k, last_v: the last token's keys and values before KV-shift, ``[N, Hkv, D]``; no heads
            without KV-shift.
        room: int64 ``[2]`` on the CPU: a bound on `lengths`, which is known without waiting for the
            device, and the capacity where it is fixed, -1 where it grows.
    """

    k: Tensor
    v: Tensor
    gates: Tensor
    lengths: Tensor
    seen: Tensor
    last_k: Tensor
    last_v: Tensor
    room: Tensor

    @property
    def capacity(self) -> int:
        """For how many tokens a sequence there is memory now."""
        return self.k.size(1)

    @property
    def caches(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is stored a token."""
        return self.k, self.v, self.gates


def empty_attention_state(
    batch: int,
    capacity: int | None,
    *,
    kv_heads: int,
    head_dim: int,
    gate_heads: int,
    shifts: bool,
    device: torch.device,
    dtype: torch.dtype,
    wide: torch.dtype,
) -> AttentionState:
    """Zeros. capacity None: it grows with what is written."""
    size = 0 if capacity is None else capacity
    where = {"device": device, "dtype": dtype}
    cache = (batch, size, kv_heads, head_dim)
    last = (batch, kv_heads if shifts else 0, head_dim)
    return AttentionState(
        torch.zeros(cache, **where),
        torch.zeros(cache, **where),
        torch.zeros(batch, size, gate_heads, device=device, dtype=wide),
        torch.zeros(batch, device=device, dtype=torch.int32),
        torch.zeros(batch, device=device, dtype=torch.int64),
        torch.zeros(last, **where),
        torch.zeros(last, **where),
        torch.tensor([0, GROWS if capacity is None else capacity], device="cpu"),
    )


def longest(lengths: Tensor) -> int:
    """The largest of the lengths, 0 of none. Waits for the device."""
    return int(lengths.max()) if lengths.numel() else 0


# How many of the first tokens of each sequence no query to come can see, ``[N]``; None: all may be.
Unreachable = Callable[[AttentionState], Tensor | None]


def is_exporting() -> bool:
    """Whether torch.export traces. (While Dynamo compiles, torch's own function says so, too.)"""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def with_room(
    owner: str, state: AttentionState, new: Tensor | int, unreachable: Unreachable
) -> AttentionState:
    """The state, or a copy of it, with memory for `new` more tokens a sequence.

    Memory is found, in this order, where there is some left, by dropping tokens that are
    unreachable, and by growing. ValueError where a fixed capacity is full.
    """
    if is_exporting():
        return state  # nothing can be looked at: programs are given enough
    needed = longest(state.lengths + new)
    capacity = state.capacity
    count = unreachable(state) if needed > capacity else None
    if count is not None:
        state = _dropped(state, count.to(state.lengths.dtype))
        needed = longest(state.lengths + new)
    if needed <= capacity:
        return state
    if int(state.room[1]) != GROWS:
        raise _full(owner, needed, capacity)
    size = max(needed, 2 * capacity, _FIRST_CAPACITY)
    caches = (
        torch.cat([t, t.new_zeros(t.size(0), size - capacity, *t.shape[2:])], 1)
        for t in state.caches
    )
    return AttentionState(*caches, *state[3:])


def _full(owner: str, needed: int, capacity: int) -> ValueError:
    return ValueError(
        f"{owner}: state: expected room for {needed} tokens, which init_state() and prefill() make "
        f"by their capacity; got {capacity}"
    )


def check_room(owner: str, state: AttentionState, unreachable: Unreachable) -> None:
    """Raises ValueError where make_room_() would. Looks at the device only where room may be
    short, and nowhere while a compiler traces."""
    if torch.compiler.is_compiling():
        return
    capacity = state.capacity
    if int(state.room[1]) == GROWS or int(state.room[0]) < capacity:
        return
    count = unreachable(state)
    needed = longest(state.lengths if count is None else state.lengths - count) + 1
    if needed > capacity and longest(state.lengths) + 1 > capacity:
        raise _full(owner, needed, capacity)


def _dropped(state: AttentionState, count: Tensor) -> AttentionState:
    """Without the first `count` tokens of each sequence."""
    steps = torch.arange(state.capacity, device=count.device) + count[:, None]
    rows = torch.arange(count.numel(), device=count.device)[:, None]
    places = (rows, steps.clamp(max=max(state.capacity - 1, 0)))
    return AttentionState(*(t[places] for t in state.caches), state.lengths - count, *state[4:])


def make_room_(owner: str, state: AttentionState, unreachable: Unreachable) -> None:
    """with_room() for one token, in place. Looks at the device only where room may be short.

    While a compiler traces, nothing is looked at, and the memory that is there has to do: a token
    beyond it is torch's error of an index that is out of bounds.
    """
    if torch.compiler.is_compiling():
        if state.capacity == 0:
            raise ValueError(
                f"{owner}: state: expected a capacity, which a compiled step cannot enlarge: "
                "init_state(batch, capacity=...); got 0"
            )
        return
    if int(state.room[0]) < state.capacity:
        return
    found = with_room(owner, state, 1, unreachable)
    for mine, other in zip(state[:4], found[:4], strict=True):
        if mine is not other:
            mine.set_(other)
    state.room[0] = longest(state.lengths)
