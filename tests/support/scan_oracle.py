"""Naive references for `linear_scan`, `hgru` and `lru_scan`: loops over time, one sequence after
another.

Nothing here comes from the kernels or the ops; the equations are the only source:

    linear_scan   h_t = a_t h_{t-1} + x_t
    hgru          h_t = lambda_t exp(i theta) h_{t-1} + (1 - lambda_t) act(c_t)
                  lambda_t = gamma + (1 - gamma) sigmoid(f_t)          [HGRN, eq. 2]
    lru_scan      h_t = lambda h_{t-1} + exp(gamma_log) x_t
                  lambda = exp(-exp(nu_log) + i exp(theta_log))        [LRU]

Each op has two references that know nothing of each other's gradients: `*_forward` is a loop that
torch's autograd can differentiate, `*_reference` adds every gradient written out by hand
(test_oracle.py holds one against the other).

`exact=True` computes in float64: the oracle. `exact=False` does the same maths in the tensors' own
precision with torch ops (fp32 state for 16- and 32-bit data; h is rounded to its dtype before the
gradients read it, since training keeps only the inputs and h; gradients are rounded to the dtype
of what they belong to): the yardstick of `error_rule.judge`. There is more than one way to write
the same maths, and how two of them round is chance where few numbers decide: `fused=True` gives a
second way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from support.recurrence import (
    compute_dtype,
    initial_state,
    previous,
    rounded,
    sum_over_time,
    token_order,
)

# What NumPy computes instead of torch where neither autograd nor a fused operation is asked for: it
# does the same operation on a few numbers in a tenth of the time. Real results are the same bits;
# complex products may be rounded otherwise, so that of the complex ones only the oracle's
# complex128 is here, and the yardsticks' complex64 is not (test_oracle.py).
_NUMPY = (torch.float32, torch.float64, torch.complex128)


def _numpy_can(*tensors: Tensor) -> bool:
    return all(
        t.dtype in _NUMPY and t.device.type == "cpu" and not t.requires_grad for t in tensors
    )


def _token_by_token(*tensors: Tensor, steps: range) -> Iterator[tuple[np.ndarray, ...]]:
    """[B, D] of each tensor [B, T, D], in the order of the steps."""
    arrays = [t.transpose(0, 1).resolve_conj().numpy() for t in tensors]
    if steps.step < 0:
        arrays = [array[steps.stop + 1 : steps.start + 1][::-1] for array in arrays]
    else:
        arrays = [array[steps.start : steps.stop] for array in arrays]
    return zip(*arrays, strict=True)


def _recurrence_in_numpy(x, a, h0, cu_seqlens, reverse: bool):
    states, finals = torch.empty_like(x), []
    for order in token_order(x.shape[1], cu_seqlens, reverse):
        h = h0[order.rows].resolve_conj().numpy().copy()
        product = np.empty_like(h)
        for a_t, x_t, h_t in _token_by_token(a, x, states, steps=order.steps):
            np.multiply(a_t, h, product)
            np.add(product, x_t, h_t)
            h = h_t
        finals.append(torch.from_numpy(h.copy()))
    return states, torch.cat([h0[:0], *finals])


def _adjoint_in_numpy(a, h0, dh, dh_final, cu_seqlens, reverse: bool):
    grads, dh0 = torch.empty_like(dh), []
    for order in token_order(dh.shape[1], cu_seqlens, reverse):
        p = dh_final[order.rows].resolve_conj().numpy().copy()
        for a_t, dh_t, g_t in _token_by_token(a, dh, grads, steps=order.steps[::-1]):
            np.add(dh_t, p, g_t)
            np.multiply(a_t, g_t, p)
        dh0.append(torch.from_numpy(p))
    return grads, torch.cat([h0[:0], *dh0])


def _recurrence(x, a, h0, cu_seqlens, reverse: bool, turn: Tensor | None = None, fused=False):
    """All states [B, T, D] and the final ones [N, D] of h_t = a_t turn h_{t-1} + x_t.

    x, a [B, T, D] and h0 of one dtype; `fused` rounds once where `*` and `+` round twice.
    """
    time = x.shape[1]
    a = a if turn is None or fused else a * turn
    if not fused and _numpy_can(x, a, h0) and x.dtype == a.dtype == h0.dtype:
        return _recurrence_in_numpy(x, a.expand_as(x), h0, cu_seqlens, reverse)
    xs, decays, states = x.unbind(1), a.unbind(1), [None] * time
    finals = []
    for order in token_order(time, cu_seqlens, reverse):
        h = h0[order.rows]
        for t in order.steps:
            if fused:
                h = torch.addcmul(xs[t], decays[t], h if turn is None else turn * h)
            else:
                h = decays[t] * h + xs[t]
            states[t] = h
        finals.append(h)
    return torch.stack(states, 1) if time else x.clone(), torch.cat([h0[:0], *finals])


def _adjoint(
    a, h0, dh, dh_final, cu_seqlens, reverse: bool, turn: Tensor | None = None, fused=False
):
    """g_t = dL/dh_t [B, T, D], and dL/dh0 [N, D], in torch's convention:

    g_t = dh_t + p_{t+1},   p_t = conj(a_t turn) g_t = dL/dh_{t-1} along the recurrence
    """
    time = dh.shape[1]
    a, turn = a.conj(), None if turn is None else turn.conj()
    a = a if turn is None or fused else a * turn
    if not fused and _numpy_can(a, dh, dh_final) and a.dtype == dh.dtype == dh_final.dtype:
        return _adjoint_in_numpy(a.expand_as(dh), h0, dh, dh_final, cu_seqlens, reverse)
    decays, grads, g = a.expand_as(dh).unbind(1), dh.unbind(1), [None] * time
    dh0 = []
    for order in token_order(time, cu_seqlens, reverse):
        p = dh_final[order.rows]
        for t in reversed(order.steps):
            g[t] = grads[t] + p
            p = decays[t] * g[t]
            if fused and turn is not None:
                p = turn * p
        dh0.append(p)
    return torch.stack(g, 1) if time else dh.clone(), torch.cat([h0[:0], *dh0])


# linear_scan ------------------------------------------------------------------------------------


def linear_scan_forward(
    x: Tensor,
    a: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    exact: bool = True,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """(h, final state) of h_t = a_t h_{t-1} + x_t."""
    dtype = compute_dtype(x.dtype, exact)
    wide = x.to(dtype)
    initial = initial_state(wide, h0, cu_seqlens)
    decay = a.to(dtype).expand_as(wide)
    h, final = _recurrence(wide, decay, initial, cu_seqlens, reverse, fused=fused)
    return rounded(h, x, exact), final


def linear_scan_reference(
    x: Tensor,
    a: Tensor,
    h0: Tensor | None = None,
    *,
    dh: Tensor | None = None,
    dh_final: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    exact: bool = True,
    fused: bool = False,
) -> dict[str, Tensor]:
    """h, final and, when dh or dh_final is given, dx, da and dh0 (and |da| of a constant a)."""
    options = {"reverse": reverse, "cu_seqlens": cu_seqlens}
    h, final = linear_scan_forward(x, a, h0, exact=exact, fused=fused, **options)
    out = {"h": h, "final": final}
    if dh is None and dh_final is None:
        return out
    dtype = final.dtype
    initial = initial_state(x.to(dtype), h0, cu_seqlens)
    decay = a.to(dtype).expand_as(h)
    dh = torch.zeros_like(h) if dh is None else dh
    dh_final = torch.zeros_like(final) if dh_final is None else dh_final
    g, dh0 = _adjoint(decay, initial, dh.to(dtype), dh_final.to(dtype), **options, fused=fused)
    da = g * previous(h.to(dtype), initial, **options).conj()
    if a.dim() == 1:
        da, out["|da|"] = sum_over_time(da, fused)
    out["dx"], out["da"] = (
        rounded(g, x, exact),
        rounded(da if a.is_complex() else da.real, a, exact),
    )
    out["dh0"] = rounded(dh0, h0, exact)
    return out


# hgru -------------------------------------------------------------------------------------------


def _silu_gradient(c: Tensor) -> Tensor:
    s, other = torch.sigmoid(c), torch.sigmoid(-c)
    return s + c * s * other


def _as_complex(c: Tensor) -> Tensor:
    return torch.complex(*c.chunk(2, -1))


def _as_halves(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], -1)


def hgru_forward(
    c: Tensor,
    f: Tensor,
    gamma: Tensor | None = None,
    theta: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    activation: str = "silu",
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    exact: bool = True,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """(h, final state) of HGRN's recurrence."""
    dtype = compute_dtype(c.dtype, exact)
    floor = torch.zeros((), dtype=dtype) if gamma is None else gamma.to(dtype)
    input_gate = (1 - floor) * torch.sigmoid(-f.to(dtype))  # 1 - lambda, without the cancellation
    lam = 1 - input_gate if fused else floor + (1 - floor) * torch.sigmoid(f.to(dtype))
    u = c.to(dtype)
    u = torch.nn.functional.silu(u) if activation == "silu" else u
    initial = initial_state(u, h0, cu_seqlens)
    if theta is None:
        h, final = _recurrence(input_gate * u, lam, initial, cu_seqlens, reverse, fused=fused)
        return rounded(h, c, exact), final
    turn = torch.polar(torch.ones_like(theta, dtype=dtype), theta.to(dtype))
    args = (
        input_gate * _as_complex(u),
        lam.to(turn.dtype),
        _as_complex(initial),
        cu_seqlens,
        reverse,
    )
    h, final = (_as_halves(z) for z in _recurrence(*args, turn=turn, fused=fused))
    return rounded(h, c, exact), final


def hgru_reference(
    c: Tensor,
    f: Tensor,
    gamma: Tensor | None = None,
    theta: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    dh: Tensor | None = None,
    dh_final: Tensor | None = None,
    activation: str = "silu",
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    exact: bool = True,
    fused: bool = False,
) -> dict[str, Tensor]:
    """h, final and, when dh or dh_final is given, dc, df, dgamma, dtheta, dh0 (|dgamma|, |dtheta|).

    With g_t the adjoint of h_t (dL/dh_t), <u, v> the real inner product of complex numbers and
    turned_t = exp(i theta) h_{t-1}:

        dc = g (1 - lambda) act'(c)              dlambda = <g, turned - act(c)>
        df = dlambda (1 - gamma) s (1 - s)       dgamma = sum dlambda (1 - s),   s = sigmoid(f)
        dtheta = sum lambda <g, i turned>
    """
    options = {"reverse": reverse, "cu_seqlens": cu_seqlens}
    ways = {"exact": exact, "fused": fused}
    h, final = hgru_forward(c, f, gamma, theta, h0, activation=activation, **ways, **options)
    out = {"h": h, "final": final}
    if dh is None and dh_final is None:
        return out
    dtype = final.dtype
    dh = (torch.zeros_like(h) if dh is None else dh).to(dtype)
    dh_final = (torch.zeros_like(final) if dh_final is None else dh_final).to(dtype)
    wide, stored = c.to(dtype), h.to(dtype)
    slope = _silu_gradient(wide) if activation == "silu" else torch.ones_like(wide)
    u = wide * torch.sigmoid(wide) if activation == "silu" else wide
    initial = initial_state(wide, h0, cu_seqlens)

    floor = torch.zeros((), dtype=dtype) if gamma is None else gamma.to(dtype)
    s, other = torch.sigmoid(f.to(dtype)), torch.sigmoid(-f.to(dtype))
    input_gate = (1 - floor) * other
    lam = 1 - input_gate if fused else floor + (1 - floor) * s
    turn = None
    if theta is not None:
        turn = torch.polar(torch.ones_like(theta, dtype=dtype), theta.to(dtype))
        dh, dh_final, u, initial, stored = map(_as_complex, (dh, dh_final, u, initial, stored))
    g, dh0 = _adjoint(lam, initial, dh, dh_final, **options, turn=turn, fused=fused)
    turned = previous(stored, initial, **options)
    turned = turned if turn is None else turn * turned
    du = g * input_gate
    dlambda = (g.conj() * (turned - u)).real if theta is not None else g * (turned - u)
    out["df"] = rounded(dlambda * (1 - floor) * s * other, f, exact)
    if gamma is not None:
        dgamma, out["|dgamma|"] = sum_over_time(dlambda * other, fused)
        out["dgamma"] = rounded(dgamma, gamma, exact)
    if theta is not None:
        dtheta, out["|dtheta|"] = sum_over_time(lam * (g.conj() * (1j * turned)).real, fused)
        out["dtheta"] = rounded(dtheta, theta, exact)
        du, dh0 = _as_halves(du), _as_halves(dh0)
    out["dc"], out["dh0"] = rounded(du * slope, c, exact), rounded(dh0, h0, exact)
    return out


# lru_scan ---------------------------------------------------------------------------------------


def _lru_decay(nu_log: Tensor, theta_log: Tensor | None, dtype: torch.dtype) -> Tensor:
    modulus = torch.exp(-torch.exp(nu_log.to(dtype)))
    return modulus if theta_log is None else torch.polar(modulus, theta_log.to(dtype).exp())


def lru_scan_forward(
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor | None,
    gamma_log: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    exact: bool = True,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """(h, final state) of the linear recurrent unit."""
    dtype = compute_dtype(x.dtype, exact)
    decay = _lru_decay(nu_log, theta_log, dtype)
    wide = x.to(dtype)
    initial = initial_state(wide, h0, cu_seqlens)
    if theta_log is not None:
        wide, initial = _as_complex(wide), _as_complex(initial)
    entering = gamma_log.to(dtype).exp() * wide
    steps = (decay.expand_as(wide), initial, cu_seqlens, reverse)
    h, final = _recurrence(entering, *steps, fused=fused)
    if theta_log is not None:
        h, final = _as_halves(h), _as_halves(final)
    return rounded(h, x, exact), final


def lru_scan_reference(
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor | None,
    gamma_log: Tensor,
    h0: Tensor | None = None,
    *,
    dh: Tensor | None = None,
    dh_final: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    exact: bool = True,
    fused: bool = False,
) -> dict[str, Tensor]:
    """h, final and, when dh or dh_final is given, dx, dh0 and dnu_log, dtheta_log, dgamma_log with
    the sizes of their terms.

    With g_t the adjoint of h_t (dL/dh_t) and <u, v> the real inner product of complex numbers:

        dx = gamma g                             dgamma_log = sum <g, gamma x>
        dnu_log = sum <g, -nu lambda h_{t-1}>    dtheta_log = sum <g, i theta lambda h_{t-1}>
    """
    options = {"reverse": reverse, "cu_seqlens": cu_seqlens}
    ways = {"exact": exact, "fused": fused}
    h, final = lru_scan_forward(x, nu_log, theta_log, gamma_log, h0, **ways, **options)
    out = {"h": h, "final": final}
    if dh is None and dh_final is None:
        return out
    dtype = final.dtype
    dh = (torch.zeros_like(h) if dh is None else dh).to(dtype)
    dh_final = (torch.zeros_like(final) if dh_final is None else dh_final).to(dtype)
    wide, stored = x.to(dtype), h.to(dtype)
    initial = initial_state(wide, h0, cu_seqlens)
    decay = _lru_decay(nu_log, theta_log, dtype)
    gamma = gamma_log.to(dtype).exp()
    # nu lambda, also where nu is infinite and lambda zero
    log_rate = nu_log.to(dtype)
    rate = torch.exp(log_rate - torch.exp(log_rate))
    if theta_log is not None:
        theta = theta_log.to(dtype).exp()
        rate = torch.polar(rate, theta)
        values = (dh, dh_final, wide, initial, stored)
        dh, dh_final, wide, initial, stored = map(_as_complex, values)
    steps = decay.expand_as(wide)
    g, dh0 = _adjoint(steps, initial, dh, dh_final, **options, fused=fused)
    before = previous(stored, initial, **options)
    sums = {
        "dnu_log": (g.conj() * (-rate * before)).real,
        "dgamma_log": (g.conj() * (gamma * wide)).real,
    }
    if theta_log is not None:
        sums["dtheta_log"] = (g.conj() * (1j * theta * decay * before)).real
    arguments = {"dnu_log": nu_log, "dtheta_log": theta_log, "dgamma_log": gamma_log}
    for name, terms in sums.items():
        total, out[f"|{name}|"] = sum_over_time(terms, fused)
        out[name] = rounded(total, arguments[name], exact)
    dx = gamma * g
    if theta_log is not None:
        dx, dh0 = _as_halves(dx), _as_halves(dh0)
    out["dx"], out["dh0"] = rounded(dx, x, exact), rounded(dh0, h0, exact)
    return out
