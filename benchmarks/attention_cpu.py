#!/usr/bin/env python3
"""forgetting_attention on the CPU beside SDPA with the gate as a bias matrix.

    python benchmarks/attention_cpu.py [--threads 2] [--rounds 15] [--json FILE]

fp32, B1 T2048 H4 D64, forward and backward. torch's attention takes gates as a matrix of c_i - c_j,
minus infinity above the diagonal. "bias given": made beforehand, untimed, without a gradient to
log f, which is the only way to SDPA's own CPU kernel. "bias from log f": the matrix is made from
log f and differentiated, as training needs it. "no gate": is_causal, another function.

Results are held against float64 before anything is timed; implementations take turns in one
process: wall time and the processor time of all threads, medians and fastest rounds. Memory is the
growth of the resident set at its peak during one pass forward and backward, the matrix included,
each implementation in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import float64
import harness
import torch
import torch.nn.functional as F
from cpu_turns import in_turns
from torch import Tensor

import tidegate

SHAPE = {"B": 1, "T": 2048, "H": 4, "D": 64}
TINY = {"B": 2, "T": 70, "H": 2, "D": 16}
TOLERANCE = 1e-4  # of o and every gradient, relative, against float64


class Inputs(NamedTuple):
    """What one pass reads: q, k, v and do [B, T, H, D], log f [B, T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_f: Tensor
    d_o: Tensor


def make_inputs(shape: dict[str, int]) -> Inputs:
    torch.manual_seed(0)
    q, k, v, d_o = (torch.randn([shape[name] for name in "BTHD"]) for _ in range(4))
    log_f = F.logsigmoid(torch.randn([shape[name] for name in "BTH"]) + 4)
    return Inputs(*(x.requires_grad_() for x in (q, k, v, log_f)), d_o)


def bias_of(log_f: Tensor) -> Tensor:
    """[B, H, T, T]: c_i - c_j, minus infinity where j > i."""
    c = log_f.transpose(1, 2).cumsum(-1)
    later = torch.ones(c.shape[-1], c.shape[-1], dtype=torch.bool).triu(1)
    return (c[..., :, None] - c[..., None, :]).masked_fill_(later, -torch.inf)


def sdpa(inputs: Inputs, bias: Tensor | None) -> Tensor:
    """torch's attention, causal when there is no bias."""
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None).transpose(1, 2)


class Implementation(NamedTuple):
    """A forward pass, after something that is not timed; which inputs have gradients."""

    forward: Callable[[Inputs, Tensor | None], Tensor]
    prepare: Callable[[Inputs], Tensor | None] = lambda inputs: None
    gradients: int = 4
    gated: bool = True

    def run(self, inputs: Inputs, prepared: Tensor | None) -> list[Tensor]:
        """o and the gradients."""
        o = self.forward(inputs, prepared)
        return [o, *torch.autograd.grad(o, inputs[: self.gradients], inputs.d_o)]


IMPLEMENTATIONS = {
    "tidegate": Implementation(lambda x, _: tidegate.ops.forgetting_attention(*x[:4])),
    "SDPA, bias given": Implementation(sdpa, lambda x: bias_of(x.log_f.detach()), gradients=3),
    "SDPA, bias from log f": Implementation(lambda x, _: sdpa(x, bias_of(x.log_f))),
    "SDPA, no gate": Implementation(sdpa, gradients=3, gated=False),
}


def error_of(found: list[Tensor], inputs: Inputs, gated: bool) -> float:
    """The largest relative error in norm, over all heads."""
    errors = []
    for b in range(inputs.q.shape[0]):
        for h in range(inputs.q.shape[2]):
            q, k, v, log_f, d_o = (x.detach()[b, :, h].double() for x in inputs)
            gates = log_f if gated else torch.zeros_like(log_f)
            exact = float64.forgetting_attention(q, k, v, gates, d_o)
            pairs = zip(found, exact, strict=False)
            errors += [float64.distance(one.detach()[b, :, h], same) for one, same in pairs]
    return max(errors)


def measure(shape: dict[str, int], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds and errors; implementations take turns."""
    inputs = make_inputs(shape)
    figures: dict[str, dict[str, float]] = {}
    prepared = {
        name: implementation.prepare(inputs) for name, implementation in IMPLEMENTATIONS.items()
    }
    for name, implementation in IMPLEMENTATIONS.items():
        error = error_of(implementation.run(inputs, prepared[name]), inputs, implementation.gated)
        if not error <= TOLERANCE:
            raise SystemExit(f"attention_cpu: {name} is wrong by {error:.1e}")
        figures[name] = {"error": error}
    calls = {name: partial(c.run, inputs, prepared[name]) for name, c in IMPLEMENTATIONS.items()}
    for name, times in in_turns(calls, rounds).items():
        figures[name] |= times
    return figures


# ---- memory ----


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"attention_cpu: no {field} in /proc/self/status")


def grown(shape: dict[str, int], name: str) -> int:
    """Bytes that one pass adds at its peak; a child process calls this."""
    implementation = IMPLEMENTATIONS[name]
    small = make_inputs(TINY)
    implementation.run(small, implementation.prepare(small))  # threads and code
    inputs = make_inputs(shape)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts here
    before = resident("VmRSS")
    implementation.run(inputs, implementation.prepare(inputs))
    return resident("VmHWM") - before


def memory_of(name: str, options: argparse.Namespace) -> int:
    """`grown` in a process whose freed memory goes back to the system at once."""
    command = [sys.executable, __file__, "--memory-of", name, "--threads", str(options.threads)]
    result = subprocess.run(
        command + (["--tiny"] if options.tiny else []),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"},
    )
    return int(result.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--tiny", action="store_true", help="a small shape: tries this script out")
    parser.add_argument("--memory-of", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = TINY if options.tiny else SHAPE
    if options.memory_of:
        print(grown(shape, options.memory_of))
        return 0
    figures = measure(shape, options.rounds)
    numbers = shape["B"] * shape["T"] * shape["H"] * shape["D"]
    for name, figure in figures.items():
        figure["peak_bytes"] = memory_of(name, options)
        results = 4 * (
            numbers * 4 + (numbers // shape["D"]) * (IMPLEMENTATIONS[name].gradients == 4)
        )
        figure["beside_bytes"] = figure["peak_bytes"] - results  # beside o and the gradients
        print(
            f"{name:24s} {figure['ms']:8.2f} ms  best {figure['best_ms']:8.2f} ms  processor "
            f"{figure['cpu_ms']:8.2f} ms  error {figure['error']:.1e}  peak "
            f"{figure['peak_bytes'] / 2**20:.1f} MiB, beside results "
            f"{figure['beside_bytes'] / 2**20:.1f} MiB"
        )
    record = harness.cpu_record("attention_cpu", "forgetting_attention", shape, figures)
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
