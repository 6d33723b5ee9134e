"""Softmax attention with rotary positions: the Transformer that the recurrent mixers are compared
with."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._common import (
    check_choice,
    check_mixer_input,
    check_positive,
    make_linear,
    reset_linear,
    widen,
)


class AttentionState(NamedTuple):
    """What `Attention` remembers: keys and values ``[N, capacity, H, D]``, keys rotated, and how
    many tokens each sequence has, int64 ``[N]``."""

    k: Tensor
    v: Tensor
    lengths: Tensor


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions (Su et al., arXiv 2104.09864): x ``[B, T, H, D]`` with channel i < D/2 and
    channel i + D/2 turned by ``position * theta^(-2i/D)``; positions ``[B or 1, T]``."""
    wide = widen(x)
    half = x.size(-1) // 2
    exponents = torch.arange(half, device=x.device, dtype=wide.dtype) / -half
    angles = (positions[..., None].to(wide.dtype) * torch.pow(theta, exponents)).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    a, b = wide.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal softmax attention over H heads of D = dim / H channels, with rotary positions: a token
    mixer, by PyTorch's scaled_dot_product_attention.

    ``o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(D)) v_j``, q and k rotated.

    Args:
        dim: width of x and y.
        num_heads: H, a divisor of dim. None: dim / 64 (1 where dim is smaller).
        preset: "llama": no biases, no norms, no gates.
        rope: theta of the rotary positions; None: no positions.
        window: how many tokens, itself included, a token sees. None: all before it.

    Parameters: ``in_proj.weight`` ``[3 * dim, dim]``, rows of q, k, v in this order, each head
    after head; ``out_proj.weight`` ``[dim, dim]``.

    State: an `AttentionState`, with room for as many tokens as init_state() was told. Without one,
    forward() returns None for it.

    Raises ValueError for options that are unknown or do not fit each other.
    """

    bidirectional = False
    takes_gamma = False
    needs_gamma = False
    keeps_tokens = True

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        preset: str = "llama",
        rope: float | None = 10000.0,
        window: int | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_positive("Attention", "dim", dim)
        num_heads = max(dim // 64, 1) if num_heads is None else num_heads
        check_positive("Attention", "num_heads", num_heads)
        if dim % num_heads:
            raise ValueError(
                f"Attention: num_heads: expected a divisor of dim={dim}; got {num_heads}"
            )
        check_choice("Attention", "preset", preset, ("llama",))
        if rope is not None and not rope > 0:
            raise ValueError(f"Attention: rope: expected a positive number; got {rope!r}")
        if rope is not None and (dim // num_heads) % 2:
            raise ValueError(
                "Attention: num_heads: expected an even number of channels a head, which rope "
                f"turns in pairs; got {dim // num_heads}"
            )
        if window is not None:
            check_positive("Attention", "window", window)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.preset, self.rope, self.window = preset, rope, window
        self.in_proj = make_linear(dim, 3 * dim, False, device, dtype)
        self.out_proj = make_linear(dim, dim, False, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """in_proj, out_proj, in this order: uniform on +-1/sqrt(dim)."""
        reset_linear(self.in_proj)
        reset_linear(self.out_proj)

    def init_state(
        self,
        batch: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        capacity: int | None = None,
    ) -> AttentionState:
        """The empty state of `batch` sequences with room for `capacity` tokens, which must be
        given; device and dtype default to the module's."""
        if capacity is None:
            raise ValueError("Attention: capacity: expected the number of tokens to come; got None")
        weight = self.out_proj.weight
        device = weight.device if device is None else device
        shape = (batch, capacity, self.num_heads, self.head_dim)
        where = {"device": device, "dtype": weight.dtype if dtype is None else dtype}
        lengths = torch.zeros(batch, device=device, dtype=torch.int64)
        return AttentionState(torch.zeros(shape, **where), torch.zeros(shape, **where), lengths)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        *,
        gamma: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState | None]:
        """x ``[B, T, dim]`` -> y ``[B, T, dim]`` and, where a state was given, the state after the
        last token.

        state: where to go on from. gamma: None; there is no lower bound. cu_seqlens: bounds
        ``[N+1]`` of the sequences packed into a B = 1 batch; read on the host.
        """
        check_mixer_input("Attention", x, self.dim)
        self._refuse_gamma(gamma)
        if state is not None:
            sequences = x.size(0) if cu_seqlens is None else cu_seqlens.numel() - 1
            state = self._checked(state, sequences)
        q, k, v = self._project(x)
        rows = steps = None
        if cu_seqlens is not None:
            bounds = cu_seqlens.to(x.device).long()
            new = bounds.diff()
            rows = torch.repeat_interleave(new)
            steps = torch.arange(x.size(1), device=x.device) - bounds[rows]
            longest = int(new.max()) if new.numel() else 0
            q, k, v = (_padded(t, rows, steps, new.numel(), longest) for t in (q, k, v))
        else:
            new = torch.full((x.size(0),), x.size(1), device=x.device)
        past = torch.zeros_like(new) if state is None else state.lengths
        positions = past[:, None] + torch.arange(q.size(1), device=x.device)
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        if state is not None:
            state = self._extended(state, k, v, positions, new, rows, steps)
            k, v = state.k, state.v
        o = self._attend(q, k, v, None if state is None else positions)
        o = o if rows is None else o[rows, steps][None]
        return self.out_proj(o.flatten(-2)), state

    @torch.no_grad()
    def step(self, x: Tensor, state: AttentionState, gamma: Tensor | None = None) -> Tensor:
        """One token: x ``[B, dim]`` -> y ``[B, dim]``; `state` is updated in place. Records no
        gradient. Work grows with the state's capacity."""
        check_mixer_input("Attention.step", x, self.dim, time=False)
        self._refuse_gamma(gamma)
        state = self._checked(state, x.size(0))
        if state.lengths.device.type == "cpu":  # elsewhere looking would wait for the device
            self._check_room(state, state.lengths + 1)
        positions = state.lengths[:, None]
        q, k, v = (t[:, None] for t in self._project(x))
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        rows = torch.arange(x.size(0), device=x.device)
        for cache, new in ((state.k, k), (state.v, v)):
            cache.index_put_((rows, state.lengths), new[:, 0].to(cache.dtype))
        o = self._attend(q, state.k, state.v, positions)
        state.lengths.add_(1)
        return self.out_proj(o[:, 0].flatten(-2))

    def _refuse_gamma(self, gamma: Tensor | None) -> None:
        if gamma is not None:
            raise ValueError(
                "Attention: gamma: expected None, since it has no lower bound; got a tensor"
            )

    def _checked(self, state: tuple[Tensor, ...], sequences: int) -> AttentionState:
        if isinstance(state, Tensor) or len(state) != 3:
            count = 1 if isinstance(state, Tensor) else len(state)
            raise ValueError(
                f"Attention: state: expected keys, values and lengths; got {count} tensors"
            )
        k = state[0]
        if k.dim() != 4 or k.size(0) != sequences or k.shape[2:] != (self.num_heads, self.head_dim):
            raise ValueError(
                f"Attention: state: expected keys [{sequences}, capacity, {self.num_heads}, "
                f"{self.head_dim}]; got {tuple(k.shape)}"
            )
        return AttentionState(*state)

    def _check_room(self, state: AttentionState, lengths: Tensor) -> None:
        needed = int(lengths.max()) if lengths.numel() else 0
        if needed > state.k.size(1):
            raise ValueError(
                f"Attention: state: expected room for {needed} tokens, which init_state() and "
                f"prefill() make by their capacity; got {state.k.size(1)}"
            )

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v ``[..., H, D]``: views of one matrix product."""
        return self.in_proj(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.rope is None else rotate(x, positions, self.rope)

    def _extended(
        self,
        state: AttentionState,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        new: Tensor,
        rows: Tensor | None,
        steps: Tensor | None,
    ) -> AttentionState:
        """The state with the new tokens' keys and values ``[N, P, H, D]`` in it; rows and steps:
        which of them are tokens, None = all."""
        self._check_room(state, state.lengths + new)
        if rows is None:
            rows = torch.arange(k.size(0), device=k.device)[:, None].expand_as(positions).flatten()
            steps = torch.arange(k.size(1), device=k.device).repeat(k.size(0))
        places = (rows, positions[rows, steps])
        keys, values = (
            cache.index_put(places, t[rows, steps].to(cache.dtype))
            for cache, t in ((state.k, k), (state.v, v))
        )
        return AttentionState(keys, values, state.lengths + new)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        """Attention of q ``[N, P, H, D]`` over k, v ``[N, S, H, D]``. positions ``[N, P]``: of the
        queries, where the keys are a state's; None: queries and keys are the same tokens."""
        mask = None
        if positions is not None or self.window is not None:
            here = (
                torch.arange(q.size(1), device=q.device)[None] if positions is None else positions
            )
            back = here[:, :, None] - torch.arange(k.size(1), device=q.device)
            mask = (back >= 0)[:, None]
            if self.window is not None:
                mask = mask & (back < self.window)[:, None]
        q, k, v = (t.transpose(1, 2) for t in (q.to(k.dtype), k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return o.transpose(1, 2)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, preset={self.preset!r}, "
            f"rope={self.rope}, window={self.window}"
        )


def _padded(x: Tensor, rows: Tensor, steps: Tensor, count: int, longest: int) -> Tensor:
    """Packed tokens ``[1, total, H, D]`` as ``[count, longest, H, D]``, zeros after each end, which
    causal queries before them do not see."""
    out = x.new_zeros(count, longest, *x.shape[2:])
    return out.index_put((rows, steps), x[0])
