#!/usr/bin/env python3
"""norm, add_norm and glu, forward and backward, beside a copy of as many bytes and torch's ops.

    python benchmarks/norms.py --out benchmarks/results/norms_h100.json
    python benchmarks/norms.py --device cpu

The copy moves in one `copy_` what the op has to read and write (weights and their gradients are
small beside that), captured and timed like the op (harness.py): a percentage is the copy's time
over the op's. Results are held against tidegate.reference in float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import harness
import torch
from torch import Tensor

import tidegate
from tidegate import reference

SHAPES = {"cuda": [(16384, 1536), (32768, 1024)], "cpu": [(2048, 1536), (4096, 1024)]}
HEAD = 128


class Form(NamedTuple):
    """One way to call an op. forward and backward: bytes an element of a row."""

    name: str
    forward: int
    backward: int
    stream: torch.dtype | None = None  # None: the data's
    options: dict | None = None


def forms(size: int) -> list[Form]:
    """`size`: bytes of one number."""
    layer, gate = {"kind": "layer"}, {"gate": True}
    wide = 8 if size == 2 else 4 * size
    return [
        Form("norm rms", 2 * size, 3 * size),
        Form("norm layer", 2 * size, 3 * size, options=layer),
        Form("norm heads", 2 * size, 3 * size, options={"heads": True}),
        Form("norm silu after", 3 * size, 5 * size, options=gate),
        Form("norm sigmoid first", 3 * size, 5 * size, options={"first": True, **gate, **layer}),
        Form("add_norm", 4 * size, 4 * size),
        Form("add_norm fp32", 2 * size + wide, 2 * size + wide + 4, torch.float32),
        Form("glu silu", 3 * size, 5 * size),
    ]


class Inputs:
    """What one call reads."""

    def __init__(self, form: Form, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
        def draw(*size: int, like: torch.dtype = dtype) -> Tensor:
            return torch.randn(size, device=device).to(like)

        stream = form.stream or dtype
        given = form.options or {}
        rows, width = shape
        self.rows = (rows, width // HEAD, HEAD) if given.get("heads") else shape
        self.x = draw(rows, 2 * width) if form.name.startswith("glu") else draw(*self.rows)
        self.residual = draw(*self.rows, like=stream)
        self.dy, self.dsum = draw(*self.rows), draw(*self.rows, like=stream)
        self.weight = 1 + draw(*self.rows[1:], like=torch.float32)
        self.bias = draw(width, like=torch.float32) if given.get("kind") == "layer" else None
        self.gate = draw(*self.rows) if given.get("gate") else None
        self.kind = given.get("kind", "rms")
        self.first = given.get("first", False)
        self.act = "sigmoid" if self.first else "silu"


def calls(form: Form, t: Inputs) -> tuple[Callable[[], object], Callable[[], object]]:
    """The op and its backward op, as autograd calls them."""
    ops = torch.ops.tidegate
    if form.name.startswith("glu"):
        return lambda: ops.glu(t.x), lambda: ops.glu_backward(t.dy, t.x, "silu")
    if form.name.startswith("add_norm"):
        _, total = ops.add_norm(t.x, t.residual, t.weight, t.bias, t.kind)
        return (
            lambda: ops.add_norm(t.x, t.residual, t.weight, t.bias, t.kind),
            lambda: ops.add_norm_backward(t.dy, t.dsum, total, t.weight, t.bias, t.kind, 1e-5),
        )
    how = (t.weight, t.bias, t.gate, t.kind, t.act, t.first, 1e-5)
    return lambda: ops.norm(t.x, *how), lambda: ops.norm_backward(t.dy, t.x, *how)


def check(form: Form, t: Inputs) -> float:
    """The largest relative error of results and gradients against the reference in float64."""
    wide = {k: v.double().requires_grad_() for k, v in vars(t).items() if isinstance(v, Tensor)}
    named = [wide["x"]]
    if form.name.startswith("glu"):
        results = (reference.glu(wide["x"]),)
    elif form.name.startswith("add_norm"):
        results = reference.add_norm(
            wide["x"], wide["residual"], wide["weight"], wide.get("bias"), kind=t.kind
        )
        named = [wide["x"], wide["residual"], wide["weight"]]
    else:
        results = (
            reference.norm(
                wide["x"], wide["weight"], wide.get("bias"), wide.get("gate"), kind=t.kind,
                gate_activation=t.act, gate_first=t.first,
            ),
        )  # fmt: skip
        named += [wide["weight"]]
    losses = [wide["dy"], wide["dsum"]][: len(results)]
    grads = torch.autograd.grad(results, named, losses)
    forward, backward = (call() for call in calls(form, t))
    found = forward if isinstance(forward, tuple) else (forward,)
    of_op = backward if isinstance(backward, tuple) else (backward,)
    of_op = [g for g in of_op if g.numel()][-len(named) :] if len(results) > 1 else of_op
    pairs = [*zip(found, results, strict=True), *zip(of_op, grads, strict=False)]
    pairs = [(a.double(), b.detach()) for a, b in pairs if a.shape == b.shape]
    return max(
        float((a.double() - b.detach()).norm() / b.detach().norm())
        for a, b in pairs
        if a.shape == b.shape
    )


def measure(form: Form, shape: tuple[int, int], dtype: torch.dtype, device: str) -> dict:
    """Microseconds of each direction and of its copy, and the copy's share of the op's time."""
    target = torch.device(device)
    row: dict[str, object] = {"op": form.name, "rows": shape[0], "width": shape[1]}
    row["error"] = check(form, Inputs(form, (256, shape[1]), dtype, device))
    assert row["error"] < (0.01 if dtype == torch.bfloat16 else 1e-5), row
    for i, direction in enumerate(("forward", "backward")):
        moved = shape[0] * shape[1] * (form.forward, form.backward)[i]
        sets = min(6, harness.sets_needed(moved, target, tiny=False))
        given = [Inputs(form, shape, dtype, device) for _ in range(sets)]
        halves = [torch.empty(2, moved // 2, dtype=torch.uint8, device=device) for _ in given]
        runners = {
            "op": harness.make_runner([calls(form, t)[i] for t in given], target),
            "copy": harness.make_runner([lambda h=h: h[1].copy_(h[0]) for h in halves], target),
        }
        times = harness.measure(runners, rounds=5, budget=0.1)
        op, copy = (harness.summary(times[name], moved) for name in ("op", "copy"))
        row[direction] = {"op": op, "copy": copy, "share": round(copy["us"] / op["us"], 3)}
        harness.free(runners)
        del given, halves
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="forms whose names contain this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    rows = []
    for shape in SHAPES[arguments.device]:
        for form in forms(dtype.itemsize):
            if arguments.only in form.name:
                row = measure(form, shape, dtype, arguments.device)
                rows.append(row)
                parts = (
                    f"{d[:3]} {row[d]['op']['us']:7.1f} us {row[d]['share']:4.0%}"
                    for d in ("forward", "backward")
                )
                print(f"{form.name:19} {shape[0]}x{shape[1]}", *parts, f"{row['error']:.1e}")
    if arguments.out:
        record = {
            "kind": "norms",
            "dtype": str(dtype).removeprefix("torch."),
            "machine": harness.describe_machine(torch.device(arguments.device)),
            "versions": {"torch": torch.__version__, "tidegate": tidegate.__version__},
            "commit": harness.commit(),
            "date": harness.today(),
            "results": rows,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
