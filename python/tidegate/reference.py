"""The ops once more, each in a few lines of torch written from its equation.

They are here to be read, and to hold the fast ops against: a change of yours to a model, a port to
another framework, a suspicion. Signatures and meanings are those of :mod:`tidegate.ops`; autograd
differentiates them as often as asked; they run on any device. Nothing is checked beyond what torch
checks, tokens are taken one after another (attention: a whole matrix of scores), and ``cu_seqlens``
is read on the host, so they are slow on purpose.

Every function takes one argument more, ``dtype``: what it computes in and returns. None computes in
the precision that the op keeps its states in (float32 for 16-bit data, otherwise the data's own)
and returns what the op returns. ``dtype=torch.float64`` is for whoever wants to know how far
rounding goes (complex data become complex128); for gradients in float64 give it tensors in float64.
A step of the ops is its op at T = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = [
    "add_norm",
    "forgetting_attention",
    "gated_linear_attention",
    "gated_rnn",
    "glu",
    "hgrn2",
    "hgru",
    "linear_cross_entropy",
    "linear_scan",
    "lru_scan",
    "norm",
    "rotary",
    "wkv4",
]

_ACTIVATIONS = {"none": lambda x: x, "silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}


def linear_scan(
    x: Tensor,
    a: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``h_t = a_t h_{t-1} + x_t``, for x [B, T, D] and a [B, T, D] or [D]. Returns (h, final h).

    HGRN (arXiv 2311.04823), eq. 2, in its bare form.
    """
    wide, decay = _cast(dtype, x, x, a)
    h, final = _scan(wide, decay.expand(x.shape), h0, reverse, cu_seqlens)
    return _result(h, x, dtype), final


def hgru(
    c: Tensor,
    f: Tensor,
    gamma: Tensor | None = None,
    theta: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    activation: str = "silu",
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """HGRN's recurrence (arXiv 2311.04823, eq. 2; gamma: section 3.2). Returns (h, final h).

    ``lambda_t = gamma + (1 - gamma) sigmoid(f_t)``,
    ``h_t = lambda_t exp(i theta) h_{t-1} + (1 - lambda_t) act(c_t)``

    Real for c, f [B, T, D] without theta. With theta [D] it is complex: c [B, T, 2D] and h hold
    real parts in their first D channels and imaginary parts in the last.
    """
    wide, f, gamma, theta, h0 = _cast(dtype, c, c, f, gamma, theta, h0)
    decay, rest = _bounded_gate(f, gamma)
    values = _ACTIVATIONS[activation](wide)
    if theta is None:
        h, final = _scan(rest * values, decay, h0, reverse, cu_seqlens)
    else:
        turn = torch.polar(torch.ones_like(theta), theta)
        initial = None if h0 is None else _as_complex(h0)
        h, final = _scan(rest * _as_complex(values), decay * turn, initial, reverse, cu_seqlens)
        h, final = _as_halves(h), _as_halves(final)
    return _result(h, c, dtype), final


def lru_scan(
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor | None,
    gamma_log: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The linear recurrent unit (LRU, arXiv 2303.06349, section 3). Returns (h, final h).

    ``lambda = exp(-exp(nu_log) + i exp(theta_log))``, ``h_t = lambda h_{t-1} + exp(gamma_log) x_t``

    Complex as in :func:`hgru`, with parameters [D] and x [B, T, 2D]; real, with x [B, T, D], when
    theta_log is None.
    """
    wide, nu_log, theta_log, gamma_log, h0 = _cast(dtype, x, x, nu_log, theta_log, gamma_log, h0)
    # Beyond 80 the modulus is zero in every dtype; without the bound its gradient is 0 * inf.
    modulus = torch.exp(-torch.exp(nu_log.clamp(max=80)))
    if theta_log is None:
        h, final = _scan(gamma_log.exp() * wide, modulus.expand(x.shape), h0, reverse, cu_seqlens)
    else:
        theta = theta_log.exp()
        decay = modulus * torch.polar(torch.ones_like(theta), theta)
        entering = gamma_log.exp() * _as_complex(wide)
        initial = None if h0 is None else _as_complex(h0)
        h, final = _scan(entering, decay.expand(entering.shape), initial, reverse, cu_seqlens)
        h, final = _as_halves(h), _as_halves(final)
    return _result(h, x, dtype), final


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    h0: Tensor | None = None,
    *,
    scale: float = 1.0,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention (arXiv 2312.06635, eq. 3). Returns (o, final S). For every head:

    ``S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T``, ``o_t = scale q_t^T S_t``

    q, k [B, T, H, K]; v [B, T, H, V]; log_f [B, T, H, K] or [B, T, H, 1]; S [N, H, K, V].
    """
    queries, k, v, log_f, h0 = _cast(dtype, q, q, k, v, log_f, h0)
    o, final = _matrix_scan(queries, k, v, log_f.exp(), h0, reverse, cu_seqlens)
    return _result(scale * o, q, dtype), final


def hgrn2(
    q: Tensor,
    f: Tensor,
    v: Tensor,
    gamma: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    scale: float = 1.0,
    q_activation: str = "none",
    v_activation: str = "none",
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """HGRN2's recurrence (arXiv 2404.07904, eq. 3). Returns (o, final S). For every head:

    ``lambda_t = gamma + (1 - gamma) sigmoid(f_t)``,
    ``S_t = diag(lambda_t) S_{t-1} + (1 - lambda_t) act_v(v_t)^T``, ``o_t = scale act_q(q_t)^T S_t``

    q, f [B, T, H, K]; v [B, T, H, V]; gamma [H, K]; S [N, H, K, V].
    """
    queries, f, v, gamma, h0 = _cast(dtype, q, q, f, v, gamma, h0)
    decay, keys = _bounded_gate(f, gamma)
    queries, values = _ACTIVATIONS[q_activation](queries), _ACTIVATIONS[v_activation](v)
    o, final = _matrix_scan(queries, keys, values, decay, h0, reverse, cu_seqlens)
    return _result(scale * o, q, dtype), final


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    prune: float | None = None,
    return_lse: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Forgetting attention (arXiv 2503.02130, eq. 10-12): for query i at p = i + Tk - Tq,

    ``s_ij = scale q_i . k_j + log_f_{j+1} + ... + log_f_p`` for ``p - window < j <= p``,
    ``o_i = sum_j softmax_j(s_ij) v_j``, ``lse_i = log sum_j exp(s_ij)``

    q [B, Tq, Hq, D]; k, v [B, Tk, Hkv, D], Hq a multiple of Hkv; log_f [B, Tk, Hq]. prune has no
    effect: it allows an op to leave out keys as long as an element of o stays within
    ``2 prune max|v|`` of what is computed here.
    """
    queries, k, v, log_f = _cast(dtype, q, q, k, v, log_f)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    if cu_seqlens is None:
        o, lse = _attend(queries, k, v, log_f, scale, window)
    else:
        of_queries = cu_seqlens.diff().tolist()
        of_keys = of_queries if cu_seqlens_k is None else cu_seqlens_k.diff().tolist()
        pieces = (queries.split(of_queries, 1), *(t.split(of_keys, 1) for t in (k, v, log_f)))
        found = [_attend(*piece, scale, window) for piece in zip(*pieces, strict=True)]
        o = torch.cat([queries[:, :0], *(o for o, _ in found)], 1)
        lse = torch.cat([queries[:, :0, :, 0].mT, *(lse for _, lse in found)], 2)
    o = _result(o, q, dtype)
    return (o, lse) if return_lse else o


def wkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """RWKV-4's token mixing (arXiv 2305.13048, eq. 16). Returns (o, final state).

    ``y_t = exp(-w) y_{t-1} + exp(k_t) v_t``, ``z_t = exp(-w) z_{t-1} + exp(k_t)``,
    ``o_t = (y_{t-1} + exp(u + k_t) v_t) / (z_{t-1} + exp(u + k_t))``

    w, u [D]; k, v [B, T, D]. A state [N, 3, D] is y exp(-m), z exp(-m) and the scaling exponent m,
    here the largest exponent so far. Its choice changes no output, so it is a constant to autograd,
    and the op's may differ: compare y / z and m + log z.
    """
    keys, w, u, v, state = _cast(dtype, k, k, w, u, v, state)
    if state is None:
        state = keys.new_zeros(_sequence_count(k, cu_seqlens), 3, k.shape[2])

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        y, z, m = state.unbind(1)
        m = torch.where(z == 0, -1e30, m).detach()  # z is zero in an empty state, whatever its m
        # The output, all terms scaled by the exponential of the largest exponent ..
        top = torch.maximum(m, u + keys[:, t]).detach()
        old, new = torch.exp(m - top), torch.exp(u + keys[:, t] - top)
        o = (old * y + new * v[:, t]) / (old * z + new)
        # .. and the next state likewise.
        top = torch.maximum(m - w, keys[:, t]).detach()
        old, new = torch.exp(m - w - top), torch.exp(keys[:, t] - top)
        return torch.stack([old * y + new * v[:, t], old * z + new, top], 1), o

    o, final = _recur(step, state, keys, False, cu_seqlens)
    return _result(o, k, dtype), final


def gated_rnn(
    z: Tensor,
    x: Tensor,
    w_zh: Tensor,
    h0: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    gamma: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The minimal gated RNN ("Towards Understanding Gated Linear Recurrent Neural Networks",
    eq. 5-7), gamma as in :func:`hgru`. Returns (h, final h).

    ``g_t = gamma + (1 - gamma) sigmoid(z_t + W_zh h_{t-1})``, ``h_t = g_t h_{t-1} + (1 - g_t) x_t``

    z, x [B, T, D]; w_zh [D, D]; gamma [D].
    """
    wide, z, w_zh, h0, gamma = _cast(dtype, x, x, z, w_zh, h0, gamma)

    def step(h: Tensor, t: int) -> tuple[Tensor, Tensor]:
        gate, rest = _bounded_gate(z[:, t] + h @ w_zh.mT, gamma)
        h = gate * h + rest * wide[:, t]
        return h, h

    if h0 is None:
        h0 = wide.new_zeros(_sequence_count(x, cu_seqlens), x.shape[2])
    h, final = _recur(step, h0, wide, False, cu_seqlens)
    return _result(h, x, dtype), final


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``lse - (1 - e) z_y - e mean(z) + z_loss lse^2``, where ``z = x weight^T + bias``, ``lse =
    log sum exp(z)`` and e is label_smoothing.

    x [..., D], weight [V, D], labels [...], bias [V]. Softmax's cross-entropy with label smoothing
    (arXiv 1512.00567, section 7) and z-loss (arXiv 2204.02311, section 5).
    """
    wide, weight, bias = _cast(dtype, x, x, weight, bias)
    z = torch.nn.functional.linear(wide, weight, bias)
    kept = labels != ignore_index
    y = torch.where(kept, labels, 0).long()[..., None]
    lse = z.logsumexp(-1)
    loss = lse - (1 - label_smoothing) * z.gather(-1, y)[..., 0] + z_loss * lse.square()
    loss = torch.where(kept, loss - label_smoothing * z.mean(-1), 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / (kept.sum().clamp_min(1) if reduction == "mean" else 1)


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    inverse: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotary positions (arXiv 2104.09864, eq. 34), channels i and i + D/2 of a head as a pair.

    ``y_i = x_i cos_i - x_{i+D/2} sin_i``, ``y_{i+D/2} = x_{i+D/2} cos_i + x_i sin_i``

    x [B, T, H, D]; cos and sin [1, T, D/2] or [B, T, D/2], constants. inverse turns back.
    """
    wide, cos, sin = _cast(dtype, x, x, cos.detach(), sin.detach())
    cos, sin = cos[:, :, None], -sin[:, :, None] if inverse else sin[:, :, None]
    a, b = wide.chunk(2, -1)
    return _result(torch.cat([a * cos - b * sin, b * cos + a * sin], -1), x, dtype)


def norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    kind: str = "rms",
    gate_activation: str = "silu",
    gate_first: bool = False,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) of the last dimension, its gate
    before or after it. Unlike the op's, ``dtype`` is also what is computed in.

    x, gate [..., D]; weight and bias [D], or [H, D] for x [..., H, D].
    """
    u, weight, bias, gate = _cast(dtype, x, x, weight, bias, gate)
    act = None if gate is None else _ACTIVATIONS[gate_activation](gate)
    if act is not None and gate_first:
        u = act * u
    if kind == "layer":
        u = u - u.mean(-1, keepdim=True)
    y = u / (u.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return _result(y if act is None or gate_first else act * y, x, dtype)


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: str = "rms",
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """A residual connection and the :func:`norm` of it. Returns (y, residual + x).

    x, residual [..., D]. The sum is rounded to residual's dtype before it is normed.
    """
    wide, stream = _cast(dtype, x, x, residual)
    total = _result(wide + stream, residual, dtype)
    y = norm(total, weight, bias, kind=kind, eps=eps, dtype=dtype)
    return _result(y, x, dtype), total


def glu(x: Tensor, activation: str = "silu", *, dtype: torch.dtype | None = None) -> Tensor:
    """The gated linear unit's product (arXiv 2002.05202): ``act(gate) * value``.

    x [..., 2F], gates before values.
    """
    (wide,) = _cast(dtype, x, x)
    gate, value = wide.chunk(2, -1)
    return _result(_ACTIVATIONS[activation](gate) * value, x, dtype)


# What they share ---------------------------------------------------------------------------------


def _cast(dtype: torch.dtype | None, data: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """`tensors` in the dtype to compute in; a real one stays real beside complex data."""
    half = data.dtype in (torch.bfloat16, torch.float16)
    real = dtype or (torch.float32 if half else data.dtype)
    real = real.to_real() if real.is_complex else real
    return [
        t if t is None else t.to(real.to_complex() if t.is_complex() else real) for t in tensors
    ]


def _result(value: Tensor, data: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The output as the op returns it, in the data's dtype, unless another was asked for."""
    return value.to(data.dtype) if dtype is None else value


def _bounded_gate(f: Tensor, gamma: Tensor | None) -> tuple[Tensor, Tensor]:
    """``lambda = gamma + (1 - gamma) sigmoid(f)`` and ``1 - lambda``.

    The smaller one of the two sigmoids has all its digits, and so has autograd's gradient of it.
    """
    up, down = torch.sigmoid(f), torch.sigmoid(-f)
    decay, rest = torch.where(f > 0, 1 - down, up), torch.where(f > 0, down, 1 - up)
    return (decay, rest) if gamma is None else (gamma + (1 - gamma) * decay, (1 - gamma) * rest)


def _as_complex(halves: Tensor) -> Tensor:
    return torch.complex(*halves.chunk(2, -1))


def _as_halves(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], -1)


def _sequence_count(data: Tensor, cu_seqlens: Tensor | None) -> int:
    return data.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1


def _sequences(time: int, cu_seqlens: Tensor | None) -> Iterator[tuple[slice, range]]:
    """The rows of the state and the tokens of every sequence; a whole batch at once if padded."""
    if cu_seqlens is None:
        yield slice(None), range(time)
        return
    ends = cu_seqlens.tolist()
    for n in range(len(ends) - 1):
        yield slice(n, n + 1), range(ends[n], ends[n + 1])


def _recur(
    step: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    state: Tensor,
    like: Tensor,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, ...] and final states of ``state, output_t = step(state, t)``; with no tokens
    the outputs are as empty as `like`."""
    outputs: list[Tensor | None] = [None] * like.shape[1]
    finals = [state[:0]]
    for rows, tokens in _sequences(like.shape[1], cu_seqlens):
        s = state[rows]
        for t in reversed(tokens) if reverse else tokens:
            s, outputs[t] = step(s, t)
        finals.append(s)
    return torch.stack(outputs, 1) if outputs else like.clone(), torch.cat(finals)


def _scan(
    x: Tensor, a: Tensor, h0: Tensor | None, reverse: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``h_t = a_t h_{t-1} + x_t``, for x and a of one shape."""

    def step(h: Tensor, t: int) -> tuple[Tensor, Tensor]:
        h = a[:, t] * h + x[:, t]
        return h, h

    if h0 is None:
        h0 = x.new_zeros(_sequence_count(x, cu_seqlens), x.shape[2])
    return _recur(step, h0.to(x.dtype), x, reverse, cu_seqlens)


def _matrix_scan(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, h0: Tensor | None, reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``S_t = diag(f_t) S_{t-1} + k_t v_t^T`` and ``q_t^T S_t``, for every head."""

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state = f[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        return state, torch.einsum("nhk,nhkv->nhv", q[:, t], state)

    if h0 is None:
        h0 = q.new_zeros(_sequence_count(q, cu_seqlens), *q.shape[2:], v.shape[-1])
    return _recur(step, h0, v, reverse, cu_seqlens)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """o [B, Tq, H, D] and lse [B, H, Tq] of one sequence, or of a padded batch."""
    count, keys = q.shape[1], k.shape[1]
    j = torch.arange(keys, device=q.device)
    p = j[keys - count :, None]  # the last query is on the last key
    # [B, H, u, j]: the gates after key j, summed up to token u. Differences of one cumulative sum
    # would lose digits behind a shut gate. Below -1e5 a gate is shut; -inf would make NaN.
    gates = log_f.clamp_min(-1e5).mT[..., None]
    forgotten = torch.where(j[:, None] > j, gates, 0.0).cumsum(2)[:, :, keys - count :]
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k) + forgotten
    seen = (j <= p) if window is None else (j <= p) & (j > p - window)
    scores = scores.masked_fill(~seen, -torch.inf)
    o = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return o, scores.logsumexp(-1)
