"""flash-linear-attention's ops, by the signatures of fla-core 0.6.0.

Shapes: B batch, T time, D channels, H heads, HQ query heads, K key and V value dimension, N
sequences (B, or the number that ``cu_seqlens`` packs into a batch of one). Gates ``g``, ``gk`` are
natural logarithms. Gradients flow to every tensor, also to ``initial_state`` of `chunk_hgrn`, which
fla leaves without one. Float64 data is computed in float64, and tensors on the CPU are fine.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from .._common import common_dtype, gate_for, no_counterpart, state_for

__all__ = [
    "chunk_gla",
    "chunk_hgrn",
    "fused_chunk_gla",
    "fused_recurrent_gla",
    "fused_recurrent_hgrn",
    "fused_recurrent_rwkv4",
    "parallel_forgetting_attn",
]


def _check_packed(x: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None) -> None:
    """fla's ValueErrors for a packed batch."""
    if cu_seqlens is None:
        return
    if x.shape[0] != 1:
        raise ValueError(
            f"The batch size is expected to be 1 rather than {x.shape[0]} when using `cu_seqlens`. "
            "Please flatten variable-length inputs before processing."
        )
    count = len(cu_seqlens) - 1
    if initial_state is not None and initial_state.shape[0] != count:
        raise ValueError(
            "The number of initial states is expected to be equal to the number of input "
            f"sequences, i.e., {count} rather than {initial_state.shape[0]}."
        )


def _hgrn(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    # The gate is a logarithm: exp() of it is taken in float32 or float64, whatever its dtype, so
    # that gates next to one keep what they lose a step.
    decay = gate_for(g, torch.float64 if x.dtype == torch.float64 else torch.float32).exp()
    return ops.linear_scan(x, decay, state_for(initial_state, x.dtype), cu_seqlens=cu_seqlens)


def chunk_hgrn(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """HGRN's recurrence ``h_t = exp(g_t) h_{t-1} + x_t``: x, g ``[B, T, D]``, initial_state
    ``[B, D]`` -> (o ``[B, T, D]`` in x's dtype, final state ``[B, D]`` in float32, or None)."""
    o, state = _hgrn(x, g, initial_state, None)
    return o, state if output_final_state else None


def fused_recurrent_hgrn(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor = None,
    output_final_state: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`chunk_hgrn`, also of packed sequences; its final state ``[N, D]`` is in x's dtype, as fla's
    is."""
    _check_packed(x, cu_seqlens, initial_state)
    o, state = _hgrn(x, g, initial_state, cu_seqlens)
    return o, state.to(x.dtype) if output_final_state else None


def _gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    dtype = common_dtype(q, k, v)
    h0 = state_for(initial_state, dtype)
    if h0 is not None and h0.dim() == 3:  # of one sequence, which fla's kernels read alike
        h0 = h0[None]
    if h0 is not None and state_v_first:
        h0 = h0.transpose(-1, -2)
    o, state = ops.gated_linear_attention(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        gate_for(log_f, dtype),
        h0,
        scale=k.shape[-1] ** -0.5 if scale is None else float(scale),
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )
    if not output_final_state:
        return o, None
    return o, state.transpose(-1, -2).contiguous() if state_v_first else state


def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: int | None = None,
    initial_state: torch.Tensor = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated linear attention ``S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t``.

    q, k, g ``[B, T, H, K]``, v ``[B, T, H, V]``; scale ``K^-0.5`` when None. initial_state
    ``[N, H, K, V]``, ``[N, H, V, K]`` with state_v_first, in float32 or the data's dtype. Returns
    (o ``[B, T, H, V]`` in v's dtype, the final state in float32 and initial_state's layout, or
    None). cu_seqlens_cpu is taken and not needed.
    """
    _check_packed(q, cu_seqlens, initial_state)
    assert q.shape == k.shape == g.shape, "q, k, g must have the same shape."
    o, state = _gla(q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    return o.to(v.dtype), state


def fused_chunk_gla(
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`chunk_gla`: what fla 0.6.0 says to use instead, and raises where this is called."""
    return chunk_gla(**kwargs)


def fused_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    scale: int | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`chunk_gla`, also without a gate and in reverse; o is in q's dtype.

    gk ``[B, T, H, K]``; None: linear attention without decay. gv, a gate of the values, raises
    NotImplementedError. transpose_state_layout is state_v_first's old name.
    """
    state_v_first = _renamed_layout(kwargs, state_v_first)
    if gv is not None:
        raise no_counterpart("fused_recurrent_gla", "gv", "a gate of the value channels")
    _check_packed(q, cu_seqlens, initial_state)
    if gk is None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        gk = torch.zeros(*q.shape[:-1], 1, dtype=wide, device=q.device)
    o, state = _gla(
        q, k, v, gk, scale, initial_state, output_final_state, state_v_first, cu_seqlens, reverse
    )
    return o.to(q.dtype), state


def _renamed_layout(kwargs: dict[str, object], state_v_first: bool) -> bool:
    """state_v_first, by whichever of its names; other names raise, where fla drops them unread."""
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError(
                "Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`."
            )
        warnings.warn(
            "`transpose_state_layout` is deprecated and renamed to `state_v_first`.",
            DeprecationWarning,
            stacklevel=3,
        )
        state_v_first = bool(kwargs.pop("transpose_state_layout"))
    if kwargs.pop("head_first", False):
        raise no_counterpart("fused_recurrent_gla", "head_first=True", "fla took it out, too")
    for name in kwargs:
        raise no_counterpart("fused_recurrent_gla", name)
    return state_v_first


def parallel_forgetting_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: torch.LongTensor | None = None,
) -> torch.Tensor:
    """Forgetting attention: q ``[B, T, HQ, K]``, k ``[B, T, H, K]``, v ``[B, T, H, V]``, log gates
    g ``[B, T, HQ]`` -> o ``[B, T, HQ, V]`` in v's dtype. scale ``K^-0.5`` when None; window_size:
    how many keys, its own included, a query sees."""
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    _check_packed(q, cu_seqlens, None)
    dtype, given = common_dtype(q, k, v), v.dtype
    # Keys and values have one width here: zeros beside the narrower ones change nothing.
    width, values = max(k.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (F.pad(t.to(dtype), (0, width - t.shape[-1])) for t in (q, k, v))
    o = ops.forgetting_attention(
        q, k, v, gate_for(g, dtype), scale=scale, window=window_size, cu_seqlens=cu_seqlens
    )
    return o[..., :values].to(given)


def fused_recurrent_rwkv4(
    w: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RWKV-4: w, u ``[D]``, k, v ``[B, T, D]``, state ``[B, 3, 1, D]`` of (alpha, beta, eps), with
    the decay ``exp(-exp(w))`` a step -> (o ``[B, T, D]``, the state after the last token), both in
    k's dtype.

    eps is a scaling exponent: alpha and beta stand for ``alpha exp(eps)`` and ``beta exp(eps)``,
    and which eps is returned with them may differ from fla's.
    """
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    alpha, beta, eps = state.squeeze(2).to(wide).unbind(1)
    # The op treats the exponent as a constant; its gradient is what alpha and beta have to say.
    grow = (eps - eps.detach()).exp()
    start = torch.stack([alpha * grow, beta * grow, eps.detach()], 1)
    dtype = common_dtype(k, v)
    o, end = ops.wkv4(gate_for(w, wide).exp(), gate_for(u, wide), k.to(dtype), v.to(dtype), start)
    return o.to(k.dtype), end.unsqueeze(2).to(k.dtype)
