"""Token-mixing matrices: how much of token s is in the state, or in the output, at t >= s.

HGRN's equations 5-7 write a linear recurrence as H = A C: row t of A says what the state after
token t is made of. Here for looking at, not for computing with: T x T values, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_ELEMENTS = 1 << 24  # of the largest temporary
_SHUT = -1e5  # in the place of log 0, whose differences are no numbers


def _blocks(time: int, width: int) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) whose ``rows * time * width`` temporaries are small."""
    rows = max(1, _ELEMENTS // max(1, time * width))
    for start in range(0, time, rows):
        yield start, min(start + rows, time)


def _decays(total: Tensor, start: int, stop: int) -> Tensor:
    """exp(total_t - total_s) for t in [start, stop) and s < stop: ``[B, t, s, ...]``; zero where s
    comes after t. total ``[B, T, ...]``: sums of log decays up to and with each token."""
    apart = total[:, start:stop, None] - total[:, None, :stop]
    later = torch.arange(stop, device=total.device) > torch.arange(
        start, stop, device=total.device
    ).unsqueeze(-1)
    later = later.view(1, stop - start, stop, *[1] * (total.dim() - 2))
    return apart.masked_fill(later, -torch.inf).exp()


def elementwise_mixing(decay: Tensor, entering: Tensor) -> Tensor:
    """A of h_t = decay_t * h_{t-1} + entering_t * c_t, the mean over the channels.

    decay, entering: ``[B, T, D]``, the moduli of complex ones. Returns float64 ``[B, 1, T, T]``:
    A_ts = mean over D of entering_s * decay_{s+1} * ... * decay_t.
    """
    decay, entering = torch.broadcast_tensors(decay.double(), entering.double())
    batch, time, width = decay.shape
    total = decay.log().clamp_min(_SHUT).cumsum(1)
    mixing = total.new_zeros(batch, 1, time, time)
    for start, stop in _blocks(time, batch * width):
        weights = _decays(total, start, stop) * entering[:, None, :stop]
        mixing[:, 0, start:stop, :stop] = weights.mean(-1)
    return mixing


def head_mixing(q: Tensor, k: Tensor, log_decay: Tensor, scale: float = 1.0) -> Tensor:
    """A of S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T, o_t = scale * q_t^T S_t, so o = A v.

    q, k ``[B, T, H, K]``; log_decay ``[B, T, H, K]`` or ``[B, T, H, 1]``. Returns float64
    ``[B, H, T, T]``: A_ts = scale * sum over K of q_t k_s exp(log_decay_{s+1} + ... + log_decay_t).
    """
    q, k = q.double(), k.double()
    batch, time, heads, width = k.shape
    total = log_decay.double().clamp_min(_SHUT).expand(k.shape).cumsum(1)
    mixing = total.new_zeros(batch, heads, time, time)
    for start, stop in _blocks(time, batch * heads * width):
        weights = _decays(total, start, stop) * k[:, None, :stop]
        rows = torch.einsum("bthk,btshk->bhts", q[:, start:stop], weights)
        mixing[:, :, start:stop, :stop] = scale * rows
    return mixing


def activated(x: Tensor, activation: str) -> Tensor:
    """x under "none", "silu" or "sigmoid"."""
    functions = {"none": lambda x: x, "silu": F.silu, "sigmoid": torch.sigmoid}
    return functions[activation](x.double())
