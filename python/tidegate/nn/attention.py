"""Softmax attention: the Transformers that the other mixers are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ._attention_base import Layout, SoftmaxAttention, attend_by_op, attend_state_by_op
from ._attention_state import AttentionState, longest
from ._common import MAX_ATTENTION_HEAD_DIM, wide_dtype


class Attention(SoftmaxAttention):
    """Causal softmax attention over H heads of D = dim / H channels: a token mixer, by PyTorch's
    scaled_dot_product_attention, or with a window by `tidegate.ops.forgetting_attention` with
    nothing forgotten: PyTorch would want a mask of T x T. `ForgettingAttention` is the same with a
    forget gate.

    ``o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(D)) v_j``, q and k rotated.

    The presets are the Forgetting Transformer's baselines (arXiv 2503.02130, section 3): "llama" is
    that alone; "pro" has QK-norm, an output gate, an output norm and KV-shift, each an option::

        k_t = norm(a_t k'_{t-1} + (1 - a_t) k'_t),  k'_t = W_k x_t,  a_t = sigmoid(w_k.x_t)   (14)
        v_t the same without the norm;  q_t = norm(W_q x_t)                                   (16)
        y_t = W_o (norm(o_t) * sigmoid(W_g x_t))                                              (24)

    Args:
        dim: width of x and y.
        num_heads: H, a divisor of dim. None: dim / 64 (1 where dim is smaller).
        preset: "llama" or "pro": what the options that are None are.
        num_kv_heads: heads of keys and values, a divisor of H; None: H.
        qk_norm: RMSNorm of every head's queries and keys.
        qk_norm_shared: whether the heads share those norms' weights.
        output_gate: whether the output is multiplied by a gate.
        output_activation: the gate's: "sigmoid" or "silu".
        output_norm: RMSNorm of every head's output, each head with weights of its own.
        kv_shift: whether keys and values are mixed with the token's before.
        rope: theta of the rotary positions, by default that of the paper's baselines; None: no
            positions.
        window: how many tokens, itself included, a token sees. None: all before it.
        norm_eps: the norms' epsilon.
        qk_norm_eps: that of q_norm and k_norm; None: norm_eps.

    Parameters: ``in_proj.weight``, rows of q (dim), k, v (Hkv * D each) and, gated, g (dim), each
    head after head; with KV-shift ``shift_proj.weight`` ``[2 * Hkv, dim]``, k's before v's;
    ``q_norm.weight``, ``k_norm.weight`` ``[D]``, or ``[H * D]`` and ``[Hkv * D]``;
    ``output_norm.weight`` ``[dim]``; ``out_proj.weight`` ``[dim, dim]``. No biases.

    State: an `AttentionState`. Without one, forward() returns None for it.

    Raises ValueError for options that are unknown or do not fit each other.
    """

    _owner = "Attention"

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        preset: str = "llama",
        num_kv_heads: int | None = None,
        qk_norm: bool | None = None,
        qk_norm_shared: bool = True,
        output_gate: bool | None = None,
        output_activation: str = "sigmoid",
        output_norm: bool | None = None,
        kv_shift: bool | None = None,
        rope: float | None = 500000.0,
        window: int | None = None,
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
        self._make_projections(device=device, dtype=dtype)
        self._make_outputs(device=device, dtype=dtype)
        self.reset_parameters()

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None, layout: Layout
    ) -> Tensor:
        if self._has_window_op:
            log_f = self._nothing_forgotten(v)
            return attend_by_op(q, k, v, log_f, layout, window=self.window)
        if not layout.is_packed:
            return self._scores(q, k, v, None)
        # Packed sequences are laid out as rows of a batch; reads the lengths on the host.
        size, rows, steps = longest(layout.lengths), layout.rows[0], layout.steps[0]
        q, k, v = (_padded(t, rows, steps, layout.count, size) for t in (q, k, v))
        return self._scores(q, k, v, None)[rows, steps][None]

    @property
    def _has_window_op(self) -> bool:
        return self.window is not None and self.head_dim <= MAX_ATTENTION_HEAD_DIM

    def _nothing_forgotten(self, v: Tensor) -> Tensor:
        """Log forget gates ``[B, T, H]`` of zero, which take no memory."""
        return v.new_zeros(()).expand(*v.shape[:2], self.num_heads)

    def _attend_state(self, q: Tensor, state: AttentionState, layout: Layout) -> Tensor:
        if self._has_window_op:
            gates = self._nothing_forgotten(state.v)
            return attend_state_by_op(q, state, gates, layout, window=self.window)
        positions = layout.steps + (state.lengths - layout.lengths)[layout.rows]
        if not layout.is_packed:
            return self._scores(q, state.k, state.v, positions)
        size, rows, steps = longest(layout.lengths), layout.rows[0], layout.steps[0]
        q = _padded(q, rows, steps, layout.count, size)
        places = (state.lengths - layout.lengths)[:, None] + torch.arange(size, device=q.device)
        return self._scores(q, state.k, state.v, places)[rows, steps][None]

    def _attend_step(self, q: Tensor, state: AttentionState) -> Tensor:
        if self.head_dim > MAX_ATTENTION_HEAD_DIM:
            return self._scores(q, state.k, state.v, state.lengths.long()[:, None] - 1)
        # The op reads what a sequence holds; torch's attention would read all that there is room
        # for, and a mask.
        nothing = state.k.new_zeros((), dtype=wide_dtype(state.k.dtype))
        o = ops.forgetting_attention_step(
            q[:, 0].to(state.k.dtype),
            state.k,
            state.v,
            nothing.expand(*state.k.shape[:2], self.num_heads),
            state.lengths,
            window=self.window,
        )
        return o[:, None]

    def _scores(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        """Attention of q ``[N, P, H, D]`` over k, v ``[N, S, Hkv, D]``. positions ``[N, P]``: of
        the queries, where the keys are a state's; None: queries and keys are the same tokens."""
        mask = None
        if positions is not None or self.window is not None:
            here = (
                torch.arange(q.size(1), device=q.device)[None] if positions is None else positions
            )
            back = here[:, :, None] - torch.arange(k.size(1), device=q.device)
            mask = (back >= 0)[:, None]
            if self.window is not None:
                mask = mask & (back < self.window)[:, None]
        q, k, v = (t.transpose(1, 2) for t in (q.to(v.dtype), k.to(v.dtype), v))
        o = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        return o.transpose(1, 2)

    def extra_repr(self) -> str:
        return self._switches()


def _padded(x: Tensor, rows: Tensor, steps: Tensor, count: int, size: int) -> Tensor:
    """Packed tokens ``[1, total, H, D]`` as ``[count, size, H, D]``, zeros after each end, which
    causal queries before them do not see."""
    out = x.new_zeros(count, size, *x.shape[2:])
    return out.index_put((rows, steps), x[0])
