"""Naive references for `wkv4`: loops over time, one sequence after another.

Nothing here comes from the kernels or the op; the equations are the only source:

    y_t = exp(-w) y_{t-1} + exp(k_t) v_t,   z_t = exp(-w) z_{t-1} + exp(k_t)
    o_t = (y_{t-1} + exp(u + k_t) v_t) / (z_{t-1} + exp(u + k_t))

`exact=True` computes them as they stand, in float64, whose exponents have room for |k| of some
hundreds: the oracle. `exact=False` does the same maths in the tensors' own precision with torch
ops, which needs the running maximum: the yardstick of the error rule. Gradients are torch's.
Differences of logarithms can be taken in more than one order, and how two of them round is chance
where few numbers decide: `fused=True` takes the other one.

A state (y, z, m) stands for y exp(m) and z exp(m), for any scaling exponent m, so states are
compared, and losses read them, as the mean y / z and the logarithm m + log z.
"""

from __future__ import annotations

import torch
from torch import Tensor

from support import recurrence


def mean_and_log(state: Tensor) -> Tensor:
    """[N, 3, D] -> [N, 2, D]: what a state means, whatever m is; differentiable in y and z."""
    y, z, m = state.unbind(1)
    return torch.stack([y / z, m.detach() + torch.log(z)], 1)


class _ScaleGradient(torch.autograd.Function):
    """x itself, whose gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def plain_step(w, u, k, v, y, z):
    """One token of the equations: o_t, y_t, z_t."""
    weight, bonus = torch.exp(k), torch.exp(u + k)
    o = (y + bonus * v) / (z + bonus)
    return o, torch.exp(-w) * y + weight * v, torch.exp(-w) * z + weight


def _plain_sequence(w, u, k, v, y, z, roundings=None):
    """o [B, T, D] and the last y, z, of `plain_step` over w, u, k, v [B, T, D].

    It makes the same operations on the same numbers. Only y and z need the tokens before them, so
    all else is done for all tokens at once (test_oracle.py holds one against the other).
    """
    weight, bonus, decay = torch.exp(k), torch.exp(u + k), torch.exp(-w)
    ys, zs, *last = _sums(decay, weight, v, y, z, roundings)
    return (ys + bonus * v) / (zs + bonus), *last


def _sums(decay, weight, v, y, z, roundings=None):
    """[B, T, D] of y and of z before every token, then both after the last. decay: [B, T, D], or
    [2, B, T, D], a decay for each of the two. roundings: [2, 2, B, T, D], what every y and z after
    a token is off by, relative to itself, and then what flows back into them."""
    entering = torch.stack([weight * v, weight]).unbind(2)
    off = (None,) * len(entering) if roundings is None else (1 + roundings).unbind(3)
    sums, before = torch.stack([y, z]), []
    for decay_t, entering_t, off_t in zip(decay.unbind(-2), entering, off, strict=True):
        before.append(sums)
        sums = decay_t * sums + entering_t
        sums = sums if off_t is None else _ScaleGradient.apply(sums * off_t[0], off_t[1])
    return (*(torch.stack(before, 2) if before else v.new_zeros(2, *v.shape)), *sums)


def stable_step(w, u, k, v, y, z, m, fused):
    """One token with the running maximum m: o_t, y_t, z_t, m_t."""
    top = torch.maximum(m, u + k).detach()
    old, new = torch.exp(m - top), torch.exp((k - top) + u if fused else (u + k) - top)
    o = (old * y + new * v) / (old * z + new)
    top = torch.maximum(m - w, k).detach()
    old, new = torch.exp((m - top) - w if fused else (m - w) - top), torch.exp(k - top)
    return o, old * y + new * v, old * z + new, top


def _stable_sequence(w, u, k, v, y, z, m, fused):
    """o [B, T, D] and the last y, z, m, of `stable_step`: the maxima first, which are constants,
    then as `_plain_sequence`."""
    maxima = [m]
    with torch.no_grad():
        for w_t, k_t in zip(w.unbind(1), k.unbind(1), strict=True):
            maxima.append(torch.maximum(maxima[-1] - w_t, k_t))
    before = torch.stack(maxima[:-1], 1) if len(maxima) > 1 else torch.zeros_like(k)
    after = torch.stack(maxima[1:], 1) if len(maxima) > 1 else torch.zeros_like(k)
    old = torch.exp((before - after) - w if fused else (before - w) - after)
    ys, zs, *last = _sums(old, torch.exp(k - after), v, y, z)
    top = torch.maximum(before, u + k).detach()
    old, new = torch.exp(before - top), torch.exp((k - top) + u if fused else (u + k) - top)
    return (old * ys + new * v) / (old * zs + new), *last, maxima[-1]


def forward(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None,
    *, exact: bool, fused: bool = False, roundings: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final state), in the precision of the tensors; w and u [B, T, D] or [D]; exact: w also
    [2, B, T, D], one for y and one for z, and the `roundings` of `_sums`."""
    batch, time, width = k.shape
    rows = batch if cu_seqlens is None else len(cu_seqlens) - 1
    outputs, finals = [], []
    for order in recurrence.token_order(time, cu_seqlens, reverse=False):
        count = len(range(rows)[order.rows])
        at = slice(order.steps.start, order.steps.stop)
        tokens = [(x if x.dim() == 4 else x.expand_as(k))[..., at, :] for x in (w, u, k, v)]
        y, z, m = k.new_zeros(3, count, width)
        if state is not None:
            y, z, m = state[order.rows].unbind(1)
            m = m.detach()  # a constant
        if exact:
            y, z, m = y * torch.exp(m), z * torch.exp(m), torch.zeros_like(m)
            off = None if roundings is None else roundings[..., at, :]
            o, y, z = _plain_sequence(*tokens, y, z, off)
        else:
            m = torch.full_like(m, -1e30) if state is None else m
            o, y, z, m = _stable_sequence(*tokens, y, z, m, fused)
        outputs.append(o)
        finals.append(torch.stack([y, z, m], 1))
    o = torch.cat(outputs, 1) if outputs else k.clone()
    return o, torch.cat(finals) if finals else k.new_zeros(0, 3, width)


def reference(
    inputs: dict[str, Tensor | None], *, exact: bool, fused: bool = False
) -> dict[str, Tensor]:
    """o, final (as `mean_and_log`) and the gradient of every input; |dw|, |du|: of their terms. A
    token has two for dw, by y and by z, which may nearly cancel: roundings are relative to them."""
    k = inputs["k"]
    dtype = torch.float64 if exact else recurrence.state_dtype(k.dtype)
    given = {n: inputs[n] for n in ("w", "u", "k", "v", "state") if inputs[n] is not None}
    leaves = {n: t.detach().to(dtype).contiguous() for n, t in given.items()}
    for name in ("w", "u"):  # one for each token, so that there are terms to look at
        sums = (2,) if exact and name == "w" else ()
        leaves[name] = leaves[name].expand(sums + k.shape[:2] + leaves[name].shape).contiguous()
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    leaves = {"state": None} | leaves
    o, final = forward(**leaves, cu_seqlens=inputs["cu_seqlens"], exact=exact, fused=fused)
    leaves = {n: t for n, t in leaves.items() if t is not None}
    out = {"o": o if exact else o.to(k.dtype), "final": mean_and_log(final)}
    pairs = [(r, inputs[g]) for r, g in ((o, "do"), (out["final"], "dfinal")) if g in inputs]
    if not pairs:
        return {n: t.detach() for n, t in out.items()}
    results, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(
        results, list(leaves.values()), [g.to(dtype) for g in grads], allow_unused=True
    )
    for (name, leaf), grad in zip(leaves.items(), found, strict=True):
        grad = torch.zeros_like(leaf) if grad is None else grad
        if name in ("w", "u"):
            terms = tuple(range(grad.dim() - 1))
            out[f"|d{name}|"] = torch.linalg.vector_norm(grad, dim=terms)
            grad = grad.sum(terms)
        out[f"d{name}"] = grad if exact else grad.to(given[name].dtype)
    return {n: t.detach() for n, t in out.items()}


def sizes_of_roundings(inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """|dw| and |du| [D]: by how much roundings of sums over tokens move these gradients.

    A y or z that is off by a share e of itself moves dw by e ddw/de, through all tokens after it,
    and so does what flows back into it, through all tokens before. This is the root of the sum of
    the squares of ddw/de over all such sums: roundings of u each, as often up as down, move dw by
    some u times this. Where a channel decays slowly it is far more than the size of dw's terms, as
    one rounding is in thousands of them.
    """
    names = [n for n in ("w", "u", "k", "v", "state") if inputs[n] is not None]
    given = {"state": None} | {n: inputs[n].detach().double().contiguous() for n in names}
    leaves = [given[n].requires_grad_() for n in ("w", "u")]
    roundings = given["k"].new_zeros(2, 2, *given["k"].shape).requires_grad_()
    o, final = forward(**given, cu_seqlens=inputs["cu_seqlens"], exact=True, roundings=roundings)
    results = {"do": o, "dfinal": mean_and_log(final)}
    losses = [(r * inputs[g].double()).sum() for g, r in results.items() if g in inputs]
    found = torch.autograd.grad(sum(losses), leaves, create_graph=True)
    sizes = {}
    for name, grad in zip(("|dw|", "|du|"), found, strict=True):
        moved = torch.autograd.grad(grad.sum(), roundings, retain_graph=True)[0]
        sizes[name] = torch.linalg.vector_norm(moved, dim=(0, 1, 2, 3))
    return sizes
