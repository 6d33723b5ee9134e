"""What softmax attention's mixers share: projections, KV-shift, norms, positions, state, output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ._attention_state import (
    AttentionState,
    check_room,
    empty_attention_state,
    is_exporting,
    longest,
    make_room_,
    with_room,
)
from ._common import (
    OUTPUT_ACTIVATIONS,
    KeepsFloat32,
    Norm,
    check_choice,
    check_eps,
    check_mixer_input,
    check_positive,
    check_switches,
    constant_,
    gated_norm,
    is_number,
    make_linear,
    make_norm,
    refuse_gamma,
    reset_linear,
    wide_dtype,
    widen,
)
from ._states import check_own_memory, check_sizes, check_state_tensor, refuse_gradients

PRESETS = ("llama", "pro")


def rotary_angles(
    positions: Tensor, half: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin ``[B or 1, T, half]`` of positions ``[B or 1, T]`` times ``theta^(-i/half)``, for
    channel i of each half (Su et al., arXiv 2104.09864)."""
    exponents = torch.arange(half, device=positions.device, dtype=dtype) / -half
    angles = positions[..., None].to(dtype) * torch.pow(theta, exponents)
    return angles.cos(), angles.sin()


class HeadNorm(Norm):
    """RMSNorm of every head by itself: x ``[..., heads, size]``. weight: ``[heads * size]``, each
    head its own."""

    _kind = "rms"

    def __init__(self, heads: int, size: int, eps: float, device=None, dtype=None) -> None:
        super().__init__()
        self.heads, self.size, self.eps = heads, size, eps
        self.weight = nn.Parameter(torch.empty(heads * size, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """weight: one."""
        constant_(self.weight, 1.0)

    def _parameters_for(self, x: Tensor) -> tuple[Tensor, None]:
        return self.weight.view(self.heads, self.size), None

    def extra_repr(self) -> str:
        return f"heads={self.heads}, size={self.size}, eps={self.eps}"


class Layout:
    """Where tokens ``[B, T]`` belong: to sequence b of the batch, or, packed, to one of cu_seqlens.

    count: N, how many sequences. lengths: their tokens, int64 ``[N]``. bounds: ``[N+1]``, of the
    tokens end to end. rows: each token's sequence, steps: its place in there, int64 ``[B, 1]`` and
    ``[1, T]``, packed ``[1, T]``. Nothing here waits for the device, and what nobody asks for is
    not made.
    """

    def __init__(self, owner: str, x: Tensor, cu_seqlens: Tensor | None) -> None:
        self.batch, self.time = x.shape[:2]
        self.device = x.device
        self.is_packed = cu_seqlens is not None
        self._bounds = None if cu_seqlens is None else ops.packed_bounds(owner, x, cu_seqlens)
        self.count = self.batch if self._bounds is None else self._bounds.numel() - 1

    def _arange(self, size: int) -> Tensor:
        return torch.arange(size, device=self.device)

    @property
    def bounds(self) -> Tensor:
        return self._arange(self.batch + 1) * self.time if self._bounds is None else self._bounds

    @property
    def lengths(self) -> Tensor:
        if self._bounds is None:
            return torch.full((self.batch,), self.time, device=self.device)
        return self._bounds.diff()

    @property
    def rows(self) -> Tensor:
        if self._bounds is None:
            return self._arange(self.batch)[:, None]
        # Empty sequences own no token: of equal bounds the last one counts.
        tokens = self._arange(self.time)
        return (torch.searchsorted(self._bounds, tokens, right=True) - 1)[None]

    @property
    def steps(self) -> Tensor:
        tokens = self._arange(self.time)[None]
        return tokens if self._bounds is None else tokens - self._bounds[self.rows]

    def per_token(self, t: Tensor) -> Tensor:
        """t ``[N, ...]`` of each token's sequence: ``[B, 1 or T, ...]``."""
        return t[self.rows]


def attend_by_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    layout: Layout,
    *,
    window: int | None,
    prune: float | None = None,
) -> Tensor:
    """o ``[B, T, H, D]`` by `ops.forgetting_attention`, of queries and keys that are the same
    tokens."""
    bounds = layout.bounds if layout.is_packed else None
    return ops.forgetting_attention(
        q.to(v.dtype), k.to(v.dtype), v, log_f, window=window, cu_seqlens=bounds, prune=prune
    )


def attend_state_by_op(
    q: Tensor,
    state: AttentionState,
    gates: Tensor,
    layout: Layout,
    *,
    window: int | None,
    prune: float | None = None,
) -> Tensor:
    """o ``[B, T, H, D]`` by `ops.forgetting_attention`, of the last tokens that the state holds,
    over all of them; gates ``[N, capacity, H]``."""
    # Sequences hold different numbers of tokens: they are packed, end to end.
    lengths = state.lengths.long()
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    rows = torch.repeat_interleave(lengths)
    steps = torch.arange(rows.numel(), device=q.device) - bounds[rows]
    k, v, log_f = (t[rows, steps][None] for t in (state.k, state.v, gates))
    packed = q.flatten(0, 1)[None].to(k.dtype)
    o = ops.forgetting_attention(
        packed,
        k,
        v,
        log_f,
        window=window,
        cu_seqlens=layout.bounds,
        cu_seqlens_k=bounds,
        prune=prune,
    )
    return o.view(q.shape)


class SoftmaxAttention(KeepsFloat32, ABC):
    """Base of `Attention` and `ForgettingAttention`, whose documentation says what it computes."""

    bidirectional = False
    takes_gamma = False
    needs_gamma = False
    keeps_tokens = True
    _float32_names = ("gate_bias",)

    def _configure(
        self,
        dim: int,
        num_heads: int | None,
        *,
        preset: str,
        num_kv_heads: int | None,
        qk_norm: bool | None,
        qk_norm_shared: bool,
        output_gate: bool | None,
        output_activation: str,
        output_norm: bool | None,
        kv_shift: bool | None,
        rope: float | None,
        window: int | None,
        norm_eps: float,
        qk_norm_eps: float | None,
    ) -> None:
        """Checks the options and keeps them, defaults filled in."""
        owner = self._owner
        check_positive(owner, "dim", dim)
        num_heads = max(dim // 64, 1) if num_heads is None else num_heads
        check_positive(owner, "num_heads", num_heads)
        if dim % num_heads:
            raise ValueError(
                f"{owner}: num_heads: expected a divisor of dim={dim}; got {num_heads}"
            )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(owner, "num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{owner}: num_kv_heads: expected a divisor of num_heads={num_heads}; "
                f"got {num_kv_heads}"
            )
        check_choice(owner, "preset", preset, PRESETS)
        by_preset = {"qk_norm": qk_norm, "output_gate": output_gate, "output_norm": output_norm}
        check_switches(owner, can_be_none=True, **by_preset, kv_shift=kv_shift)
        check_switches(owner, qk_norm_shared=qk_norm_shared)
        check_choice(owner, "output_activation", output_activation, OUTPUT_ACTIVATIONS)
        if rope is not None and not (is_number(rope) and rope > 0):
            raise ValueError(f"{owner}: rope: expected a positive number; got {rope!r}")
        if rope is not None and (dim // num_heads) % 2:
            raise ValueError(
                f"{owner}: num_heads: expected an even number of channels a head, which rope "
                f"turns in pairs; got {dim // num_heads}"
            )
        if window is not None:
            check_positive(owner, "window", window)
        check_eps(owner, "norm_eps", norm_eps)
        if qk_norm_eps is not None:
            check_eps(owner, "qk_norm_eps", qk_norm_eps)
        is_pro = preset == "pro"
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.num_kv_heads = num_kv_heads
        self.preset, self.rope, self.window = preset, rope, window
        self.qk_norm = is_pro if qk_norm is None else qk_norm
        self.qk_norm_shared = qk_norm_shared
        self.output_gate = is_pro if output_gate is None else output_gate
        self.output_activation = output_activation
        self.output_norm_on = is_pro if output_norm is None else output_norm
        self.kv_shift = is_pro if kv_shift is None else kv_shift
        self.norm_eps = norm_eps
        self.qk_norm_eps = norm_eps if qk_norm_eps is None else qk_norm_eps

    def _make_projections(self, **where: Any) -> None:
        """in_proj and, with KV-shift, shift_proj."""
        kv_dim = self.num_kv_heads * self.head_dim
        self._rows = [self.dim, kv_dim, kv_dim] + [self.dim] * self.output_gate
        self.in_proj = make_linear(self.dim, self._rows, False, **where)
        self.shift_proj = None
        if self.kv_shift:
            self.shift_proj = make_linear(self.dim, [self.num_kv_heads] * 2, False, **where)

    def _make_outputs(self, **where: Any) -> None:
        """The norms and out_proj."""
        self.q_norm = self.k_norm = self.output_norm = None
        if self.qk_norm:
            self.q_norm = self._make_qk_norm(self.num_heads, **where)
            self.k_norm = self._make_qk_norm(self.num_kv_heads, **where)
        if self.output_norm_on:
            self.output_norm = HeadNorm(self.num_heads, self.head_dim, self.norm_eps, **where)
        self.out_proj = make_linear(self.dim, self.dim, False, **where)

    def _make_qk_norm(self, heads: int, **where: Any) -> nn.Module:
        if self.qk_norm_shared:
            return make_norm("rms", self.head_dim, self.qk_norm_eps, **where)
        return HeadNorm(heads, self.head_dim, self.qk_norm_eps, **where)

    def _reset_gate(self) -> None:
        """Draws the forget gate's parameters, where there is one."""

    def reset_parameters(self) -> None:
        """in_proj, shift_proj, the forget gate's projection and bias, the norms (one), out_proj, in
        this order; projections uniform on +-1/sqrt(dim)."""
        reset_linear(self.in_proj)
        if self.shift_proj is not None:
            reset_linear(self.shift_proj)
        self._reset_gate()
        for norm in (self.q_norm, self.k_norm, self.output_norm):
            if norm is not None:
                constant_(norm.weight, 1.0)
        reset_linear(self.out_proj)

    # State

    def init_state(
        self,
        batch: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        capacity: int | None = None,
    ) -> AttentionState:
        """The empty state of `batch` sequences; device and dtype default to the module's.

        capacity: for how many tokens a sequence there is room; one more is an error. None: memory
        is doubled whenever it is full.
        """
        check_sizes(self._owner, batch, capacity)
        weight = self.out_proj.weight
        dtype = weight.dtype if dtype is None else dtype
        return empty_attention_state(
            batch,
            capacity,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            gate_heads=self._gate_heads,
            shifts=self.kv_shift,
            device=weight.device if device is None else device,
            dtype=dtype,
            wide=wide_dtype(dtype),
        )

    _gate_heads = 0

    def _checked(self, state: tuple[Tensor, ...], sequences: int) -> AttentionState:
        wanted = len(AttentionState._fields)
        if not isinstance(state, (tuple, list)) or len(state) != wanted:
            is_tensor = isinstance(state, Tensor)
            given = len(state) if isinstance(state, (tuple, list)) else f"a {type(state).__name__}"
            raise ValueError(
                f"{self._owner}: state: expected the {wanted} tensors of an AttentionState; "
                f"got {1 if is_tensor else given}"
            )
        k = state[0]
        if not isinstance(k, Tensor):
            raise ValueError(
                f"{self._owner}: state: k: expected a tensor; got a {type(k).__name__}"
            )
        heads = (self.num_kv_heads, self.head_dim)
        if k.dim() != 4 or k.size(0) != sequences or k.shape[2:] != heads:
            raise ValueError(
                f"{self._owner}: state: expected keys [{sequences}, capacity, {heads[0]}, "
                f"{heads[1]}]; got {tuple(k.shape)}"
            )
        state = AttentionState(*state)
        last = (sequences, self.num_kv_heads if self.kv_shift else 0, self.head_dim)
        gates = (sequences, k.size(1), self._gate_heads)
        for name, shape, dtype in (
            ("v", k.shape, k.dtype),
            ("gates", gates, wide_dtype(k.dtype)),
            ("lengths", (sequences,), torch.int32),
            ("seen", (sequences,), torch.int64),
            ("last_k", last, k.dtype),
            ("last_v", last, k.dtype),
            ("room", (2,), torch.int64),
        ):
            part = getattr(state, name)
            check_state_tensor(f"{self._owner}: state: {name}", part, shape, dtype)
            where = torch.device("cpu") if name == "room" else k.device
            if part.device != where:
                raise ValueError(
                    f"{self._owner}: state: {name}: expected {where}, "
                    f"{'where it is read' if name == 'room' else 'as its keys'}; got {part.device}"
                )
        return state

    def _unreachable(self, state: AttentionState) -> Tensor | None:
        """How many of the first tokens of each sequence no query to come can see, ``[N]``."""
        if self.window is None:
            return None
        return (state.lengths - (self.window - 1)).clamp(min=0)

    def check_room(self, state: AttentionState, batch: int) -> None:
        """Raises ValueError unless step() has room in `state` for a token of each of `batch`
        sequences."""
        check_room(self._owner, self._checked(state, batch), self._unreachable)

    def _check_gamma(self, gamma: Tensor | None) -> None:
        """Raises ValueError for a lower bound that the mixer does not take."""
        refuse_gamma(self._owner, gamma, ", since it has no lower bound")

    # Calls

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

        state: where to go on from; waits for the device. gamma: this layer's lower bound
        ``[num_heads]`` in [0, 1), only where the mixer takes one (`takes_gamma`); None = 0.
        cu_seqlens: bounds ``[N+1]`` of the sequences packed into a B = 1 batch.
        """
        check_mixer_input(self._owner, x, self.dim, weight=self.in_proj.weight)
        self._check_gamma(gamma)
        layout = Layout(self._owner, x, cu_seqlens)
        if state is not None:
            state = self._checked(state, layout.count)
        q, k, v, g, last = self._operands(x, layout, state)
        log_f = self._training_log_gate(x, gamma)
        if state is None:
            return self._output(self._attend(q, k, v, log_f, layout), g), None
        after = self._extended(state, k, v, log_f, last, layout)
        # Where nothing was read before, as in exported programs, the keys are the new ones.
        if is_exporting() or int(state.room[0]) == 0:
            o = self._attend(q, k, v, log_f, layout)
        else:
            o = self._attend_state(q, after, layout)
        return self._output(o, g), after

    def step(self, x: Tensor, state: AttentionState, gamma: Tensor | None = None) -> Tensor:
        """One token: x ``[B, dim]`` -> y ``[B, dim]``; `state` is updated in place. Has no
        gradient: call it under torch.no_grad() or torch.inference_mode(). Work grows with the
        tokens held. Compiled or exported it takes the state's memory as it is: give init_state() a
        capacity."""
        check_mixer_input(f"{self._owner}.step", x, self.dim, False, self.in_proj.weight)
        self._check_gamma(gamma)
        state = self._checked(state, x.size(0))
        for part in state:
            check_own_memory(f"{self._owner}.step: state", part)
        refuse_gradients(f"{self._owner}.step", self, x, state.k, state.v)
        make_room_(self._owner, state, self._unreachable)
        x = x[:, None]
        layout = Layout(self._owner, x, None)
        q, k, v, g, last = self._operands(x, layout, state)
        log_f = self._log_gate(x, gamma)
        rows, places = torch.arange(x.size(0), device=x.device), state.lengths.long()
        new = (k, v) if log_f is None else (k, v, log_f)
        for cache, t in zip(state.caches, new, strict=False):
            cache.index_put_((rows, places), t[:, 0].to(cache.dtype))
        for mine, t in zip((state.last_k, state.last_v), last, strict=False):
            mine.copy_(t)
        state.lengths.add_(1)
        state.seen.add_(1)
        state.room[0] += 1
        return self._output(self._attend_step(q, state), g)[:, 0]

    def _operands(
        self, x: Tensor, layout: Layout, state: AttentionState | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]:
        """q ``[B, T, H, D]``; k, v ``[B, T, Hkv, D]``, shifted, normed, rotated; the output gate's
        logits ``[B, T, dim]``; for a state each sequence's last k and v before KV-shift."""
        q, k, v, *g = self.in_proj(x).split(self._rows, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        last: tuple[Tensor, ...] = ()
        if self.shift_proj is not None:
            mixes = torch.sigmoid(widen(self.shift_proj(x))).chunk(2, dim=-1)
            carried = (None, None) if state is None else (state.last_k, state.last_v)
            if state is not None:
                last = tuple(_last(t, layout, c) for t, c in zip((k, v), carried, strict=True))
            k, v = (
                _shifted(t, a, layout, c) for t, a, c in zip((k, v), mixes, carried, strict=True)
            )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            positions = layout.steps
            if state is not None:
                positions = positions + layout.per_token(state.seen)
            angles = rotary_angles(positions, self.head_dim // 2, self.rope, wide_dtype(q.dtype))
            q, k = (ops.rotary(t, *angles) for t in (q, k))
        return q, k, v, g[0] if g else None, last

    def attention_operands(
        self, x: Tensor, gamma: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What attends to what, for whoever wants to look, of tokens x ``[B, T, dim]``, gamma as in
        forward(): q ``[B, T, H, D]``, k ``[B, T, Hkv, D]``, shifted, normed, rotated; log f
        ``[B, T, H]``, or None."""
        self._check_gamma(gamma)
        q, k, *_ = self._operands(x, Layout(self._owner, x, None), None)
        return q, k, self._log_gate(x, gamma)

    def _log_gate(self, x: Tensor, gamma: Tensor | None) -> Tensor | None:
        """log f ``[B, T, H]``, or None."""
        return None

    def _training_log_gate(self, x: Tensor, gamma: Tensor | None) -> Tensor | None:
        """The log f that forward() takes: with noise where the options ask for it and the module
        trains."""
        return self._log_gate(x, gamma)

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None, layout: Layout
    ) -> Tensor:
        """o ``[B, T, H, D]`` of queries and keys that are the same tokens."""

    @abstractmethod
    def _attend_state(self, q: Tensor, state: AttentionState, layout: Layout) -> Tensor:
        """o ``[B, T, H, D]`` of the last tokens that the state holds, over all of them."""

    @abstractmethod
    def _attend_step(self, q: Tensor, state: AttentionState) -> Tensor:
        """o ``[N, 1, H, D]`` of the last token that the state holds."""

    def _extended(
        self,
        state: AttentionState,
        k: Tensor,
        v: Tensor,
        log_f: Tensor | None,
        last: tuple[Tensor, ...],
        layout: Layout,
    ) -> AttentionState:
        """The state with the new tokens in it."""
        state = with_room(self._owner, state, layout.lengths, self._unreachable)
        rows = layout.rows.expand(k.shape[:2])
        places = (rows, layout.per_token(state.lengths).long() + layout.steps)
        new = (k, v, k.new_zeros(*k.shape[:2], 0) if log_f is None else log_f)
        caches = (
            cache.index_put(places, t.to(cache.dtype))
            for cache, t in zip(state.caches, new, strict=True)
        )
        lengths = state.lengths + layout.lengths.to(state.lengths.dtype)
        last = tuple(t.to(state.k.dtype) for t in last) or (state.last_k, state.last_v)
        room = state.room
        if not is_exporting():
            room = torch.stack([torch.tensor(longest(lengths)), room[1]])
        return AttentionState(*caches, lengths, state.seen + layout.lengths, *last, room)

    def _output(self, o: Tensor, g: Tensor | None) -> Tensor:
        """Norm, gate and output projection of o ``[B, T, H, D]``."""
        if self.output_norm is not None:
            gate = None if g is None else g.unflatten(-1, o.shape[-2:])
            return self.out_proj(
                gated_norm(self.output_norm, o, gate, self.output_activation).flatten(-2)
            )
        o = o.flatten(-2)
        if g is not None:
            o = o * (torch.sigmoid(g) if self.output_activation == "sigmoid" else F.silu(g))
        return self.out_proj(o)

    def _switches(self) -> str:
        """The options that both classes have, for extra_repr."""
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"preset={self.preset!r}, qk_norm={self.qk_norm}, output_gate={self.output_gate}, "
            f"output_norm={self.output_norm_on}, kv_shift={self.kv_shift}, rope={self.rope}, "
            f"window={self.window}"
        )


def _shifted(x: Tensor, mix: Tensor, layout: Layout, carried: Tensor | None) -> Tensor:
    """``a_t x_{t-1} + (1 - a_t) x_t`` (Forgetting Transformer, eq. 14): x ``[B, T, H, D]``, a
    ``[B, T, H]``, x before each sequence's first token ``[N, H, D]``, None = zero."""
    if is_exported := is_exporting():
        # A slice of T - 1 tokens would make T = 2 a case of its own.
        before = x[:, (layout.steps[0] - 1).clamp(min=0)]
    else:
        before = F.pad(x[:, :-1], (0, 0, 0, 0, 1, 0)) if x.size(1) else x
    if is_exported or layout.is_packed or carried is not None:
        is_first = (layout.steps == 0)[..., None, None]
        if carried is None:
            before = before.masked_fill(is_first, 0.0)
        else:
            before = torch.where(is_first, layout.per_token(carried).to(x.dtype), before)
    wide = widen(x)
    return (wide + mix[..., None] * (widen(before) - wide)).to(x.dtype)


def _last(x: Tensor, layout: Layout, carried: Tensor) -> Tensor:
    """The last x ``[B, T, H, D]`` of each sequence ``[N, H, D]``; of an empty one what came
    before."""
    if x.size(1) == 0:
        return carried.clone()
    ends = x.flatten(0, 1)[(layout.bounds[1:] - 1).clamp(min=0)]
    return torch.where((layout.lengths > 0)[:, None, None], ends, carried.to(x.dtype))
