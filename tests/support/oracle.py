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
of what they belong to): the yardstick of `assert_within_rule`. There is more than one way to write
the same maths, and how two of them round is chance where few numbers decide: `fused=True` gives a
second way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_STATE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_WIDE = {torch.complex64: torch.complex128, torch.complex128: torch.complex128}


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a recurrence over `dtype` keeps its state."""
    return _STATE.get(dtype, dtype)


def single_dtype(dtype: torch.dtype) -> torch.dtype:
    """Single precision of the same kind: gates, bounds and states may come in it, too."""
    return torch.complex64 if dtype.is_complex else torch.float32


def _compute_dtype(dtype: torch.dtype, exact: bool) -> torch.dtype:
    return _WIDE.get(dtype, torch.float64) if exact else state_dtype(dtype)


@dataclass(frozen=True)
class Walk:
    """Sequences that are walked together: time steps in order, and their rows of the state."""

    steps: range
    rows: slice


def walks(time: int, cu_seqlens: Tensor | None, reverse: bool) -> Iterator[Walk]:
    """The sequences of a [B, time] layout (B = 1 when packed)."""
    if cu_seqlens is None:
        bounds = [(slice(None), 0, time)]
    else:
        offsets = [int(v) for v in cu_seqlens]
        pairs = zip(offsets, offsets[1:], strict=False)
        bounds = [(slice(n, n + 1), start, end) for n, (start, end) in enumerate(pairs)]
    for rows, start, end in bounds:
        steps = range(end - 1, start - 1, -1) if reverse else range(start, end)
        yield Walk(steps, rows)


def _initial(x: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    n = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return x.new_zeros(n, x.shape[2]) if h0 is None else h0.to(x.dtype)


def _recurrence(x, a, h0, cu_seqlens, reverse: bool, turn: Tensor | None = None, fused=False):
    """All states [B, T, D] and the final ones [N, D] of h_t = a_t turn h_{t-1} + x_t.

    x, a [B, T, D] and h0 of one dtype; `fused` rounds once where `*` and `+` round twice.
    """
    time = x.shape[1]
    a = a if turn is None or fused else a * turn
    xs, decays, states = x.unbind(1), a.unbind(1), [None] * time
    finals = []
    for walk in walks(time, cu_seqlens, reverse):
        h = h0[walk.rows]
        for t in walk.steps:
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
    decays, grads, g = a.expand_as(dh).unbind(1), dh.unbind(1), [None] * time
    dh0 = []
    for walk in walks(time, cu_seqlens, reverse):
        p = dh_final[walk.rows]
        for t in reversed(walk.steps):
            g[t] = grads[t] + p
            p = decays[t] * g[t]
            if fused and turn is not None:
                p = turn * p
        dh0.append(p)
    return torch.stack(g, 1) if time else dh.clone(), torch.cat([h0[:0], *dh0])


def _previous(h: Tensor, h0: Tensor, cu_seqlens: Tensor | None, reverse: bool) -> Tensor:
    """h_{t-1} for every t, each sequence's own h0 before its first token."""
    previous = torch.empty_like(h)
    for walk in walks(h.shape[1], cu_seqlens, reverse):
        if len(walk.steps):
            order = torch.tensor(walk.steps)
            previous[:, order[0]] = h0[walk.rows]
            previous[:, order[1:]] = h[:, order[:-1]]
    return previous


def _sum_over_time(terms: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
    """[B, T, D] -> the sum [D], and the size of its terms: what its roundings are relative to.

    Added one step after another as a loop over time would, or as torch.sum does.
    """
    sizes = torch.linalg.vector_norm(terms, dim=(0, 1))
    if fused or not terms.shape[1]:
        return terms.sum((0, 1)), sizes
    return terms.cumsum(1)[:, -1].sum(0), sizes


def _round(value: Tensor | None, like: Tensor | None, exact: bool) -> Tensor | None:
    return value if exact or value is None or like is None else value.to(like.dtype)


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
    dtype = _compute_dtype(x.dtype, exact)
    wide = x.to(dtype)
    initial = _initial(wide, h0, cu_seqlens)
    decay = a.to(dtype).expand_as(wide)
    h, final = _recurrence(wide, decay, initial, cu_seqlens, reverse, fused=fused)
    return _round(h, x, exact), final


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
    initial = _initial(x.to(dtype), h0, cu_seqlens)
    decay = a.to(dtype).expand_as(h)
    dh = torch.zeros_like(h) if dh is None else dh
    dh_final = torch.zeros_like(final) if dh_final is None else dh_final
    g, dh0 = _adjoint(decay, initial, dh.to(dtype), dh_final.to(dtype), **options, fused=fused)
    da = g * _previous(h.to(dtype), initial, **options).conj()
    if a.dim() == 1:
        da, out["|da|"] = _sum_over_time(da, fused)
    out["dx"], out["da"] = _round(g, x, exact), _round(da if a.is_complex() else da.real, a, exact)
    out["dh0"] = _round(dh0, h0, exact)
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
    dtype = _compute_dtype(c.dtype, exact)
    floor = torch.zeros((), dtype=dtype) if gamma is None else gamma.to(dtype)
    input_gate = (1 - floor) * torch.sigmoid(-f.to(dtype))  # 1 - lambda, without the cancellation
    lam = 1 - input_gate if fused else floor + (1 - floor) * torch.sigmoid(f.to(dtype))
    u = c.to(dtype)
    u = torch.nn.functional.silu(u) if activation == "silu" else u
    initial = _initial(u, h0, cu_seqlens)
    if theta is None:
        h, final = _recurrence(input_gate * u, lam, initial, cu_seqlens, reverse, fused=fused)
        return _round(h, c, exact), final
    turn = torch.polar(torch.ones_like(theta, dtype=dtype), theta.to(dtype))
    args = (
        input_gate * _as_complex(u),
        lam.to(turn.dtype),
        _as_complex(initial),
        cu_seqlens,
        reverse,
    )
    h, final = (_as_halves(z) for z in _recurrence(*args, turn=turn, fused=fused))
    return _round(h, c, exact), final


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
    initial = _initial(wide, h0, cu_seqlens)

    floor = torch.zeros((), dtype=dtype) if gamma is None else gamma.to(dtype)
    s, other = torch.sigmoid(f.to(dtype)), torch.sigmoid(-f.to(dtype))
    input_gate = (1 - floor) * other
    lam = 1 - input_gate if fused else floor + (1 - floor) * s
    turn = None
    if theta is not None:
        turn = torch.polar(torch.ones_like(theta, dtype=dtype), theta.to(dtype))
        dh, dh_final, u, initial, stored = map(_as_complex, (dh, dh_final, u, initial, stored))
    g, dh0 = _adjoint(lam, initial, dh, dh_final, **options, turn=turn, fused=fused)
    turned = _previous(stored, initial, **options)
    turned = turned if turn is None else turn * turned
    du = g * input_gate
    dlambda = (g.conj() * (turned - u)).real if theta is not None else g * (turned - u)
    out["df"] = _round(dlambda * (1 - floor) * s * other, f, exact)
    if gamma is not None:
        dgamma, out["|dgamma|"] = _sum_over_time(dlambda * other, fused)
        out["dgamma"] = _round(dgamma, gamma, exact)
    if theta is not None:
        dtheta, out["|dtheta|"] = _sum_over_time(lam * (g.conj() * (1j * turned)).real, fused)
        out["dtheta"] = _round(dtheta, theta, exact)
        du, dh0 = _as_halves(du), _as_halves(dh0)
    out["dc"], out["dh0"] = _round(du * slope, c, exact), _round(dh0, h0, exact)
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
    dtype = _compute_dtype(x.dtype, exact)
    decay = _lru_decay(nu_log, theta_log, dtype)
    wide = x.to(dtype)
    initial = _initial(wide, h0, cu_seqlens)
    if theta_log is not None:
        wide, initial = _as_complex(wide), _as_complex(initial)
    entering = gamma_log.to(dtype).exp() * wide
    steps = (decay.expand_as(wide), initial, cu_seqlens, reverse)
    h, final = _recurrence(entering, *steps, fused=fused)
    if theta_log is not None:
        h, final = _as_halves(h), _as_halves(final)
    return _round(h, x, exact), final


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
    initial = _initial(wide, h0, cu_seqlens)
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
    before = _previous(stored, initial, **options)
    sums = {
        "dnu_log": (g.conj() * (-rate * before)).real,
        "dgamma_log": (g.conj() * (gamma * wide)).real,
    }
    if theta_log is not None:
        sums["dtheta_log"] = (g.conj() * (1j * theta * decay * before)).real
    arguments = {"dnu_log": nu_log, "dtheta_log": theta_log, "dgamma_log": gamma_log}
    for name, terms in sums.items():
        total, out[f"|{name}|"] = _sum_over_time(terms, fused)
        out[name] = _round(total, arguments[name], exact)
    dx = gamma * g
    if theta_log is not None:
        dx, dh0 = _as_halves(dx), _as_halves(dh0)
    out["dx"], out["dh0"] = _round(dx, x, exact), _round(dh0, h0, exact)
    return out


# The error rule ---------------------------------------------------------------------------------

# The floor beside twice the yardstick's error, relative to what is compared: (of the norm, of the
# largest number). Where a handful of numbers decide, the yardstick may have rounded none of them;
# over many, luck averages out.
_UNIT = torch.finfo(torch.float32).eps
_FLOOR = (2 * _UNIT, 2 * _UNIT)
# The oracle is float64 itself, so the yardstick has no error, and each of 4097 steps may add a
# rounding of 2e-16 (tests/kernels holds float64 against long double, by the rule above).
_WIDEST_FLOOR = (1e-12, 0.0)
# A constant rotation: float64's exp may round an angle near 2 pi by a unit of its last place,
# 8.9e-16, and every step turns by it once more: 3.6e-12 over 4097. (Held against 200 bits where
# this was seen, the oracle erred by 2.5e-12, and a recurrence whose decay has two words by 6e-14.)
ROTATION_FLOOR = (4e-12, 0.0)
_ABSOLUTE_FLOOR = 1e-35  # gradients at extreme gates are zero, or underflow in fp32


@dataclass(frozen=True)
class Verdict:
    """How a result does by the error rule: its error over what is allowed, and what to say."""

    excess: float  # at most one when the rule holds
    message: str
    error: float = 0  # ||out - exact|| / ||exact||
    yardstick: float = 0  # the same of the yardstick
    floor: float = 0  # what it may be beside twice the yardstick's

    def __bool__(self) -> bool:
        return self.excess <= 1


def judge(
    out: Tensor,
    exact: Tensor,
    yardstick: Tensor,
    size: Tensor | None = None,
    state: torch.dtype | None = None,
    widest_floor: tuple[float, float] = _WIDEST_FLOOR,
) -> Verdict:
    """||out - exact|| / ||exact|| and the largest error: each at most twice the yardstick's.

    `yardstick` is the same maths done by torch ops, rounded to out's dtype. The floor is there so
    that a yardstick without error asks for nothing impossible; for a sum over time it is relative
    to `size`, that of its terms, which is what roundings are relative to where they cancel. `state`
    None: the state that goes with data of out's dtype. `widest_floor`: of float64 states.
    """
    if out.dtype != yardstick.dtype or out.shape != exact.shape:
        expected = (yardstick.dtype, tuple(exact.shape))
        got = (out.dtype, tuple(out.shape))
        return Verdict(float("inf"), f"dtype and shape {got}, expected {expected}")
    if out.numel() == 0:
        return Verdict(0, "nothing to compare")
    wide = exact.dtype
    found, same = out.detach().cpu(), yardstick
    # Beyond what the dtype can hold, in all three: infinity is then how the result rounds.
    overflow = same.isinf() & (found == same) & (exact.abs() > torch.finfo(out.dtype).max)
    error = (found.to(wide) - exact).abs().masked_fill(overflow, 0).flatten()
    allowed = (same.to(wide) - exact).abs().masked_fill(overflow, 0).flatten()
    widest = (state or state_dtype(out.dtype)) in (torch.float64, torch.complex128)
    in_norm, of_one = widest_floor if widest else _FLOOR
    values = (exact if size is None else size).abs().flatten()
    verdicts = []
    for kind, measure in (("norm", torch.linalg.vector_norm), ("largest", torch.max)):
        whole, wrong, peer = float(measure(values)), float(measure(error)), float(measure(allowed))
        floor = in_norm * whole + of_one * float(values.max())
        floor += _ABSOLUTE_FLOOR * values.numel() ** 0.5
        message = (
            f"{kind} error {wrong:.3e} of {whole:.3e}, allowed {2 * peer + floor:.3e} (torch ops "
            f"in {out.dtype}: {peer:.3e}); worst at flat index "
            f"{int(error.nan_to_num(float('inf')).argmax())} of shape {tuple(out.shape)}"
        )
        excess = wrong / (2 * peer + floor)
        excess = excess if excess >= 0 else float("inf")  # NaN
        scale = whole or 1.0
        verdicts.append(Verdict(excess, message, wrong / scale, peer / scale, floor / scale))
    return max(verdicts, key=lambda verdict: verdict.excess)


def assert_within_rule(
    name: str,
    out: Tensor,
    exact: Tensor,
    yardstick: Tensor,
    size: Tensor | None = None,
    state: torch.dtype | None = None,
) -> None:
    """Fails with `name` and what is wrong; see `judge`."""
    verdict = judge(out, exact, yardstick, size, state)
    assert verdict, f"{name}: {verdict.message}"
