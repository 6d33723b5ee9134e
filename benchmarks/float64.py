"""Naive float64 loops over a few sampled channels: what a benchmark's outputs are held against.

Everything here works on [T, n] arrays: time, and the n sampled (batch, channel) pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64] | NDArray[np.complex128]


class Sample(NamedTuple):
    """A few batch rows and, in each, a few channels."""

    batches: list[int]
    channels: list[int]

    @staticmethod
    def of(batch: int, channels: int) -> Sample:
        """First, last and two in between."""

        def spread(size: int) -> list[int]:
            return sorted({0, size // 3, 2 * size // 3, size - 1})

        return Sample(spread(batch)[-2:], spread(channels))

    def pick(self, tensor: Tensor, halves: bool = False) -> Array:
        """[B, T, D], or [B, T, 2D] = [Re | Im] with `halves`, to [T, n]."""
        if halves:
            real, imaginary = tensor.chunk(2, dim=-1)
            return self.pick(real) + 1j * self.pick(imaginary)
        rows = tensor.detach()[self.batches][:, :, self.channels].to("cpu", torch.float64)
        return rows.permute(1, 0, 2).flatten(1).numpy()

    def pick_parameter(self, tensor: Tensor) -> NDArray[np.float64]:
        """[D] to [n]."""
        row = tensor.detach()[self.channels].to("cpu", torch.float64).numpy()
        return np.tile(row, len(self.batches))


def scan(x: Array, a: Array) -> Array:
    """h_t = a_t h_{t-1} + x_t from h = 0."""
    h = np.empty_like(x)
    state = np.zeros_like(x[0])
    for t in range(len(x)):
        state = a[t] * state + x[t]
        h[t] = state
    return h


def scan_backward(dh: Array, a: Array, h: Array) -> tuple[Array, Array]:
    """(dx, previous): the gradient of x, and h_{t-1}, so that da = dx conj(previous)."""
    dx = np.empty_like(dh)
    state = np.zeros_like(dh[0])
    for t in reversed(range(len(dh))):
        state = dh[t] + state
        dx[t] = state
        state = np.conj(a[t]) * state
    return dx, np.concatenate([np.zeros_like(h[:1]), h[:-1]])


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def on_parts(function, x: Array) -> Array:
    """`function` of the real and of the imaginary part."""
    return function(x.real) + 1j * function(x.imag) if np.iscomplexobj(x) else function(x)


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def silu_slope(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The derivative of silu."""
    return sigmoid(x) * (1 + x * (1 - sigmoid(x)))


class HgruResults(NamedTuple):
    """h, and the gradients of c and f for one dh."""

    h: Array
    dc: Array
    df: Array


def hgru(c: Array, f: Array, gamma: Array, theta: Array | None, dh: Array) -> HgruResults:
    """HGRN's recurrence with silu (arXiv 2311.04823, eq. 2), and its gradients."""
    gate = sigmoid(f)
    decay = gamma + (1 - gamma) * gate
    turn = 1 if theta is None else np.exp(1j * theta)
    value = on_parts(silu, c)
    h = scan((1 - decay) * value, decay * turn)
    dx, previous = scan_backward(dh, decay * turn, h)
    slope = on_parts(silu_slope, c)
    if np.iscomplexobj(c):
        dc = (1 - decay) * (dx.real * slope.real + 1j * dx.imag * slope.imag)
    else:
        dc = (1 - decay) * dx * slope
    ddecay = (dx * np.conj(turn * previous - value)).real
    return HgruResults(h, dc, ddecay * (1 - gamma) * gate * (1 - gate))


class Wkv4Results(NamedTuple):
    """o, and the gradients of k and v for one gradient of o."""

    o: Array
    dk: Array
    dv: Array


def wkv4(w: Array, u: Array, k: Array, v: Array, grad_o: Array) -> Wkv4Results:
    """RWKV-4's token mixing as it stands (arXiv 2305.13048, eq. 16), and its gradients: right for
    keys and bonuses of some hundreds at most."""
    decay, token, bonus = np.exp(-w), np.exp(k), np.exp(u + k)
    y, z = (scan(np.concatenate([0 * x[:1], x[:-1]]), np.broadcast_to(decay, x.shape))
            for x in (token * v, token))  # fmt: skip
    sums = z + bonus
    o = (y + bonus * v) / sums
    g = grad_o / sums
    # What flows back into the sums that leave a token.
    dy, dz = (scan(np.concatenate([0 * x[:1], x[:0:-1]]), np.broadcast_to(decay, x.shape))[::-1]
              for x in (g, -g * o))  # fmt: skip
    return Wkv4Results(o, g * bonus * (v - o) + token * (v * dy + dz), g * bonus + token * dy)


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, h0: Tensor | None = None, chunk: int = 32
) -> tuple[Tensor, Tensor]:
    """o [T, V] and the final state of one head, [T, K] and [T, V]; float64, differentiable.

    S_t = diag(f_t) S_{t-1} + k_t v_t^T, o_t = q_t^T S_t, in chunks: with G the sums of log f from a
    chunk's start, pairs are (q exp(G)) . (k exp(-G)). That is right as long as no chunk forgets by
    more than exp(-600), which the gates of these benchmarks are far from.
    """
    state = k.new_zeros(k.shape[-1], v.shape[-1]) if h0 is None else h0
    rows = []
    for at in range(0, len(q), chunk):
        part = slice(at, at + chunk)
        sums = log_f[part].cumsum(0)
        last = sums[-1]
        queries, keys = q[part] * sums.exp(), k[part] * (-sums).exp()
        rows.append(queries @ state + (queries @ keys.mT).tril() @ v[part])
        state = last.exp()[:, None] * state + (k[part] * (last - sums).exp()).mT @ v[part]
    return torch.cat(rows), state


def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, d_o: Tensor | None = None, rows: int = 1024
) -> tuple[Tensor, ...]:
    """o of one head, and with d_o also dq, dk, dv and dlog f; q, d_o [Tq, D], k, v [Tk, D], log_f
    [Tk], float64. The last query is on the last key.

    o_i = sum over j <= i of softmax_j(q_i . k_j / sqrt(D) + c_i - c_j) v_j with c = cumsum(log f)
    (arXiv 2503.02130, eq. 10), `rows` queries at a time.
    """
    keys, past, scale = len(k), len(k) - len(q), q.shape[-1] ** -0.5
    c = log_f.cumsum(0)
    o, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    sums = torch.zeros_like(c)  # of dS over its row, less those over its column
    for at in range(0, len(q), rows):
        part = slice(at, min(at + rows, len(q)))
        seen = slice(0, past + part.stop)
        place = torch.arange(past + part.start, past + part.stop, device=q.device)
        scores = scale * (q[part] @ k[seen].mT) + c[place, None] - c[seen]
        later = torch.arange(keys, device=q.device)[seen] > place[:, None]
        weights = scores.masked_fill_(later, -torch.inf).softmax(-1)
        o[part] = weights @ v[seen]
        if d_o is None:
            continue
        delta = (d_o[part] * o[part]).sum(-1, keepdim=True)
        ds = weights * (d_o[part] @ v[seen].mT - delta)
        dq[part] = scale * (ds @ k[seen])
        dk[seen] += scale * (ds.mT @ q[part])
        dv[seen] += weights.mT @ d_o[part]
        sums[place] += ds.sum(-1)
        sums[seen] -= ds.sum(0)
    if d_o is None:
        return (o,)
    return o, dq, dk, dv, sums.flip(0).cumsum(0).flip(0)


def distance(found: Tensor, expected: Tensor) -> float:
    """`relative_error` of tensors, computed where they are."""
    error = float((found.double() - expected).norm() / expected.norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def relative_error(found: Array, expected: Array) -> float:
    """The norm of the difference over the norm of what was expected; NaN never passes."""
    error = float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-300))
    return error if error == error else float("inf")
