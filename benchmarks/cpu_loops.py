#!/usr/bin/env python3
"""Each recurrent op on the CPU beside the same maths in torch ops, token by token.

    python benchmarks/cpu_loops.py [--threads 2] [--rounds 7] [--json FILE]

fp32, forward and backward. The loop is eager: its torch ops are those of one token, and autograd
records them. (torch.compile would unroll all tokens.) Results and gradients are held against the
loop in float64 before anything is timed. Both take turns; medians of the wall time and of the
processor time of all threads, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import harness
import torch
import torch.nn.functional as F
from cpu_turns import both_passes, error_against, in_turns
from torch import Tensor

from tidegate import ops

TOLERANCE = 1e-4  # of the result and of every gradient, relative in norm, against float64
SIZES = {"T": 512, "K": 32, "V": 32}
TINY = {"T": 12, "K": 4, "V": 4}


def linear_scan(x: Tensor, a: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    for x_t, a_t in tokens_of(x, a):
        h = a_t * h + x_t
        out.append(h)
    return torch.stack(out, 1)


def tokens_of(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Token by token; unbind's gradient is one stack, indexing's would be T tensors of T tokens."""
    return zip(*(x.unbind(1) for x in tensors), strict=True)


def hgru(c: Tensor, f: Tensor) -> Tensor:
    decay, entering = torch.sigmoid(f), torch.sigmoid(-f) * F.silu(c)
    return linear_scan(entering, decay)


def lru_scan(x: Tensor, nu_log: Tensor, theta_log: Tensor, gamma_log: Tensor) -> Tensor:
    decay = torch.polar(torch.exp(-nu_log.exp()), theta_log.exp())
    entering = torch.complex(*x.chunk(2, -1)) * gamma_log.exp()
    h, out = torch.zeros_like(entering[:, 0]), []
    for x_t in entering.unbind(1):
        h = decay * h + x_t
        out.append(h)
    h = torch.stack(out, 1)
    return torch.cat([h.real, h.imag], -1)


def wkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With the running maximum m, as every implementation that keeps its digits has."""
    y, z, out = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
    m = k[:, 0].detach() - 1e4
    for k_t, v_t in tokens_of(k, v):
        bonus = u + k_t
        top = torch.maximum(m, bonus)
        past, now = torch.exp(m - top), torch.exp(bonus - top)
        out.append((past * y + now * v_t) / (past * z + now))
        top = torch.maximum(m - w, k_t)
        past, now = torch.exp(m - w - top), torch.exp(k_t - top)
        y, z, m = past * y + now * v_t, past * z + now, top
    return torch.stack(out, 1)


def gated_rnn(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    for z_t, x_t in tokens_of(z, x):
        gate = torch.sigmoid(z_t + h @ w.T)
        h = gate * h + (1 - gate) * x_t
        out.append(h)
    return torch.stack(out, 1)


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor) -> Tensor:
    state, out = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]), []
    for q_t, k_t, v_t, decay in tokens_of(q, k, v, log_f.exp()):
        state = decay[..., None] * state + k_t[..., None] * v_t[..., None, :]
        out.append((q_t[..., None] * state).sum(-2))
    return torch.stack(out, 1)


def hgrn2(q: Tensor, f: Tensor, v: Tensor) -> Tensor:
    return gated_linear_attention(q, torch.sigmoid(-f), v, F.logsigmoid(f))


class Work(NamedTuple):
    """A call: the loop, which has the op's name, and what it is called with."""

    loop: Callable[..., Tensor]
    shape: dict[str, int]
    make: Callable[..., tuple[Tensor, ...]]

    def name(self) -> str:
        return f"{self.loop.__name__} fp32 " + " ".join(f"{k}{v}" for k, v in self.shape.items())


def _parameters(d: int) -> tuple[Tensor, Tensor, Tensor]:
    """nu_log, theta_log, gamma_log of a ring from 0.9 to 0.999."""
    r = 0.9 + 0.099 * torch.rand(d)
    return (-r.log()).log(), (6.28 * torch.rand(d)).log(), 0.5 * torch.log1p(-(r**2))


def works(sizes: dict[str, int], width: int, batch: int) -> list[Work]:
    """The calls at `width` channels, heads for those that have some."""
    time = sizes["T"]
    flat = {"B": batch, "T": time, "D": width}
    heads = {"B": batch, "T": time, "H": max(width // sizes["K"] // 2, 1)}
    heads |= {name: sizes[name] for name in "KV"}

    def tokens(*widths: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(batch, time, w) for w in widths)

    def in_heads() -> tuple[Tensor, ...]:
        shape = [heads[name] for name in "BTHK"]
        return tuple(torch.randn(shape) for _ in range(3))

    def rnn(d: int, rows: int) -> Work:
        shape = {"B": rows, "T": time, "D": d}
        return Work(
            gated_rnn,
            shape,
            lambda: (*torch.randn(2, rows, time, d).unbind(0), torch.randn(d, d) / d**0.5),
        )

    both = (width, width)
    return [
        Work(linear_scan, flat, lambda: (tokens(width)[0], torch.rand(batch, time, width))),
        Work(hgru, flat, lambda: tokens(*both)),
        Work(lru_scan, flat, lambda: (*tokens(2 * width), *_parameters(width))),
        Work(wkv4, flat, lambda: (torch.rand(width), torch.randn(width), *tokens(*both))),
        rnn(width // 2, 4 * batch),
        rnn(2 * width, 4 * batch),
        Work(hgrn2, heads, in_heads),
        Work(
            gated_linear_attention,
            heads,
            lambda: (*in_heads(), F.logsigmoid(torch.randn([heads[n] for n in "BTHK"]) + 2)),
        ),
    ]


def measure(work: Work, rounds: int) -> dict[str, object]:
    """Milliseconds and errors of the op and of the loop, in turns."""
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in work.make()]
    op = getattr(ops, work.loop.__name__)
    implementations = {"tidegate": lambda *given: op(*given)[0], "loop": work.loop}
    wide = [x.detach().double().requires_grad_() for x in inputs]
    dy = torch.randn_like(work.loop(*wide))
    exact = both_passes(work.loop, wide, dy)
    dy = dy.float()
    results: dict[str, dict[str, float]] = {}
    for name, function in implementations.items():
        error = error_against(exact, both_passes(function, inputs, dy))
        if not error <= TOLERANCE:
            raise SystemExit(f"cpu_loops: {name} of {work.name()} is wrong by {error:.1e}")
        results[name] = {"error": error}
    calls = {name: partial(both_passes, f, inputs, dy) for name, f in implementations.items()}
    for name, times in in_turns(calls, rounds).items():
        results[name] |= {kind: times[kind] for kind in ("ms", "cpu_ms")}
    return {"work": work.name(), "results": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--tiny", action="store_true", help="small shapes: tries this script out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = (TINY, 8, 2) if options.tiny else (SIZES, 256, 4)
    rows = []
    for work in works(*shapes):
        rows.append(measure(work, options.rounds))
        ours, loop = rows[-1]["results"].values()
        print(
            f"{work.name():52s} {ours['ms']:8.2f} ms  loop {loop['ms']:8.1f} ms  "
            f"{loop['ms'] / ours['ms']:6.1f}x  processor {loop['cpu_ms'] / ours['cpu_ms']:6.1f}x",
            flush=True,
        )
    record = harness.cpu_record("cpu_loops", "recurrences", {}, rows)
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
