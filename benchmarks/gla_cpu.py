#!/usr/bin/env python3
"""gated_linear_attention on the CPU beside the same chunkwise maths in torch ops, compiled.

    python benchmarks/gla_cpu.py [--threads 2] [--rounds 15] [--json FILE]

fp32, B2 T1024 H4 K = V = 64, forward and backward. The torch version works on chunks: states are
carried from chunk to chunk, pairs inside one are matrix products. "dyadic" gives every pair the
nearest power-of-two boundary between its tokens as the reference of its decays, so that it is
exact for any gate, as the kernels are; "one reference" uses the chunk's middle for all pairs, which
is less work and overflows where gates shut. All are compiled by torch.compile; results and
gradients are held against float64 before anything is timed; implementations take turns, medians.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import harness
import torch
from cpu_turns import both_passes, error_against, in_turns
from torch import Tensor

import tidegate

SHAPE = {"B": 2, "T": 1024, "H": 4, "K": 64, "V": 64}
TOLERANCE = 1e-4  # of every result and gradient, relative, against float64


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, one_reference: bool) -> Tensor:
    """o from the pairs s <= t of each chunk; q, k, g [.., C, K], g summed over the chunk."""
    size = q.shape[-2]
    if one_reference:
        middle = g[..., size // 2 - 1 : size // 2, :]
        scores = (q * (g - middle).exp()) @ (k * (middle - g).exp()).transpose(-1, -2)
        return scores.tril() @ v
    out = (q * k).sum(-1, keepdim=True) * v
    half = size // 2
    while half:
        late, early = slice(half, None), slice(0, half)
        q2, k2, v2, g2 = (x.unflatten(-2, (-1, 2 * half)) for x in (q, k, v, g))
        border = g2[..., half - 1 : half, :]
        scores = (q2[..., late, :] * (g2[..., late, :] - border).exp()) @ (
            k2[..., early, :] * (border - g2[..., early, :]).exp()
        ).transpose(-1, -2)
        level = torch.nn.functional.pad(scores @ v2[..., early, :], (0, 0, half, 0))
        out = out + level.flatten(-3, -2)
        half //= 2
    return out


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, chunk: int, one_reference: bool
) -> Tensor:
    """o of gated linear attention, by chunks, in torch ops."""
    q, k, v, g = (x.transpose(1, 2).unflatten(2, (-1, chunk)) for x in (q, k, v, log_f))
    g = g.cumsum(-2)
    total = g[..., -1:, :]
    updates = (k * (total - g).exp()).transpose(-1, -2) @ v
    decays = total.exp().transpose(-1, -2)
    state, states = torch.zeros_like(updates[:, :, 0]), []
    for i in range(q.shape[2]):
        states.append(state)
        state = decays[:, :, i] * state + updates[:, :, i]
    out = (q * g.exp()) @ torch.stack(states, 2) + _within_chunks(q, k, v, g, one_reference)
    return out.flatten(2, 3).transpose(1, 2)


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor) -> Tensor:
    """The equations, token by token."""
    state, out = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]), []
    for t in range(q.shape[1]):
        state = log_f[:, t, :, :, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None]
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, 1)


def make_inputs() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    keys = [SHAPE[name] for name in "BTHK"]
    values = [SHAPE[name] for name in "BTHV"]
    log_f = torch.nn.functional.logsigmoid(torch.randn(keys) + 2)
    inputs = [torch.randn(keys), torch.randn(keys), torch.randn(values), log_f]
    return [x.requires_grad_() for x in inputs], torch.randn(values)


Implementation = Callable[..., Tensor]


def measure(implementations: dict[str, Implementation], rounds: int) -> dict[str, dict[str, float]]:
    inputs, d_o = make_inputs()
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = both_passes(recurrence, wide, d_o.double())
    figures: dict[str, dict[str, float]] = {}
    for name, implementation in implementations.items():
        error = error_against(exact, both_passes(implementation, inputs, d_o))
        if not error <= TOLERANCE:
            raise SystemExit(f"gla_cpu: {name} is wrong by {error:.1e}")
        figures[name] = {"error": error}
    calls = {name: partial(both_passes, f, inputs, d_o) for name, f in implementations.items()}
    for name, times in in_turns(calls, rounds).items():
        figures[name] |= {kind: times[kind] for kind in ("ms", "best_ms")}
    return figures


def all_implementations() -> dict[str, Implementation]:
    def compiled(chunk: int, one_reference: bool) -> Implementation:
        def function(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor) -> Tensor:
            return chunkwise(q, k, v, log_f, chunk, one_reference)

        return torch.compile(function, dynamic=False)

    return {
        "tidegate": lambda q, k, v, log_f: tidegate.ops.gated_linear_attention(q, k, v, log_f)[0],
        "torch, dyadic, chunks of 64": compiled(64, False),
        "torch, dyadic, chunks of 32": compiled(32, False),
        "torch, one reference, chunks of 32": compiled(32, True),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = measure(all_implementations(), options.rounds)
    ours = figures["tidegate"]["ms"]
    for name, figure in figures.items():
        figure["times"] = figure["ms"] / ours
        print(f"{name:36s} {figure['ms']:8.2f} ms  {figure['times']:5.2f}x", end="")
        print(f"  best {figure['best_ms']:8.2f} ms  error {figure['error']:.1e}")
    record = harness.cpu_record("gla_cpu", "gated_linear_attention", SHAPE, figures)
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
