#!/usr/bin/env python3
"""gated_rnn, forward and backward, beside cuDNN's GRU and the same maths as a loop of torch ops.

    python benchmarks/gated_rnn.py --out benchmarks/results/gated_rnn_h200.json
    python benchmarks/gated_rnn.py --device cpu --threads 2

One call is a forward and a backward pass with all gradients, that of the matrix included. The loop
is torch's autograd over T steps, captured whole in a CUDA graph: no host time counts for it, as for
nobody here (harness.py). The GRU of the same width multiplies its state by three such matrices a
step, and its input by three more. Results and gradients are held against the loop in float64 before
anything is timed; implementations take turns, medians.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import harness
import torch
from torch import Tensor

import tidegate

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
Gradients = tuple[Tensor, ...]  # h, then of z, x and the matrix


class Work(NamedTuple):
    """One piece of work; goal: milliseconds."""

    batch: int
    time: int
    width: int
    dtype: torch.dtype
    goal: float | None = None

    def __str__(self) -> str:
        dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype]
        return f"gated_rnn {dtype} B{self.batch} T{self.time} D{self.width}"


DTYPES = (torch.float32, torch.bfloat16)
CUDA = [
    Work(64, 1024, width, dtype, goal)
    for width, goal in ((128, 2.0), (256, None), (512, 6.0), (1024, None))
    for dtype in DTYPES
]
CPU = [Work(32, 256, width, torch.float32) for width in (64, 128, 256)]
TINY = [Work(3, 9, 24, dtype) for dtype in DTYPES]


class Inputs:
    """What all implementations read."""

    def __init__(self, work: Work, device: torch.device) -> None:
        shape = (work.batch, work.time, work.width)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, device=device).to(work.dtype)

        self.z, self.x, self.dh = draw(*shape), draw(*shape), draw(*shape)
        self.w = (torch.randn(work.width, work.width, device=device) / work.width**0.5).to(
            work.dtype
        )


def ours(inputs: Inputs) -> Gradients:
    """The ops that autograd calls."""
    ops = torch.ops.tidegate
    z, x, w = inputs.z, inputs.x, inputs.w
    h, _, logits = ops.gated_rnn_with_logits(z, x, w, None, None)
    dz, dx, dw, *_ = ops.gated_rnn_backward(inputs.dh, None, x, w, logits, h, None, z.dtype, None)
    return h, dz, dx, dw


def loop(inputs: Inputs, dtype: torch.dtype | None = None) -> Gradients:
    """gated_rnn's equations in torch ops, a token at a time; autograd differentiates them."""
    with torch.enable_grad():
        z, x, w = (
            t.to(dtype or t.dtype).detach().requires_grad_() for t in (inputs.z, inputs.x, inputs.w)
        )
        state, out = z.new_zeros(z.size(0), z.size(2)), []
        turned = w.t()
        for from_x, entering in zip(z.unbind(1), x.unbind(1), strict=True):
            gate = torch.sigmoid(torch.addmm(from_x, state, turned))
            state = torch.lerp(entering, state, gate)
            out.append(state)
        h = torch.stack(out, 1)
        return (h.detach(), *torch.autograd.grad(h, (z, x, w), inputs.dh.to(h.dtype)))


def gru(inputs: Inputs) -> Callable[[], object]:
    """torch.nn.GRU, which is cuDNN's."""
    width = inputs.x.size(2)
    module = torch.nn.GRU(width, width, batch_first=True, device=inputs.x.device)
    module = module.to(inputs.x.dtype)
    module.flatten_parameters()  # else cuDNN copies them at every call
    x = inputs.x.detach().requires_grad_()

    def call() -> object:
        with torch.enable_grad():
            h, _ = module(x)
            return torch.autograd.grad(h, [x, *module.parameters()], inputs.dh)

    return call


def error_of(found: Gradients, expected: Gradients) -> float:
    """The largest relative error; NaN where one is not a number."""
    pairs = zip(found, expected, strict=True)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
    return max(errors) if all(e == e for e in errors) else float("nan")


def measure(work: Work, device: torch.device, options: argparse.Namespace) -> dict[str, object]:
    """One row. RuntimeError when tidegate's results are wrong."""
    torch.manual_seed(0)
    inputs = Inputs(work, device)
    error = error_of(ours(inputs), loop(inputs, torch.float64))
    if not error <= TOLERANCE[work.dtype]:
        raise RuntimeError(f"WRONG RESULT: {work}: relative error {error:.1e}")
    calls: dict[str, Callable[[], object]] = {
        "tidegate": lambda: ours(inputs),
        "torch loop": lambda: loop(inputs),
    }
    if device.type == "cuda":
        calls["cuDNN GRU"] = gru(inputs)
    runners = {name: harness.make_runner([call], device) for name, call in calls.items()}
    times = harness.measure(runners, options.rounds, options.budget)
    results = {
        name: {"ms": round(1e-3 * harness.summary(seconds, 0)["us"], 3)}
        | {"timing": runners[name].timing}
        for name, seconds in times.items()
    }
    harness.free(runners)
    mine = results["tidegate"]["ms"]
    line = f"{work}: tidegate {mine:.3f} ms (error {error:.0e})"
    for name, result in results.items():
        if name != "tidegate":
            line += f" | {name} {result['ms']:.2f} ms x{result['ms'] / mine:.1f}"
    if work.goal:
        line += f" | goal {work.goal:g} ms: {'ok' if mine <= work.goal else 'MISSED'}"
    print(line, flush=True)
    return {
        "B": work.batch,
        "T": work.time,
        "D": work.width,
        "dtype": str(work.dtype).removeprefix("torch."),
        "goal_ms": work.goal,
        "error": float(f"{error:.2e}"),
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small shapes: tries this script out")
    parser.add_argument("--widths", nargs="+", type=int, help="these only")
    parser.add_argument("--threads", type=int, help="of torch, on the CPU")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each implementation")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for each implementation")
    parser.add_argument("--commit", help="commit to record, where git cannot tell")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gated_rnn: no CUDA device is visible; try --device cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    begin = time.perf_counter()
    works = TINY if options.tiny else CUDA if device.type == "cuda" else CPU
    works = [w for w in works if not options.widths or w.width in options.widths]
    rows = [measure(work, device, options) for work in works]
    record = {
        "kind": "gated_rnn",
        "date": harness.today(),
        "commit": harness.commit(options.commit),
        "machine": harness.describe_machine(device),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "tidegate": tidegate.__version__},
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "rows": rows,
    }
    if options.out:
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"took {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
