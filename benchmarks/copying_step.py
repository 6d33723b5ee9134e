#!/usr/bin/env python3
"""A training step of the copying task's model, beside the same model with torch's loop over time.

    python benchmarks/copying_step.py --out benchmarks/results/copying_step_h200.json

The model, the batch and the optimiser are those of `tidegate train copying --recipe copying`:
forward, backward and update lie in one CUDA graph for both, so that no host time counts. The other
model differs in one thing: `hgru` is a loop of torch ops, h_t = g_t h_{t-1} + (1 - g_t) x_t, that
autograd differentiates. Loss and gradients of the two are compared before anything is timed; they
take turns, medians. --precision tells torch how to multiply fp32 matrices.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import harness
import torch
from torch import Tensor

import tidegate
from tidegate.models import CausalLM, LMConfig
from tidegate.nn import gated_linear_rnn
from tidegate.training import TrainConfig, make_task, recipes
from tidegate.training.task_corpus import TaskCorpus

RECIPE = recipes()["copying"]
TOLERANCE = 1e-4  # of the loss and of every gradient, by norm; fp32


def loop(
    x: Tensor, f: Tensor, gamma: None, theta: None, state: None, **options: object
) -> tuple[Tensor, Tensor]:
    """`hgru` as the model calls it, a token at a time: x and f ``[B, T, D]``."""
    assert (gamma, theta, state) == (None, None, None)
    assert options == {"activation": "none", "cu_seqlens": None}
    h, out = torch.zeros_like(x[:, 0]), []
    for entering, gate in zip(x.unbind(1), torch.sigmoid(f).unbind(1), strict=True):
        h = torch.lerp(entering, h, gate)
        out.append(h)
    return torch.stack(out, 1), h


class Step:
    """The recipe's model on one batch; calling it trains one step."""

    def __init__(
        self, dummies: int, batch: int, device: torch.device, recurrence: Callable
    ) -> None:
        task = make_task("copying", {"dummies": dummies})
        torch.manual_seed(0)
        config = LMConfig(vocab_size=task.vocab_size, **RECIPE.model)
        self.model = CausalLM(config).to(device)
        self.batch = TaskCorpus(task).sampler(batch, task.length, seed=0, device=device).next()
        self.recurrence = recurrence
        self.optimizer = TrainConfig(data="copying", **RECIPE.train).make_optimizer(
            self.model, capturable=device.type == "cuda"
        )

    def backward(self) -> Tensor:
        """The loss; gradients are added."""
        with mock.patch.object(gated_linear_rnn.ops, "hgru", self.recurrence):
            loss = self.model(self.batch.ids, labels=self.batch.labels).loss
        loss.backward()
        return loss

    def gradients(self) -> list[Tensor]:
        """The loss and all gradients, which are cleared."""
        found = [self.backward().detach()]
        found += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return found

    def __call__(self) -> None:
        with torch.enable_grad():
            self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dummies", type=int, default=1000, help="the task's T")
    parser.add_argument("--batch", type=int, default=RECIPE.train["batch_size"])
    parser.add_argument("--precision", default="highest", choices=("highest", "high"))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each implementation")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each implementation")
    parser.add_argument("--commit", help="commit to record, where git cannot tell")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("copying_step: no CUDA device is visible; try --device cpu")
    device, begin = torch.device(options.device), time.perf_counter()
    ours = Step(options.dummies, options.batch, device, tidegate.ops.hgru)
    theirs = Step(options.dummies, options.batch, device, loop)
    pairs = zip(ours.gradients(), theirs.gradients(), strict=True)
    error = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)
    if not error <= TOLERANCE:
        raise RuntimeError(f"WRONG RESULT: relative error {error:.1e}")
    torch.set_float32_matmul_precision(options.precision)
    runners = {
        name: harness.make_runner([step], device)
        for name, step in (("tidegate", ours), ("torch loop", theirs))
    }
    times = harness.measure(runners, options.rounds, options.budget)
    results = {
        name: {"ms": round(1e-3 * harness.summary(seconds, 0)["us"], 3)}
        | {"timing": runners[name].timing}
        for name, seconds in times.items()
    }
    ratio = results["torch loop"]["ms"] / results["tidegate"]["ms"]
    record = {
        "kind": "copying_step",
        "date": harness.today(),
        "commit": harness.commit(options.commit),
        "machine": harness.describe_machine(device),
        "versions": {"torch": torch.__version__, "tidegate": tidegate.__version__},
        "float32_matmul_precision": options.precision,
        "model": RECIPE.model,
        "B": options.batch,
        "T": int(ours.batch.ids.size(1)),
        "error": float(f"{error:.2e}"),
        "results": results,
        "ratio": round(ratio, 2),
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    mine, loops = (results[name]["ms"] for name in ("tidegate", "torch loop"))
    print(
        f"training step B{record['B']} T{record['T']}: tidegate {mine:.2f} ms, "
        f"torch loop {loops:.2f} ms, x{ratio:.1f} (error {error:.0e}); "
        f"took {time.perf_counter() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
