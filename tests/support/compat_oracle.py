"""The equations behind other libraries' ops, token by token in float64; autograd has the gradients.

Written from the definitions that fla-core 0.6.0 calls naive, and from the release of the Forgetting
Transformer's test: scale K^-0.5 where none is given, gates as natural logarithms.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hgrn(x: Tensor, g: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
    """h_t = exp(g_t) h_{t-1} + x_t."""
    x, g = x.double(), g.double()
    h = torch.zeros_like(x[:, 0]) if h is None else h.double()
    outputs = []
    for t in range(x.shape[1]):
        h = g[:, t].exp() * h + x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1), h


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    h: Tensor | None,
    scale: float | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(gk_t)) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t."""
    q, k, v = q.double(), k.double(), v.double()
    gk = torch.zeros_like(k) if gk is None else gk.double()
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    shape = (k.shape[0], *k.shape[2:], v.shape[-1])
    h = torch.zeros(shape, dtype=torch.float64) if h is None else h.double()
    outputs: dict[int, Tensor] = {}
    steps = range(q.shape[1])
    for t in reversed(steps) if reverse else steps:
        h = gk[:, t].exp()[..., None] * h + k[:, t, ..., None] * v[:, t, ..., None, :]
        outputs[t] = (scale * q[:, t, ..., None] * h).sum(-2)
    return torch.stack([outputs[t] for t in steps], 1), h


def forgetting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    window: int | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T + c_i - c_j) v over j <= i, j > i - window, j >= start of the row."""
    q, k, v, g = q.double(), k.double(), v.double(), g.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    c = g.cumsum(1).transpose(1, 2)
    late = k.shape[1] - q.shape[1]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (
        k.shape[-1] ** -0.5 if scale is None else scale
    )
    scores = scores + c[:, :, late:, None] - c[:, :, None, :]
    i, j = torch.arange(late, k.shape[1])[:, None], torch.arange(k.shape[1])
    seen = j <= i if window is None else (j <= i) & (j > i - window)
    seen = seen.expand(q.shape[0], 1, *seen.shape)
    if start is not None:
        seen = seen & (j >= start[:, None, None, None])
    # A query without a key gets zeros.
    weights = scores.masked_fill(~seen, -1e300).softmax(-1).masked_fill(~seen, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def rwkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """o, and the state's numerator and denominator, without their exponent ``[B, 2, D]``."""
    decay = (-w.double().exp()).exp()
    alpha, beta, eps = state.double().squeeze(2).unbind(1)
    y, z = alpha * eps.exp(), beta * eps.exp()
    outputs = []
    for t in range(k.shape[1]):
        new, now = k[:, t].double().exp(), (u.double() + k[:, t].double()).exp()
        value = v[:, t].double()
        outputs.append((y + now * value) / (z + now))
        y, z = decay * y + new * value, decay * z + new
    return torch.stack(outputs, 1), torch.stack([y, z], 1)
