#!/usr/bin/env python3
"""Relative error of the decays' gradient against float64, over length and gate, beside fla's.

    python benchmarks/gla_errors.py --out benchmarks/results/gla_errors_h200.json

B1 H16 K = V = 128, bf16 data and gates, an initial state and a gradient of the final one. Gates are
sigmoid(N(0, 1)), sigmoid(N(0, 1) - 5) and sigmoid(N(0, 1) + 5); keys are one minus them. The norm
of the error over the gradient's norm, over two of the heads: `dlog f` in bf16 and with gates in
fp32, hgrn2's gradient of the logits, and dlog f of fla.ops.gla.chunk_gla where that is installed.
float64 starts from the very same inputs. `--device cpu --tiny` goes the same way through short
sequences.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import float64
import harness
import torch
from gla_baselines import FlaGla
from scan_baselines import available_baselines
from torch import Tensor

import tidegate

SHIFTS = {"sigmoid(N)": 0.0, "sigmoid(N - 5)": -5.0, "sigmoid(N + 5)": 5.0}
LENGTHS = (1024, 2048, 4096, 8192, 16384)
HEADS, SIZE = 16, 128
SAMPLED = (0, -1)  # heads
AIM = 0.005  # of dlog f in bf16
AIMS = {"sigmoid(N)": 8e-4, "sigmoid(N - 5)": 5e-4, "sigmoid(N + 5)": 2.5e-3}  # with fp32 gates

ops = torch.ops.tidegate


class Case:
    """The inputs of one length and gate, and the gradients' float64 values on sampled heads."""

    def __init__(
        self, time: int, shift: float, heads: int, size: int, device: torch.device
    ) -> None:
        shape = (1, time, heads, size)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device)

        self.q, self.v, self.d_o = (draw(*shape).bfloat16() for _ in range(3))
        self.logit = (draw(*shape) + shift).bfloat16()
        self.log_f = torch.nn.functional.logsigmoid(self.logit.float())
        self.k = torch.sigmoid(-self.logit.float()).bfloat16()
        self.h0, self.dh_final = (draw(1, heads, size, size) for _ in range(2))

    def exact(self, log_f: Tensor | None) -> list[Tensor]:
        """dlog f, or without log_f the logits' gradient of hgrn2, [T, K] of each sampled head."""
        return [self._exact_head(head, log_f) for head in SAMPLED]

    def _exact_head(self, head: int, log_f: Tensor | None) -> Tensor:
        q, k, v, logit, d_o = (
            x[0, :, head].double() for x in (self.q, self.k, self.v, self.logit, self.d_o)
        )
        state, last = self.h0[0, head].double(), self.dh_final[0, head].double()
        with torch.enable_grad():
            if log_f is None:
                leaf = logit.requires_grad_()
                k, decays = torch.sigmoid(-leaf), torch.nn.functional.logsigmoid(leaf)
            else:
                leaf = decays = log_f[0, :, head].double().requires_grad_()
            results = float64.gated_linear_attention(q, k, v, decays, state)
        return torch.autograd.grad(results, leaf, (d_o, last))[0]

    def dlog_f(self, log_f: Tensor) -> Tensor:
        return ops.gated_linear_attention_backward(
            self.d_o, self.dh_final, self.q, self.k, self.v, log_f, self.h0, 1.0, False, None
        )[3]

    def dlogit(self) -> Tensor:
        return ops.hgrn2_backward(
            self.d_o, self.dh_final, self.q, self.logit, self.v, None, self.h0, 1.0, "none", "none",
            False, None,
        )[1]  # fmt: skip

    def dlog_f_of(self, fla: FlaGla, log_f: Tensor) -> Tensor:
        context = fla.forward((self.q, self.k, self.v, log_f), self.h0)[2]
        return fla.backward(context, self.d_o, self.dh_final)[3]


def error(found: Tensor, exact: Sequence[Tensor]) -> float:
    """The error of the sampled heads together; NaN is an infinite one."""
    pairs = [(found[0, :, head], wanted) for head, wanted in zip(SAMPLED, exact, strict=True)]
    return float64.distance(*(torch.stack(list(part)) for part in zip(*pairs, strict=True)))


def measure(case: Case, fla: FlaGla | None) -> dict[str, float]:
    """The error of each implementation's gradient of the decays, by its name."""
    narrow = case.log_f.bfloat16()
    exact = case.exact(narrow)
    found = {
        "tidegate": error(case.dlog_f(narrow), exact),
        "tidegate, fp32 gates": error(case.dlog_f(case.log_f), case.exact(case.log_f)),
        "tidegate hgrn2, logits": error(case.dlogit(), case.exact(None)),
    }
    if fla is not None:
        found["fla.chunk_gla"] = error(case.dlog_f_of(fla, narrow), exact)
    return {name: float(f"{value:.3e}") for name, value in found.items()}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="short sequences, few heads")
    parser.add_argument("--commit", help="commit to record, where git cannot tell")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gla_errors: no CUDA device is visible; --device cpu --tiny tries it")
    device = torch.device(options.device)
    torch.manual_seed(0)
    baselines, missing = available_baselines(device, {"fla": FlaGla})
    if "fla" in baselines:
        baselines["fla"].do_not_tune()
    versions = {"torch": torch.__version__, "tidegate": tidegate.__version__}
    rows: list[dict[str, object]] = []
    record = {
        "kind": "gla_errors",
        "date": harness.today(),
        "commit": harness.commit(options.commit),
        "machine": harness.describe_machine(device),
        "versions": versions | {name: baseline.version for name, baseline in baselines.items()},
        "missing": missing,
        "aim": AIM,
        "aims_fp32_gates": AIMS,
        "rows": rows,
    }
    lengths = (50, 130) if options.tiny else LENGTHS
    sizes = (2, 16) if options.tiny else (HEADS, SIZE)
    with torch.no_grad():
        for time, (name, shift) in product(reversed(lengths), SHIFTS.items()):
            errors = measure(Case(time, shift, *sizes, device), baselines.get("fla"))
            rows.append({"gate": name, "T": time, "errors": errors})
            cells = ", ".join(f"{who} {100 * e:.3g} %" for who, e in errors.items())
            print(f"{name:15} T {time:5}: {cells}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    worst = max(row["errors"]["tidegate"] for row in rows)
    print(f"dlog f, worst: {100 * worst:.3g} %, aim {100 * AIM:g} %")
    reached = worst <= AIM
    for name, aim in AIMS.items():
        of_gate = [row["errors"]["tidegate, fp32 gates"] for row in rows if row["gate"] == name]
        print(f"{name}, fp32 gates, worst: {100 * max(of_gate):.3g} %, aim {100 * aim:g} %")
        reached = reached and max(of_gate) <= aim
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())
