"""Naive references for `gated_linear_attention` and `hgrn2`: a loop over time, token by token.

Nothing here comes from the kernels or the ops; the equations are the only source:

    S_t = diag(f_t) S_{t-1} + k_t v_t^T,   o_t = scale * q_t^T S_t
    gated_linear_attention   f_t = exp(log_f_t)
    hgrn2                    f_t = gamma + (1 - gamma) sigmoid(x_t),  k_t = 1 - f_t,
                             q and v through their activations       [HGRN2, eq. 3]

and their adjoint, written out by hand (test_oracle.py holds it against autograd):

    dS_t = scale * q_t do_t^T + diag(f_{t+1}) dS_{t+1}
    dq_t = scale * S_t do_t,  dk_t = dS_t v_t,  dv_t = dS_t^T k_t,  df_t = rowsum(S_{t-1} o dS_t)

`exact` and `fused` as in `oracle`: float64, or the same maths in the tensors' own precision by
torch ops in one of two ways. The second rounds once where `*` and `+` round twice. `chunks`: not
token by token but as `gla_chunks` does, in products of bf16 operands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from support import gla_chunks
from support.recurrence import compute_dtype, rounded, sum_over_time, token_order


def _activate(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """act(x) and its derivative."""
    s, other = torch.sigmoid(x), torch.sigmoid(-x)
    if name == "silu":
        return x * s, s + x * s * other
    if name == "sigmoid":
        return s, s * other
    return x, torch.ones_like(x)


def _initial(q: Tensor, v: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    n = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (n, *q.shape[2:], v.shape[-1])
    return q.new_zeros(shape) if h0 is None else h0.to(q.dtype)


def _outer(k: Tensor, v: Tensor) -> Tensor:
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def _step(decay: Tensor, state: Tensor, k: Tensor, v: Tensor, fused: bool) -> Tensor:
    decay = decay.unsqueeze(-1)
    return torch.addcmul(_outer(k, v), decay, state) if fused else decay * state + _outer(k, v)


def _recurrence(q, k, v, f, h0, cu_seqlens, reverse: bool, fused: bool):
    """o [B, T, H, V] of unit scale, the final states, and the state before every token."""
    time = q.shape[1]
    outputs, before, finals = [None] * time, [None] * time, []
    for order in token_order(time, cu_seqlens, reverse):
        state = h0[order.rows]
        for t in order.steps:
            before[t] = state
            state = _step(f[:, t], state, k[:, t], v[:, t], fused)
            outputs[t] = (q[:, t].unsqueeze(-1) * state).sum(-2)
        finals.append(state)
    out = torch.stack(outputs, 1) if time else v.clone()
    return out, torch.cat([h0[:0], *finals]), before


def _adjoint(q, k, v, f, h0, before, d_o, dh_final, cu_seqlens, reverse: bool, fused: bool):
    """dq, dk, dv, df [B, T, H, ..] and dh0, for unit scale."""
    time = q.shape[1]
    grads: list[list] = [[None] * time for _ in range(4)]
    dh0 = []
    for order in token_order(time, cu_seqlens, reverse):
        carry = dh_final[order.rows]
        for t in reversed(order.steps):
            ds = carry + _outer(q[:, t], d_o[:, t])
            state = _step(f[:, t], before[t], k[:, t], v[:, t], fused)
            found = (
                (state * d_o[:, t].unsqueeze(-2)).sum(-1),
                (ds * v[:, t].unsqueeze(-2)).sum(-1),
                (ds * k[:, t].unsqueeze(-1)).sum(-2),
                (ds * before[t]).sum(-1),
            )
            for rows, value in zip(grads, found, strict=True):
                rows[t] = value
            carry = f[:, t].unsqueeze(-1) * ds
        dh0.append(carry)
    stacked = [
        torch.stack(rows, 1) if time else like.clone()
        for rows, like in zip(grads, (q, k, v, q), strict=True)
    ]
    return (*stacked, torch.cat([h0[:0], *dh0]))


def _attention(
    q, k, v, f, h0, d_o, dh_final, cu_seqlens, scale: float, *, reverse: bool, fused: bool,
    chunks: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Results and, where there is a loss, gradients of q, k, v, f and h0; all in one dtype."""
    initial = _initial(q, v, h0, cu_seqlens)
    if chunks:
        loss = None if d_o is None else d_o.to(q.dtype) * scale
        if dh_final is None and d_o is not None:
            dh_final = torch.zeros_like(initial)
        last = None if dh_final is None else dh_final.to(q.dtype)
        found = gla_chunks.attention(q, k, v, f, initial, loss, last, cu_seqlens, reverse)
        return found | {"h": scale * found["h"]}
    options = {"cu_seqlens": cu_seqlens, "reverse": reverse, "fused": fused}
    out, final, before = _recurrence(q, k, v, f, initial, **options)
    found = {"h": scale * out, "final": final}
    if d_o is None and dh_final is None:
        return found
    d_o = torch.zeros_like(out) if d_o is None else d_o.to(q.dtype) * scale
    dh_final = torch.zeros_like(final) if dh_final is None else dh_final.to(q.dtype)
    names = ("dq", "dk", "dv", "df", "dh0")
    grads = _adjoint(q, k, v, f, initial, before, d_o, dh_final, **options)
    return found | dict(zip(names, grads, strict=True))


def gated_linear_attention_forward(q, k, v, log_f, h0=None, **ways) -> tuple[Tensor, Tensor]:
    """(o, final state)."""
    found = gated_linear_attention_reference(q, k, v, log_f, h0, **ways)
    return found["h"], found["final"]


def gated_linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    h0: Tensor | None = None,
    *,
    dh: Tensor | None = None,
    dh_final: Tensor | None = None,
    scale: float = 1.0,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    exact: bool = True,
    fused: bool = False,
    chunks: bool = False,
) -> dict[str, Tensor]:
    """h (= o), final and, when dh or dh_final is given, dq, dk, dv, dlog_f, dh0."""
    dtype = compute_dtype(q.dtype, exact)
    wide = [x.to(dtype) for x in (q, k, v)]
    exp = gla_chunks.exp if chunks else torch.exp
    f = exp(log_f.to(dtype)).expand_as(wide[0])
    ways = {"reverse": reverse, "fused": fused, "chunks": chunks}
    out = _attention(*wide, f, h0, dh, dh_final, cu_seqlens, scale, **ways)
    out["h"] = rounded(out["h"], q, exact)
    if "dq" not in out:
        return out
    dlog_f = f * out.pop("df")
    if log_f.shape[-1] != q.shape[-1]:
        out["|dlog_f|"] = torch.linalg.vector_norm(dlog_f, dim=-1, keepdim=True)
        dlog_f = dlog_f.sum(-1, keepdim=True)
    out["dlog_f"] = rounded(dlog_f, log_f, exact)
    for name, like in (("dq", q), ("dk", k), ("dv", v), ("dh0", h0)):
        out[name] = rounded(out[name], like, exact)
    return out


def hgrn2_forward(q, f, v, gamma=None, h0=None, **ways) -> tuple[Tensor, Tensor]:
    """(o, final state)."""
    found = hgrn2_reference(q, f, v, gamma, h0, **ways)
    return found["h"], found["final"]


def hgrn2_reference(
    q: Tensor,
    f: Tensor,
    v: Tensor,
    gamma: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    dh: Tensor | None = None,
    dh_final: Tensor | None = None,
    scale: float = 1.0,
    q_activation: str = "none",
    v_activation: str = "none",
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    exact: bool = True,
    fused: bool = False,
    chunks: bool = False,
) -> dict[str, Tensor]:
    """h (= o), final and, when dh or dh_final is given, dq, df, dv, dgamma, dh0 (|dgamma|)."""
    dtype = compute_dtype(q.dtype, exact)
    x = f.to(dtype)
    s, other = torch.sigmoid(x), torch.sigmoid(-x)
    floor = torch.zeros((), dtype=dtype) if gamma is None else gamma.to(dtype)
    keys = (1 - floor) * other  # 1 - f, without the cancellation
    decay = 1 - keys if fused else floor + (1 - floor) * s
    queries, q_slope = _activate(q.to(dtype), q_activation)
    values, v_slope = _activate(v.to(dtype), v_activation)
    ways = {"reverse": reverse, "fused": fused, "chunks": chunks}
    out = _attention(queries, keys, values, decay, h0, dh, dh_final, cu_seqlens, scale, **ways)
    out["h"] = rounded(out["h"], q, exact)
    if "dq" not in out:
        return out
    from_both = out.pop("df") - out.pop("dk")
    if gamma is not None:
        terms = (from_both * other).flatten(2)
        dgamma, _ = sum_over_time(terms, fused)
        # Where a gate hardly changes, its products over a block are rounded alike in every block:
        # the errors of the terms add up as their sizes do.
        out["|dgamma|"] = terms.abs().sum((0, 1)).view(gamma.shape)
        out["dgamma"] = rounded(dgamma.view(gamma.shape), gamma, exact)
    out["df"] = rounded(from_both * keys * s, f, exact)
    out["dq"] = rounded(out["dq"] * q_slope, q, exact)
    out["dv"] = rounded(out["dv"] * v_slope, v, exact)
    out["dh0"] = rounded(out["dh0"], h0, exact)
    return out
