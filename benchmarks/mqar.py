#!/usr/bin/env python3
"""Associative recall by width: HGRN beside HGRN2 at equal width (HGRN2's paper, Figure 3).

    python benchmarks/mqar.py --json benchmarks/results/mqar_h200.json --plot docs/mqar.png

For every sequence length, mixer, width and learning rate a two-layer language model learns the task
`mqar` of `tidegate train`: token mixers with residuals and norms, no positions. Each process (so
many at a time as --processes says, over all GPUs in turn) trains one model; the best learning rate
of a width counts, as in the paper. The JSON holds every run, with device, versions and commit; the
plot is drawn from it. --limit-minutes bounds the whole sweep: runs that have not begun by then are
left out, and the JSON says so.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sweep
import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate.models import CausalLM, LMConfig
from tidegate.training.batches import IGNORED
from tidegate.training.captured import CapturedStep
from tidegate.training.optim import build_optimizer, set_rates
from tidegate.training.runtime import autocast, describe_machine, resolve_device
from tidegate.training.task_corpus import draw
from tidegate.training.tasks import Mqar

MIXERS = ("hgrn", "hgrn2")
WIDTHS = (64, 128, 256)
LENGTHS = (256, 512)
RATES = (3e-3, 1e-2, 1e-3)
ROWS = 1000  # examples drawn, and scored, at a time
GOOD = 0.999  # a model this good has learned the task


def model_config(mixer: str, width: int, vocabulary: int) -> LMConfig:
    """Two layers; HGRN with a real state as wide as the model, HGRN2 with heads of up to 64."""
    options: dict[str, Any] = {"preset": "official", "bias": False, "norm": "rms_no_weight"}
    if mixer == "hgrn":
        options["complex"] = False
    else:
        options["expand_ratio"] = min(64, width)
    return LMConfig(
        mixer=mixer,
        mixer_options=options,
        vocab_size=vocabulary,
        dim=width,
        layers=2,
        glu_hidden=width,
        glu_activation="silu",
        norm="rms",
    )


def examples(task: Mqar, count: int, device: torch.device, split: int) -> tuple[Tensor, ...]:
    """ids int16 ``[n, T]``, the queries' positions and their answers int16 ``[n, pairs]``."""
    pieces = []
    for index in range(-(-count // ROWS)):
        batch = draw(task, min(ROWS, count - index * ROWS), device, 0, split, index)
        asked = batch.labels != IGNORED
        positions = asked.nonzero()[:, 1].view(-1, task.pairs)
        answers = batch.labels.gather(1, positions)
        pieces.append([part.to(torch.int16) for part in (batch.ids, positions, answers)])
    return tuple(torch.cat(part) for part in zip(*pieces, strict=True))


def answers_of(
    model: CausalLM, rows: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Logits ``[n * pairs, vocabulary]`` and the right answers ``[n * pairs]``."""
    ids, positions, answers = (part.long() for part in rows)
    with autocast(device, "bf16" if device.type == "cuda" else "fp32"):
        logits = model.logits_at(ids, positions)
    return logits.float().flatten(0, 1), answers.flatten()


@torch.no_grad()
def accuracy(model: CausalLM, data: Sequence[Tensor], device: torch.device) -> float:
    """The share of queries whose likeliest token is right."""
    right = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, data[0].size(0), ROWS):
        logits, wanted = answers_of(model, [part[start : start + ROWS] for part in data], device)
        right += (logits.argmax(-1) == wanted).sum()
    return right.item() / data[2].numel()


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run; stops early where the task is learned. Returns its row of the JSON."""
    device = resolve_device(arguments.device)
    task = Mqar(length=arguments.length, train_examples=arguments.examples)
    data = examples(task, task.train_examples, device, split=0)
    test = examples(task, min(task.valid_examples, arguments.examples), device, split=1)
    torch.manual_seed(arguments.seed)
    model = CausalLM(model_config(arguments.mixer, arguments.width, task.vocabulary)).to(device)
    on_cuda = device.type == "cuda"
    optimizer = build_optimizer(
        model,
        lr=arguments.rate,
        betas=(0.9, 0.999),
        weight_decay=0.1,
        decay="all",
        capturable=on_cuda,
    )

    def update(*rows: Tensor) -> tuple[Tensor]:
        loss = F.cross_entropy(*answers_of(model, rows, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.detach(),)

    step_on = CapturedStep(update, device) if on_cuda else update
    generator = torch.Generator(device).manual_seed(arguments.seed)
    curve: list[tuple[int, float, float]] = []
    start, step = time.perf_counter(), 0
    while step < arguments.steps:
        set_rates(optimizer, schedule(step, arguments.steps))
        chosen = torch.randint(
            task.train_examples, (arguments.batch,), generator=generator, device=device
        )
        (loss,) = step_on(*(part[chosen] for part in data))
        step += 1
        if step % arguments.score_every == 0 or step == arguments.steps:
            score = accuracy(model, test, device)
            curve.append((step, loss.item(), score))
            if score >= GOOD or not math.isfinite(curve[-1][1]):
                break
    return {
        "mixer": arguments.mixer,
        "width": arguments.width,
        "length": arguments.length,
        "pairs": task.pairs,
        "learning_rate": arguments.rate,
        "batch": arguments.batch,
        "steps": step,
        "of_steps": arguments.steps,
        "seconds": round(time.perf_counter() - start, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "accuracy": curve[-1][2],
        "curve": curve,
        "machine": describe_machine(device),
    }


def schedule(step: int, steps: int) -> float:
    """A tenth of the run up, then a cosine down to zero."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs, each in a process of its own: all with the first rate, then all with the next;
    long ones first."""
    jobs = [
        (length, width, mixer, rate)
        for rate in arguments.rates
        for length in sorted(arguments.lengths, reverse=True)
        for width in sorted(arguments.widths, reverse=True)
        for mixer in MIXERS
    ]
    devices = sweep.places(arguments.device)
    about = {"jobs": len(jobs), "devices": len(devices), "begun": time.monotonic()}
    about["commit"] = arguments.commit

    def run(job: tuple[int, int, str, float], number: int) -> dict[str, Any]:
        length, width, mixer, rate = job
        command = [sys.executable, __file__, "--one", f"--mixer={mixer}", f"--width={width}"]
        command += [f"--length={length}", f"--rate={rate}", f"--steps={arguments.steps}"]
        place = devices[number // len(MIXERS) % len(devices)]
        command += [f"--device={place}", f"--seed={arguments.seed}"]
        command += [f"--batch={arguments.batch}", f"--score-every={arguments.score_every}"]
        command += [f"--examples={arguments.examples}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
        row = json.loads(done.stdout.splitlines()[-1])
        print(describe(row), file=sys.stderr, flush=True)
        return row

    def keep(rows: list[dict[str, Any]]) -> dict[str, Any]:
        runs = [{name: row[name] for name in row if name != "machine"} for row in rows]
        order = ("length", "width", "mixer", "learning_rate")
        runs.sort(key=lambda row: [row[name] for name in order])
        result = {
            **sweep.record(rows, **about),
            "seed": arguments.seed,
            "processes": arguments.processes,
            "runs": runs,
        }
        sweep.write_json(arguments.json, result)
        return result

    limits = {"processes": arguments.processes, "limit_minutes": arguments.limit_minutes}
    return sweep.sweep(jobs, run, keep, **limits)


def describe(row: dict[str, Any]) -> str:
    return (
        f"{row['mixer']:6} length {row['length']} width {row['width']:3} "
        f"rate {row['learning_rate']:g}: accuracy {row['accuracy']:.4f} "
        f"after {row['steps']} steps, {row['seconds']:.0f} s"
    )


def best(result: dict[str, Any]) -> dict[tuple[int, str], dict[int, float]]:
    """(length, mixer) -> width -> accuracy of the best learning rate."""
    table: dict[tuple[int, str], dict[int, float]] = {}
    for row in result["runs"]:
        widths = table.setdefault((row["length"], row["mixer"]), {})
        widths[row["width"]] = max(widths.get(row["width"], 0.0), row["accuracy"])
    return table


def plot(result: dict[str, Any], path: Path) -> None:
    """Accuracy against width, a panel a length, in the manner of the paper's Figure 3."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = best(result)
    lengths = sorted({length for length, _ in table})
    figure, panels = pyplot.subplots(
        1, len(lengths), figsize=(4.2 * len(lengths), 3.6), sharey=True, squeeze=False
    )
    marks = {"hgrn": ("HGRN", "o", "#b5542c"), "hgrn2": ("HGRN2", "s", "#1f5fa8")}
    for axes, length in zip(panels[0], lengths, strict=True):
        for mixer, (name, mark, color) in marks.items():
            points = sorted(table.get((length, mixer), {}).items())
            axes.plot(
                [width for width, _ in points],
                [100 * value for _, value in points],
                f"{mark}-",
                color=color,
                label=name,
            )
        pairs = next(row["pairs"] for row in result["runs"] if row["length"] == length)
        axes.set_title(f"{length} tokens, {pairs} keys", loc="left")
        axes.set_xlabel("width of the model")
        axes.set_xscale("log", base=2)
        widths = sorted({row["width"] for row in result["runs"]})
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.set_ylim(-3, 103)
        axes.grid(color="#e6e6e6")
    panels[0][0].set_ylabel("queries answered right, %")
    panels[0][0].legend(frameon=False)
    name = result["machine"]["device_name"]
    figure.suptitle(f"Multi-query associative recall,\ntwo layers, {name}", x=0.01, ha="left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the sweep here")
    add("--plot", type=Path, help="draw accuracy by width here")
    add("--from-json", type=Path, help="draw an earlier sweep instead of running one")
    add("--widths", type=int, nargs="+", default=WIDTHS)
    add("--lengths", type=int, nargs="+", default=LENGTHS)
    add("--rates", type=float, nargs="+", default=RATES)
    add("--steps", type=int, default=6000)
    add("--batch", type=int, default=128)
    add("--examples", type=int, default=100_000, help="to train on")
    add("--score-every", type=int, default=500)
    add("--processes", type=int, default=6, help="runs at a time")
    add("--limit-minutes", type=float, default=60.0, help="begin no run after so long")
    add("--device", default="auto")
    add("--seed", type=int, default=1)
    add("--commit", help="what the JSON says where this is no checkout")
    one = parser.add_argument_group("one run, as the sweep starts them; prints its row as JSON")
    one.add_argument("--one", action="store_true")
    one.add_argument("--mixer", choices=MIXERS, default="hgrn2")
    one.add_argument("--width", type=int, default=128)
    one.add_argument("--length", type=int, default=256)
    one.add_argument("--rate", type=float, default=3e-3)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    if arguments.one:
        print(json.dumps(train(arguments)))
        return
    if arguments.from_json:
        result = json.loads(arguments.from_json.read_text(encoding="utf-8"))
    else:
        result = run_all(arguments)
    for (length, mixer), widths in sorted(best(result).items()):
        cells = ", ".join(f"{width}: {value:.3f}" for width, value in sorted(widths.items()))
        print(f"{length} tokens, {mixer}: {cells}")
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
