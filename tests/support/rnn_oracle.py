"""Naive reference for `gated_rnn`: a loop over time, one sequence after another.

Nothing here comes from the kernels or the op; the equations are the only source:

    a_t = z_t + W h_{t-1},   g_t = gamma + (1 - gamma) sigmoid(a_t),
    h_t = g_t h_{t-1} + (1 - g_t) x_t

("Towards Understanding Gated Linear Recurrent Neural Networks", eq. 5 to 7, from the projected
input; gamma as in HGRN, section 3.2) and their adjoint, written out by hand (test_ops_rnn.py holds
it against autograd):

    da_t = dh_t (h_{t-1} - x_t) (1 - gamma) sigmoid(a_t) sigmoid(-a_t),   dz_t = da_t,
    dx_t = (1 - g_t) dh_t,   dW = sum of da_t h_{t-1}^T,
    dgamma = sum of dh_t (h_{t-1} - x_t) sigmoid(-a_t),
    dh_{t-1} gets g_t dh_t + W^T da_t

1 - g_t is (1 - gamma) sigmoid(-a_t), with its own digits; where a_t > 0, g_t is one less that.

`exact` and `fused` as in `oracle`: float64, or the same maths in the tensors' own precision by
torch ops in one of two ways. The second rounds once where `*` and `+` round twice, and adds the
products with the matrix up one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from support.recurrence import compute_dtype, initial_state, previous, rounded, token_order


def _product(w: Tensor, h: Tensor, fused: bool) -> Tensor:
    """W h of each row of h."""
    return (w * h.unsqueeze(-2)).sum(-1) if fused else h @ w.T


def _gates(a: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """g and 1 - g."""
    other = (1 - gamma) * torch.sigmoid(-a)
    return torch.where(a > 0, 1 - other, gamma + (1 - gamma) * torch.sigmoid(a)), other


def _recurrence(z, x, w, gamma, h0, cu_seqlens, fused: bool) -> tuple[Tensor, Tensor, Tensor]:
    """h and a [B, T, D], and the final states."""
    time = x.shape[1]
    states, logits, finals = [None] * time, [None] * time, []
    for order in token_order(time, cu_seqlens, reverse=False):
        h = h0[order.rows]
        for t in order.steps:
            a = z[:, t] + _product(w, h, fused)
            g, other = _gates(a, gamma)
            h = torch.addcmul(other * x[:, t], g, h) if fused else g * h + other * x[:, t]
            states[t], logits[t] = h, a
        finals.append(h)
    if not time:
        return x.clone(), x.clone(), torch.cat([h0[:0], *finals])
    return torch.stack(states, 1), torch.stack(logits, 1), torch.cat([h0[:0], *finals])


def _adjoint(a, x, w, gamma, before, dh, dh_final, cu_seqlens, fused: bool) -> tuple[Tensor, ...]:
    """dz, dx and the terms of dgamma [B, T, D], and dh0."""
    time = x.shape[1]
    dz, dx, bound, dh0 = [None] * time, [None] * time, [None] * time, []
    for order in token_order(time, cu_seqlens, reverse=False):
        carry = dh_final[order.rows]
        for t in reversed(order.steps):
            grad = dh[:, t] + carry
            g, other = _gates(a[:, t], gamma)
            dx[t] = other * grad
            bound[t] = torch.sigmoid(-a[:, t]) * (before[:, t] - x[:, t]) * grad
            dz[t] = (1 - gamma) * torch.sigmoid(a[:, t]) * bound[t]
            back = _product(w.T, dz[t], fused)
            carry = torch.addcmul(back, g, grad) if fused else g * grad + back
        dh0.append(carry)
    whole = [torch.stack(v, 1) if time else x.clone() for v in (dz, dx, bound)]
    return (*whole, torch.cat([dh_final[:0], *dh0]))


def gated_rnn_forward(z, x, w_zh, h0=None, **ways) -> tuple[Tensor, Tensor]:
    """(h, final state)."""
    found = gated_rnn_reference(z, x, w_zh, h0, **ways)
    return found["h"], found["final"]


def gated_rnn_reference(
    z: Tensor,
    x: Tensor,
    w_zh: Tensor,
    h0: Tensor | None = None,
    *,
    gamma: Tensor | None = None,
    dh: Tensor | None = None,
    dh_final: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    exact: bool = True,
    fused: bool = False,
) -> dict[str, Tensor]:
    """h, final and, when dh or dh_final is given, dz, dx, dw_zh, dgamma, dh0 (|dw_zh|, |dgamma|:
    how large their terms are)."""
    dtype = compute_dtype(x.dtype, exact)
    wide, w = x.to(dtype), w_zh.to(dtype)
    initial = initial_state(wide, h0, cu_seqlens)
    bound = w.new_zeros(len(w)) if gamma is None else gamma.to(dtype)
    h, a, final = _recurrence(z.to(dtype), wide, w, bound, initial, cu_seqlens, fused)
    out = {"h": rounded(h, x, exact), "final": final}
    if dh is None and dh_final is None:
        return out
    # Training keeps h as the op returns it.
    before = previous(out["h"].to(dtype), initial, cu_seqlens, reverse=False)
    dh = torch.zeros_like(wide) if dh is None else dh.to(dtype)
    dh_final = torch.zeros_like(initial) if dh_final is None else dh_final.to(dtype)
    dz, dx, terms, dh0 = _adjoint(a, wide, w, bound, before, dh, dh_final, cu_seqlens, fused)
    out["dz"], out["dx"] = rounded(dz, z, exact), rounded(dx, x, exact)
    # One product of what the op returns and keeps, as torch computes it in that dtype.
    da, before = (out["dz"].to(x.dtype), before.to(x.dtype)) if not exact else (dz, before)
    rows, columns = da.flatten(0, 1), before.flatten(0, 1)
    dw = rows.to(dtype).T @ columns.to(dtype)
    sizes = (rows.to(dtype).square().T @ columns.to(dtype).square()).sqrt()
    out["dw_zh"], out["|dw_zh|"] = rounded(dw, w_zh, exact), sizes
    if gamma is not None:
        out["dgamma"] = rounded(terms.sum((0, 1)), gamma, exact)
        out["|dgamma|"] = terms.square().sum((0, 1)).sqrt()
    if h0 is not None:
        out["dh0"] = rounded(dh0, h0, exact)
    return out
