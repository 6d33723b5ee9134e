"""Gated linear attention in chunks of tokens by torch ops, with bf16 operands in its products.

What tensor cores compute for 16-bit data: every operand of a matrix product is rounded to bf16, the
products are added up in float32, and states are kept in float32, taken over 16 tokens at a time;
the gradients are those of chunks of 64 tokens between two states. Its error is what that form costs
in that precision. As in `gla_oracle`, the equations are the only source:

    S' = diag(total) S + (suf k)^T v             o = (pre q) S + A v
    A_ts = sum_K q_t P(t, s) k_s, s <= t         P(t, s): the product of the decays after s up to t
    pre_t = P(t, before the chunk),  suf_s = P(end, s),  total = P(end, before the chunk)

A pair of tokens refers its decays to the boundary between the two neighbouring runs of 1, 2, 4 ..
tokens that part it, so that both factors are at most one; the pairs of neighbours are multiplied in
float32, and so are their gradients. The adjoint adds up, for a decay, what passes it
(docs/numerics_ops.md); it divides by none. Decays of logarithms are powers of two, of the logarithm
times log2(e), as torch finds them on the device that is judged: CUDA's are off by nearly as much,
in one direction, for all numbers in some range, and so is the product of 60 of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from support.recurrence import token_order

# Tokens that a state is taken over at once, and those between two states of a gradient.
SUB_CHUNK, CHUNK = 16, 64


def exp(x: Tensor) -> Tensor:
    """2 to the power of x log2(e), as torch computes it on the GPU where there is one."""
    on_device = x.cuda() if torch.cuda.is_available() else x
    return (on_device * math.log2(math.e)).exp2().to(x.device)


def _operand(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _operand(a) @ _operand(b)


class _Level(NamedTuple):
    """Pairs of tokens that the boundary between two neighbouring runs of `size` parts."""

    size: int
    parted: Tensor  # [t, s]
    into: Tensor  # [N, H, t, K]: the decays from the start of t's run up to t
    out: Tensor  # [N, H, s, K]: those after s to the end of its run


class _Chunk(NamedTuple):
    """The tokens of a chunk, all heads, in the order of the scan: [N, H, tokens, ..]."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    d_o: Tensor
    between: Tensor  # [N, H, t, s, K]: P(t, s), one above the diagonal

    @staticmethod
    def of(steps: list[int], *tensors: Tensor) -> _Chunk:
        """Takes the chunk out of q, k, v, f and do, each [B, T, H, ..]."""
        q, k, v, f, d_o = (x[:, steps].transpose(1, 2) for x in tensors)
        rows = [torch.ones_like(f)]
        for t in range(1, len(steps)):
            earlier = (torch.arange(len(steps)) < t)[:, None]
            rows.append(torch.where(earlier, rows[-1] * f[..., t : t + 1, :], 1.0))
        return _Chunk(q, k, v, f, d_o, torch.stack(rows, 2))

    @property
    def pre(self) -> Tensor:
        return self.between[..., 0, :] * self.f[..., :1, :]

    @property
    def suf(self) -> Tensor:
        return self.between[..., -1, :, :]

    @property
    def total(self) -> Tensor:
        """[N, H, K, 1]."""
        return self.pre[..., -1, :, None]

    def levels(self) -> Iterator[_Level]:
        at = torch.arange(self.q.shape[-2])
        size = 1
        while size < len(at):
            run = at // size
            start, end = run * size, ((run + 1) * size - 1).clamp(max=len(at) - 1)
            into = self.between[..., at, (start - 1).clamp(min=0), :]
            parted = (run[:, None] == run + 1) & (run % 2 == 0)
            yield _Level(size, parted, into, self.between[..., end, at, :])
            size *= 2

    def scores(self) -> Tensor:
        """A, [N, H, t, s], zero above the diagonal."""
        scores = torch.diag_embed((self.q * self.k).sum(-1))
        for level in self.levels():
            q, k = self.q * level.into, self.k * level.out
            found = q @ k.mT if level.size == 1 else _product(q, k.mT)
            scores = torch.where(level.parted, found, scores)
        return scores

    def pairs(self) -> tuple[Tensor, Tensor]:
        """q_t P(t, s) and P(t, s) k_s, [N, H, t, s, K], one factor of them an operand."""
        q, k = self.q.unsqueeze(-2), self.k.unsqueeze(-3)
        queries, keys = q * self.between, self.between * k
        for level in self.levels():
            if level.size > 1:
                into, out = level.into.unsqueeze(-2), level.out.unsqueeze(-3)
                parted = level.parted.unsqueeze(-1)
                queries = torch.where(parted, _operand(q * into) * out, queries)
                keys = torch.where(parted, into * _operand(out * k), keys)
        return queries, keys


def _forward(c: _Chunk, state: Tensor) -> tuple[Tensor, Tensor]:
    """o, and the state after the chunk."""
    out = _product(c.pre * c.q, state) + _product(c.scores(), c.v)
    return out, c.total * state + _product((c.suf * c.k).mT, c.v)


def _before(c: _Chunk, grad: Tensor) -> Tensor:
    """The gradient of the state before the chunk, from that of the state after it."""
    return c.total * grad + _product((c.pre * c.q).mT, c.d_o)


def _gradients(c: _Chunk, state: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """dq, dk, dv and df, from the state before the chunk and the gradient of that after it."""
    of_scores = _product(c.d_o, c.v.mT).tril()
    run = torch.arange(c.q.shape[-2]) // 2
    of_scores = torch.where(run[:, None] == run, of_scores, _operand(of_scores))
    from_state, from_grad = _product(c.d_o, state.mT), _product(c.v, grad.mT)
    queries, keys = c.pairs()
    dq = c.pre * from_state + (of_scores.unsqueeze(-1) * keys).sum(-2)
    dk = c.suf * from_grad + (of_scores.unsqueeze(-1) * queries).sum(-3)
    dv = _product(c.suf * c.k, grad) + _product(c.scores().mT, c.d_o)

    through = (_operand(state) * _operand(grad)).sum(-1)
    df, ones = [], torch.ones_like(through)
    for u in range(c.q.shape[-2]):
        into = c.pre[..., u - 1, :] if u else ones  # from before the chunk up to u
        # By their sinks: what meets a query from u on; by their sources: keys before u.
        later, earlier = queries[..., u:, u, :], keys[..., u - 1, :u, :]
        sinks = (later * from_state[..., u:, :]).sum(-2)
        sources = (earlier * from_grad[..., :u, :]).sum(-2)
        pairs = torch.einsum("...tk,...ts,...sk->...k", later, of_scores[..., u:, :u], earlier)
        df.append(into * (sinks + c.suf[..., u, :] * through) + c.suf[..., u, :] * sources + pairs)
    return dq, dk, dv, torch.stack(df, -2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    initial: Tensor,
    d_o: Tensor | None,
    dh_final: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
) -> dict[str, Tensor]:
    """h, final and, where there is a loss, dq, dk, dv, df and dh0, for unit scale."""
    backward = dh_final is not None
    loss = torch.zeros_like(v) if d_o is None else d_o
    found = {"h": torch.zeros_like(v), "final": torch.empty_like(initial)}
    if backward:
        found |= {
            f"d{name}": torch.zeros_like(x) for name, x in zip("qkvf", (q, k, v, f), strict=True)
        }
        found["dh0"] = torch.empty_like(initial)
    inputs = (q, k, v, f, loss)
    for order in token_order(q.shape[1], cu_seqlens, reverse):
        pieces = [(at, _Chunk.of(at, *inputs)) for at in _pieces(order.steps, SUB_CHUNK)]
        states = [initial[order.rows]]
        for at, piece in pieces:
            out, after = _forward(piece, states[-1])
            found["h"][:, at] = out.transpose(1, 2)
            states.append(after)
        found["final"][order.rows] = states[-1]
        if not backward:
            continue
        grads = [dh_final[order.rows]]
        for _, piece in reversed(pieces):
            grads.append(_before(piece, grads[-1]))
        found["dh0"][order.rows] = grads[-1]
        grads.reverse()
        for i, at in enumerate(_pieces(order.steps, CHUNK)):
            first = i * CHUNK // SUB_CHUNK
            last = min(first + CHUNK // SUB_CHUNK, len(pieces))
            values = _gradients(_Chunk.of(at, *inputs), states[first], grads[last])
            for name, value in zip("qkvf", values, strict=True):
                found[f"d{name}"][:, at] = value.transpose(1, 2)
    return found


def _pieces(steps: range, size: int) -> list[list[int]]:
    return [list(steps[at : at + size]) for at in range(0, len(steps), size)]
