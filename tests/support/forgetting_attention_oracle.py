"""Naive reference for `forgetting_attention`: whole matrices of scores, one head after another.

Nothing here comes from the kernels or the ops; the equations are the only source. For a head,
query i at position p = i + Tk - Tq of its sequence, keys j in (p - window, p]:

    s_ij = scale * q_i . k_j + log_f_{j+1} + ... + log_f_p
    lse_i = log sum_j exp(s_ij),   P_ij = exp(s_ij - lse_i),   o_i = sum_j P_ij v_j
    dS_ij = P_ij (do_i . v_j - sum_j' P_ij' do_i . v_j' + dlse_i)
    dlog_f_u = sum of dS_ij over j < u <= p

`exact=True` computes in float64 and adds the gates between two tokens up one by one: the oracle.
`exact=False` does the same maths with torch ops in the tensors' own precision (fp32 for 16-bit
data), with c = cumsum(log_f): the yardstick. `operands`: the dtype to which P and dS are rounded
before anything is summed up, as on tensor cores. `one_by_one`: sums of products add their terms up
one after the other, as loops do; torch's matmul adds up parts, and over a few hundred terms of
either sign its error is two to three times smaller. Results named |x| are the sizes of x's terms;
|lse| is that of the scores' (docs/lab/numerics.md):

    |lse|_i = max(|lse_i|, sum_j P_ij (|scale| sum_d |q_id k_jd| + |log_f_{j+1}| + ... + |log_f_p|))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from support import recurrence

# Queries whose scores are in memory at a time: the oracle's few, so that its float64 matrices of
# many keys stay in a core's cache; the yardsticks' many, so that matmul adds up over queries.
_EXACT_ROWS, _ROWS = 128, 1024
_LEAST_LOG_GATE = -1e5


@dataclass(frozen=True)
class Segment:
    """One sequence's rows of the [B, T, ..] tensors."""

    batch: int
    queries: slice
    keys: slice


def segments(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None):
    if cu_seqlens is None:
        whole = slice(0, q.shape[1]), slice(0, k.shape[1])
        return [Segment(b, *whole) for b in range(q.shape[0])]
    of_queries = cu_seqlens.tolist()
    of_keys = of_queries if cu_seqlens_k is None else cu_seqlens_k.tolist()
    bounds = zip(of_queries, of_queries[1:], of_keys, of_keys[1:], strict=False)
    return [Segment(0, slice(a, b), slice(c, d)) for a, b, c, d in bounds]


def gate_sums(log_f: Tensor, rows: range, exact: bool) -> Tensor:
    """[rows, keys]: log_f_{j+1} + ... + log_f_p for p in rows; zero where j >= p."""
    keys = log_f.shape[0]
    held = log_f.clamp_min(_LEAST_LOG_GATE)
    if not exact:
        held = torch.cat([torch.zeros_like(held[:1]), held[1:]])
        c = held.cumsum(0)
        return (c[rows.start : rows.stop, None] - c[None, :]).tril(rows.start - 1)
    sums = torch.zeros(len(rows), keys, dtype=log_f.dtype)
    if rows.start > 0:  # the sums up to the first row, from the newest key back
        back = held[1 : rows.start + 1].flip(0).cumsum(0).flip(0)
        sums[0, : rows.start] = back
    for i, p in enumerate(rows):
        if i > 0:
            sums[i, :p] = sums[i - 1, :p] + held[p]
    return sums


def seen(rows: range, keys: int, window: int | None) -> Tensor:
    """[rows, keys]: which keys a query sees."""
    p, j = torch.arange(rows.start, rows.stop)[:, None], torch.arange(keys)[None, :]
    return (j <= p) if window is None else (j <= p) & (j > p - window)


def forward(
    q, k, v, log_f, *, scale=None, window=None, cu_seqlens=None, cu_seqlens_k=None, prune=None
):
    """(o, lse) in the tensors' own precision, by ops that torch's autograd differentiates."""
    del prune  # what may be dropped may also be kept
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    o, lse = torch.zeros_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])
    for at in segments(q, k, cu_seqlens, cu_seqlens_k):
        queries = q[at.batch, at.queries]
        keys = k[at.batch, at.keys]
        rows = range(keys.shape[0] - queries.shape[0], keys.shape[0])
        if not rows:
            continue
        for h in range(q.shape[2]):
            c = log_f[at.batch, at.keys, h].cumsum(0)
            gates = c[rows.start :, None] - c[None, :]
            scores = scale * queries[:, h] @ keys[:, h // group].T + gates
            scores = scores.masked_fill(~seen(rows, keys.shape[0], window), -torch.inf)
            lse[at.batch, h, at.queries] = torch.logsumexp(scores, -1)
            o[at.batch, at.queries, h] = scores.softmax(-1) @ v[at.batch, at.keys, h // group]
    return o, lse


def _add_one_by_one(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, its terms added up in their order."""
    out = left.new_zeros(left.shape[0], right.shape[1])
    for column, row in zip(left.T, right, strict=True):
        out = torch.addcmul(out, column[:, None], row[None, :])
    return out


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    prune: float | None = None,
    exact: bool,
    operands: torch.dtype | None = None,
    one_by_one: bool = False,
) -> dict[str, Tensor]:
    """o, lse, and with do or dlse all gradients."""
    del prune
    dtype = torch.float64 if exact else recurrence.state_dtype(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    wide = {"q": q, "k": k, "v": v, "log_f": log_f}
    wide = {name: value.to(dtype) for name, value in wide.items()}
    o = torch.zeros(q.shape, dtype=dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
    grads = {f"d{name}": torch.zeros_like(value) for name, value in wide.items()}
    sizes = {f"|d{name}|": torch.zeros_like(value) for name, value in wide.items()}
    lse_size = torch.zeros_like(lse)

    multiply = _add_one_by_one if one_by_one else torch.matmul
    step = _EXACT_ROWS if exact else _ROWS

    def operand(matrix: Tensor) -> Tensor:
        return matrix if exact or operands is None else matrix.to(operands).to(dtype)

    for at in segments(q, k, cu_seqlens, cu_seqlens_k):
        count, keys = at.queries.stop - at.queries.start, at.keys.stop - at.keys.start
        for h in range(q.shape[2]):
            row_sums, column_sums = torch.zeros(keys, dtype=dtype), torch.zeros(keys, dtype=dtype)
            row_sizes = torch.zeros(keys, dtype=dtype)
            for first in range(0, count, step):
                last = min(first + step, count)
                rows = range(first + keys - count, last + keys - count)
                of_rows = (at.batch, slice(at.queries.start + first, at.queries.start + last), h)
                end = rows.stop  # keys after the last of these queries are not seen
                of_keys = (at.batch, slice(at.keys.start, at.keys.start + end), h // group)
                K, V = wide["k"][of_keys], wide["v"][of_keys]
                gates = wide["log_f"][at.batch, of_keys[1], h]
                Q = wide["q"][of_rows]
                sums = gate_sums(gates, rows, exact)
                scores = scale * multiply(Q, K.T) + sums
                scores = scores.masked_fill(~seen(rows, end, window), -torch.inf)
                norm = torch.logsumexp(scores, -1)
                P = torch.exp(scores - norm[:, None])
                mixed = multiply(operand(P), V)
                o[of_rows] = mixed
                lse[at.batch, h, of_rows[1]] = norm
                if exact:
                    terms = abs(scale) * (Q.abs() @ K.abs().T) + sums.abs()
                    of_scores = (P * terms).sum(-1)
                    lse_size[at.batch, h, of_rows[1]] = torch.maximum(norm.abs(), of_scores)
                if do is None and dlse is None:
                    continue
                dO = torch.zeros_like(mixed) if do is None else do[of_rows].to(dtype)
                dP = multiply(dO, V.T)
                stored = mixed if exact else mixed.to(q.dtype).to(dtype)
                delta = (dO * stored).sum(-1)
                delta_size = (dO * stored).abs().sum(-1)
                if dlse is not None:
                    d_norm = dlse[at.batch, h, of_rows[1]].to(dtype)
                    delta, delta_size = delta - d_norm, delta_size + d_norm.abs()
                dS = P * (dP - delta[:, None])
                size = P * (dP.abs() + delta_size[:, None])
                grads["dq"][of_rows] = scale * multiply(operand(dS), K)
                grads["dk"][of_keys] += scale * multiply(operand(dS).T, Q)
                grads["dv"][of_keys] += multiply(operand(P).T, dO)
                sizes["|dq|"][of_rows] = scale * (size @ K.abs())
                sizes["|dk|"][of_keys] += scale * (size.T @ Q.abs())
                sizes["|dv|"][of_keys] += P.T @ dO.abs()
                apart = operand(dS) * (torch.arange(end)[None, :] != torch.tensor(rows)[:, None])
                row_sums[rows.start : rows.stop] += apart.sum(-1)
                row_sizes[rows.start : rows.stop] += size.sum(-1)
                column_sums[:end] += apart.sum(0)
            if do is not None or dlse is not None:
                dlog_f = (row_sums - column_sums).flip(0).cumsum(0).flip(0)
                dlog_f[:1] = 0
                grads["dlog_f"][at.batch, at.keys, h] = dlog_f
                sizes["|dlog_f|"][at.batch, at.keys, h] = row_sizes
    if exact:
        out = {"o": o, "lse": lse, "|lse|": lse_size}
        return out | (grads | sizes if do is not None or dlse is not None else {})
    out = {"o": o.to(q.dtype), "lse": lse}
    if do is None and dlse is None:
        return out
    like = {"dq": q, "dk": k, "dv": v, "dlog_f": log_f}
    return out | {name: value.to(like[name].dtype) for name, value in grads.items()}
