"""Softmax attention with a forget gate: the Forgetting Transformer's token mixer."""

from __future__ import annotations

import math
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ._attention_base import HeadNorm, Layout, SoftmaxAttention, attend_by_op, attend_state_by_op
from ._attention_state import AttentionState
from ._common import (
    LEAST_PRUNED_BYTES,
    RMSNorm,
    are_all_listened_to,
    bounded_gate,
    bounded_log_gate,
    check_choice,
    check_switch,
    constant_,
    is_hooked,
    is_number,
    make_linear,
    number_text,
    reset_linear,
    wide_dtype,
    widen,
)
from ._gate_init import GateInit, check_gate_options, gumbel_gate, parse_gate_init
from ._lower_bound import OptionalLowerBound

GATES = ("data", "independent", "fixed", "none")
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_LONG = re.compile(rf"long:({_NUMBER}):({_NUMBER})")
# A pruned cache drops a token where its weight in any query to come is below prune / 2^32: all that
# are dropped then weigh less than prune together, for as long as there are fewer than 2^32.
_LOG_MOST_TOKENS = 32 * math.log(2)


def _parse_init(gate_init: object, heads: int) -> tuple[float, float] | GateInit | None:
    """T_min and T_max of ``("long", T_min, T_max)`` or "long:T_min:T_max"; None for "zero"; what
    `gate_init` means for gated modules in general."""
    text = gate_init
    if isinstance(gate_init, (tuple, list)):
        text = ":".join(map(str, gate_init))
    if text == "zero":
        return None
    match = _LONG.fullmatch(text) if isinstance(text, str) else None
    if match and float(match[1]) > 0 and float(match[2]) > 0:
        return float(match[1]), float(match[2])
    also = "'zero', 'long:T_min:T_max' with numbers above 0, "
    return parse_gate_init("ForgettingAttention", text, heads, also)


def _bounds_its_rows(norm: nn.Module | None) -> bool:
    """Whether what `norm` makes is bounded by its weights: that of an RMS norm is, that of another
    module in its place, or of a norm whose results a hook, of its own or of all modules, changes,
    may not be."""
    if type(norm) not in (RMSNorm, nn.RMSNorm, HeadNorm) or norm.weight is None:
        return False
    return not (is_hooked(norm) or are_all_listened_to())


class ForgettingAttention(OptionalLowerBound, SoftmaxAttention):
    """Forgetting attention: causal softmax attention whose weights fade by a forget gate, a token
    mixer (Forgetting Transformer, arXiv 2503.02130, eq. 11 to 14 and appendix A).

    For each of H heads of D = dim / H channels::

        o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(D) + sum_{j < l <= i} log f_l) v_j
        f_t = sigmoid(w.x_t + b)        gate="data"
        f_t = sigmoid(b)                gate="independent"; "fixed": b is not trained
        f_t = 1                         gate="none": softmax attention

    With lower_bound=True f_t = gamma + (1 - gamma) * sigmoid(...), one gamma a head.

    preset="llama" is that alone, "pro" adds QK-norm, an output gate, an output norm and KV-shift;
    `Attention` says what they are, and what its options, which are all options here, do.

    Args:
        dim: width of x and y.
        num_heads: H, a divisor of dim. None: dim / 64 (1 where dim is smaller).
        preset: "llama" or "pro".
        num_kv_heads: heads of keys and values, a divisor of H; None: H.
        gate: "data", "independent", "fixed" or "none".
        gate_init: b at the start: "zero", or ``("long", T_min, T_max)``, in a configuration
            "long:T_min:T_max": head h forgets over ``T_h = -1 / log sigmoid(b_h)`` tokens, from
            T_min to T_max in equal steps of log T (section 4.5). At 8 heads fixed (2, 256) is
            ALiBi. Or "standard", "ugi", "chrono:T_max", "gumbel-softmax" or
            "gumbel-softmax:alpha:tau" (see `tidegate.nn.init`).
        gumbel_gate: tau of Gumbel-Gate, with gate="data": noise on the gate's logits in training;
            see `GatedLinearRNN`.
        lower_bound: whether a gamma is taken (HGRN's lower bounds); not with gate="none".
        qk_norm, qk_norm_shared, output_gate, output_activation, output_norm, kv_shift: see
            `Attention`.
        rope: theta of the rotary positions; None: no positions.
        window: how many tokens, itself included, a token sees. None: all before it.
        prune: leave out weights that are provably below this in all; see
            `tidegate.ops.forgetting_attention`. None: none. With QK-norm, which bounds keys, a
            step reads less of its state, too (on a GPU: of a state of at least 64 MB of keys);
            without it, every key that its state holds.
        drop_pruned: whether a full state drops tokens whose weight in every query to come is
            provably below `prune` in all, which keeps it small where gates are strong. The proof
            needs QK-norm, which bounds q.k.
        norm_eps, qk_norm_eps: see `Attention`.

    Parameters: those of `Attention`; ``gate_proj.weight`` ``[H, dim]``, with gate="data", and
    ``gate_bias`` ``[H]``, which stays fp32 in a bf16 module and is a buffer with gate="fixed".

    State: an `AttentionState`. Without one, forward() returns None for it.

    Raises ValueError for options that are unknown or do not fit each other.
    """

    _owner = "ForgettingAttention"
    _gamma_axis = "num_heads"

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        preset: str = "llama",
        num_kv_heads: int | None = None,
        gate: str = "data",
        gate_init: str | tuple[str, float, float] = "zero",
        gumbel_gate: float | None = None,
        lower_bound: bool = False,
        qk_norm: bool | None = None,
        qk_norm_shared: bool = True,
        output_gate: bool | None = None,
        output_activation: str = "sigmoid",
        output_norm: bool | None = None,
        kv_shift: bool | None = None,
        rope: float | None = None,
        window: int | None = None,
        prune: float | None = None,
        drop_pruned: bool = False,
        norm_eps: float = 1e-5,
        qk_norm_eps: float | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self._configure(
            dim,
            num_heads,
            preset=preset,
            num_kv_heads=num_kv_heads,
            qk_norm=qk_norm,
            qk_norm_shared=qk_norm_shared,
            output_gate=output_gate,
            output_activation=output_activation,
            output_norm=output_norm,
            kv_shift=kv_shift,
            rope=rope,
            window=window,
            norm_eps=norm_eps,
            qk_norm_eps=qk_norm_eps,
        )
        owner = self._owner
        check_choice(owner, "gate", gate, GATES)
        self._init = _parse_init(gate_init, self.num_heads)
        if self._init is not None and gate == "none":
            raise ValueError(
                f"{owner}: gate_init: expected 'zero' with gate='none'; got {gate_init!r}"
            )
        has_data = gate == "data"
        check_gate_options(owner, has_data, "gate='data'", None, gumbel_gate, self.num_heads)
        check_switch(owner, "lower_bound", lower_bound)
        if lower_bound and gate == "none":
            raise ValueError(
                f"{owner}: lower_bound: expected False with gate='none', which leaves nothing to "
                "bound; got True"
            )
        if prune is not None and not (is_number(prune) and 0 < prune < 1):
            raise ValueError(
                f"{owner}: prune: expected a number between 0 and 1; got {number_text(prune)}"
            )
        check_switch(owner, "drop_pruned", drop_pruned)
        if drop_pruned and (prune is None or not self.qk_norm):
            raise ValueError(
                f"{owner}: drop_pruned: expected False without prune and qk_norm, which bound what "
                "a dropped token weighs; got True"
            )
        self.gate, self.gate_init, self.gumbel_gate = gate, gate_init, gumbel_gate
        self.lower_bound = lower_bound
        self.prune, self.drop_pruned = prune, drop_pruned
        where = {"device": device, "dtype": dtype}
        self._make_projections(**where)
        self.gate_proj = make_linear(dim, self.num_heads, False, **where) if has_data else None
        if gate != "none":
            bias = torch.empty(self.num_heads, device=device, dtype=wide_dtype(dtype))
            if gate == "fixed":
                self.register_buffer("gate_bias", bias)
            else:
                self.gate_bias = nn.Parameter(bias)
        self._make_outputs(**where)
        self.reset_parameters()

    @property
    def _gate_heads(self) -> int:
        return self.num_heads

    def _reset_gate(self) -> None:
        if self.gate_proj is not None:
            reset_linear(self.gate_proj)
        if self.gate == "none":
            return
        if self._init is None:
            constant_(self.gate_bias, 0.0)
        elif isinstance(self._init, GateInit):
            self._init.draw(self.gate_bias, self.dim)
        else:
            ops.init_long_(self.gate_bias, *self._init)

    @property
    def has_data_gate(self) -> bool:
        """Whether the forget gate depends on the data."""
        return self.gate == "data"

    def forget_gate(
        self, x: Tensor, gamma: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """f_t, without noise, fp32 or fp64: x ``[..., dim]`` -> ``[..., H]``. Only with
        gate="data". gamma as in forward(); cu_seqlens makes no difference, since the gate reads
        its own token alone."""
        self._check_gamma(gamma)
        return bounded_gate(self.gate_logits(x), gamma)[0]

    def gate_logits(self, x: Tensor) -> Tensor:
        """What the forget gate is the sigmoid of, without noise and bound: x ``[..., dim]`` ->
        ``[..., H]``, fp32 or fp64. Only with gate="data"."""
        return widen(self.gate_proj(x)) + self.gate_bias

    def _log_gate(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        if self.gate == "none":
            wide = wide_dtype(x.dtype)
            return torch.zeros(1, dtype=wide, device=x.device).expand(*x.shape[:2], self.num_heads)
        if self.gate_proj is None:
            log_f = bounded_log_gate(F.logsigmoid(self.gate_bias), gamma)
            return log_f.expand(*x.shape[:2], -1)
        return bounded_log_gate(F.logsigmoid(self.gate_logits(x)), gamma)

    def _training_log_gate(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        if self.gumbel_gate is None or not self.training:
            return self._log_gate(x, gamma)
        logits = gumbel_gate(self.gate_logits(x), self.gumbel_gate)
        return bounded_log_gate(F.logsigmoid(logits), gamma)

    def log_gate(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        """log f of tokens x ``[B, T, dim]``: ``[B, T, H]``, fp32 or fp64. gamma as in forward()."""
        self._check_gamma(gamma)
        return self._log_gate(x, gamma)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None, layout: Layout
    ) -> Tensor:
        return attend_by_op(q, k, v, log_f, layout, window=self.window, prune=self.prune)

    def _attend_state(self, q: Tensor, state: AttentionState, layout: Layout) -> Tensor:
        return attend_state_by_op(
            q, state, state.gates, layout, window=self.window, prune=self.prune
        )

    def _attend_step(self, q: Tensor, state: AttentionState) -> Tensor:
        prune = key_norms = None
        if self._prunes_steps(state):
            prune = self.prune
            longest = self._longest_row(self.k_norm).to(state.gates.dtype)
            key_norms = longest.expand(state.k.shape[0], state.k.shape[2])
        o = ops.forgetting_attention_step(
            q[:, 0].to(state.k.dtype),
            state.k,
            state.v,
            state.gates,
            state.lengths,
            window=self.window,
            prune=prune,
            key_norms=key_norms,
        )
        return o[:, None]

    def _prunes_steps(self, state: AttentionState) -> bool:
        """Without a norm nothing is known of keys that are not read, so all of them are; and where
        a cache is small on a GPU, since there it takes less time to read all of it than to find out
        what to. A program that is compiled or exported serves caches of any size."""
        if self.prune is None or not _bounds_its_rows(self.k_norm):
            return False
        if not state.k.is_cuda or torch.compiler.is_compiling():
            return True
        return state.k.nbytes >= LEAST_PRUNED_BYTES

    def _unreachable(self, state: AttentionState) -> Tensor | None:
        behind = super()._unreachable(state)
        if not (self.drop_pruned and all(map(_bounds_its_rows, (self.q_norm, self.k_norm)))):
            return behind
        longest = [self._longest_row(norm) for norm in (self.q_norm, self.k_norm)]
        bound = longest[0] * longest[1] / math.sqrt(self.head_dim)  # of |q.k| / sqrt(D)
        held = torch.arange(state.capacity, device=bound.device) < state.lengths[:, None]
        log_f = state.gates.masked_fill(~held[..., None], 0.0)
        fades = log_f.flip(1).cumsum(1).flip(1) - log_f  # from the token to the last
        limit = math.log(self.prune) - _LOG_MOST_TOKENS
        gone = (((fades + 2 * bound) < limit) & held[..., None]).all(-1).sum(1)
        return gone if behind is None else torch.maximum(gone, behind)

    def _longest_row(self, norm: nn.Module) -> Tensor:
        """At least as long as any row that a norm makes of a head: max|w| sqrt(D) by its weights w,
        of all heads; a hundredth more covers that rows are rounded, to bf16 at worst."""
        weight = norm.weight.detach()
        largest = torch.linalg.vector_norm(weight, math.inf, dtype=wide_dtype(weight.dtype))
        return largest * (1.01 * math.sqrt(self.head_dim))

    def extra_repr(self) -> str:
        return (
            f"{self._switches()}, gate={self.gate!r}, gate_init={self.gate_init!r}, "
            f"lower_bound={self.lower_bound}"
        )
