#!/usr/bin/env python3
"""How gates start: accuracy on the copying tasks by initialisation of the forget gates ("Towards
Understanding Gated Linear Recurrent Neural Networks", section 4.1, Figures 4 and 6).

    python benchmarks/gate_init.py --json gate_init.json --plot docs/gate_init.png \
        --gates-plot docs/gate_init_gates.png --train --compile --precision=tf32

Every method and seed is one run of `tidegate train --recipe copying` in a folder of its own under
--out, so many at a time as --processes says, over all GPUs in turn. Started again, runs that were
stopped go on: --limit-minutes ends the sweep by asking all of them to stop, which leaves their
checkpoints, and the JSON holds how far each one came. Where only some checkpoints are at hand,
--resume-only goes on with those, and --add takes the other runs from an earlier JSON. The plots are
drawn from the JSON: accuracy by step, and the first layer's gates before and after training
(Figures 5 and 7).
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sweep
import torch

from tidegate.models import CausalLM
from tidegate.training.checkpoint import RunFolder, read_metrics
from tidegate.training.config import read_json
from tidegate.training.probes import forget_gates
from tidegate.training.scoring import corpus_of_run
from tidegate.training.tasks import make_task
from tidegate.training.trained import initial_model, load_trained

GUMBEL_FIRST = 'layer_options=[{"gate_init": "gumbel-softmax"}]'
METHODS = {  # name -> flags of `tidegate train`, with the task's length
    "standard": lambda length: [],
    "ugi": lambda length: ["--set=mixer_options.gate_init=ugi"],
    "gumbel-standard": lambda length: [f"--set={GUMBEL_FIRST}"],
    "gumbel-ugi": lambda length: ["--set=mixer_options.gate_init=ugi", f"--set={GUMBEL_FIRST}"],
    "chrono": lambda length: [f"--set=mixer_options.gate_init=chrono:{length}"],
    "gumbel-gate": lambda length: ['--set=layer_options=[{"gumbel_gate": 0.9}]'],
    "lower-bound": lambda length: ["--set=mixer_options.lower_bound=true"],
}
NAMES = {
    "standard": "standard",
    "ugi": "UGI",
    "gumbel-standard": "Gumbel-softmax, then standard",
    "gumbel-ugi": "Gumbel-softmax, then UGI",
    "chrono": "chrono",
    "gumbel-gate": "Gumbel-Gate, then standard",
    "lower-bound": "lower bounds",
}
COLORS = ("#777777", "#b5542c", "#3d8a4e", "#1f5fa8", "#7a4fa3", "#c2a11d", "#2aa0a0")
LEARNED = 0.99  # accuracy
BINS = np.linspace(0.0, 1.0, 51)  # of gate values
EXAMPLES = 8  # that the gates are looked at with
_one_at_a_time = threading.Lock()  # models are drawn from torch's only generator


def command(arguments: argparse.Namespace, method: str, seed: int, device: str) -> list[str]:
    """The training run of a method and seed."""
    task = make_task(arguments.task, {"dummies": arguments.dummies})
    out = folder(arguments, method, seed)
    flags = [f"--task-option=dummies={arguments.dummies}"]
    flags += [f"--steps={arguments.steps}", f"--seed={seed}"]
    flags += [f"--eval-every={arguments.eval_every}", f"--device={device}", f"--out={out}"]
    flags += METHODS[method](task.length) + list(arguments.train)
    start = [sys.executable, "-m", "tidegate", "train", arguments.task, "--recipe=copying"]
    return [*start, "--quiet", *flags]


def folder(arguments: argparse.Namespace, method: str, seed: int) -> Path:
    return Path(arguments.out, f"{method}-{seed}")


def row_of(path: Path, method: str, seed: int) -> dict[str, Any]:
    """What a run's folder says, finished or not."""
    metrics = read_metrics(RunFolder(path).metrics)
    values = read_json(RunFolder(path).config)
    scored = [line for line in metrics if line["kind"] in ("valid", "final")]
    trained = [line for line in metrics if line["kind"] == "train"]
    if not trained:
        raise SystemExit(f"gate_init: {path} has no training steps")
    last = trained[-1]
    learned = [line["step"] for line in scored if line["accuracy"] >= LEARNED]
    return {
        "method": method,
        "seed": seed,
        "parameters": values["parameters"],
        "steps": last["step"],
        "of_steps": values["train"]["steps"],
        "seconds": round(last["seconds"], 1),
        "steps_per_second": round(last["step"] / last["seconds"], 1),
        "accuracy": scored[-1]["accuracy"] if scored else None,
        "learned_at": learned[0] if learned else None,
        "curve": [[line["step"], line["accuracy"], round(line["loss"], 5)] for line in scored],
        "gates": first_gates(path),
        "machine": values["machine"],
        "config": {"model": values["model"], "train": values["train"]},
    }


def first_gates(path: Path) -> dict[str, list[float]]:
    """The percentage of the first layer's forget gates in each of BINS, on validation examples,
    before and after training."""
    corpus = corpus_of_run(str(path))
    batch = next(corpus.valid_batches(torch.device("cpu"), EXAMPLES * corpus.task.length))
    with _one_at_a_time:
        models = {
            "before": initial_model(read_json(RunFolder(path).config), CausalLM),
            "after": load_trained(str(path), "cpu").model,
        }
    shares = {}
    for when, model in models.items():
        gates = forget_gates(model, batch.ids)[0].ravel()
        counts = np.histogram(gates, BINS)[0]
        shares[when] = [round(float(share), 3) for share in 100.0 * counts / gates.size]
    return shares


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """All methods with the first seed, then all with the next."""
    jobs = [(method, seed) for seed in arguments.seeds for method in arguments.methods]
    if arguments.resume_only:
        jobs = [job for job in jobs if RunFolder(folder(arguments, *job)).checkpoint.exists()]
    earlier = sweep.earlier_runs(arguments.add, jobs, lambda row: (row["method"], row["seed"]))
    devices = sweep.places(arguments.device)
    about = {"jobs": len(jobs), "devices": len(devices), "begun": time.monotonic()}
    about["commit"] = arguments.commit
    children: set[subprocess.Popen[str]] = set()

    def run(job: tuple[str, int], number: int) -> dict[str, Any]:
        method, seed = job
        child = subprocess.Popen(
            command(arguments, method, seed, devices[number % len(devices)]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        children.add(child)
        said, _ = child.communicate()
        children.discard(child)
        if child.returncode not in (0, 130):  # 130: stopped, with a checkpoint
            raise RuntimeError(f"{' '.join(child.args)}: {said.strip()[-2000:]}")
        row = row_of(folder(arguments, method, seed), method, seed)
        print(describe(row), file=sys.stderr, flush=True)
        return row

    def stop() -> None:
        for child in list(children):
            child.send_signal(signal.SIGTERM)

    def keep(rows: list[dict[str, Any]]) -> dict[str, Any]:
        kept = ("machine", "config")
        runs = [{name: row[name] for name in row if name not in kept} for row in rows]
        runs += earlier
        runs.sort(key=lambda row: (list(METHODS).index(row["method"]), row["seed"]))
        shared = rows[0]["config"]
        result = {
            "kind": "gate_init",
            **sweep.record(rows, **about),
            "task": arguments.task,
            "dummies": arguments.dummies,
            "batch_size": shared["train"]["batch_size"],
            "learning_rate": shared["train"]["lr"],
            "precision": shared["train"]["precision"],
            "compiled": shared["train"]["compile"],
            "layers": shared["model"]["layers"],
            "dim": shared["model"]["dim"],
            "processes": arguments.processes,
            "runs": runs,
        }
        sweep.write_json(arguments.json, result)
        return result

    timer = threading.Timer(60 * arguments.limit_minutes, stop)
    timer.daemon = True
    timer.start()
    try:
        limits = {"processes": arguments.processes, "limit_minutes": arguments.limit_minutes}
        return sweep.sweep(jobs, run, keep, **limits)
    finally:
        timer.cancel()


def describe(row: dict[str, Any]) -> str:
    learned = "" if row["learned_at"] is None else f", learned by step {row['learned_at']:,}"
    score = "not scored yet" if row["accuracy"] is None else f"accuracy {row['accuracy']:.4f}"
    return (
        f"{row['method']:15} seed {row['seed']}: {score} after {row['steps']:,} steps{learned}, "
        f"{row['steps_per_second']} steps/s"
    )


def means(result: dict[str, Any]) -> dict[str, tuple[list[int], np.ndarray]]:
    """method -> steps at which all its runs were scored, and accuracies ``[seeds, steps]``."""
    curves = defaultdict(list)
    for row in result["runs"]:
        curves[row["method"]].append({step: score for step, score, _ in row["curve"]})
    found = {}
    for method, runs in curves.items():
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        if steps:
            found[method] = (steps, np.array([[run[step] for step in steps] for run in runs]))
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """Accuracy against steps, a line a method: the mean over seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.4, 4.4), layout="constrained")
    for method, (steps, scores) in means(result).items():
        color = COLORS[list(METHODS).index(method)]
        label = f"{NAMES[method]} ({len(scores)} seeds)"
        axes.plot(steps, 100 * scores.mean(0), color=color, linewidth=1.8, label=label)
        low, high = 100 * scores.min(0), 100 * scores.max(0)
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    chance = make_task(result["task"], {"dummies": result["dummies"]}).chance
    axes.axhline(100 * chance, color="black", linestyle=":", linewidth=1, label="guessing")
    axes.set_ylim(-2, 103)
    axes.set_xlim(left=0)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("answers that are right, %")
    axes.grid(color="#e6e6e6")
    axes.legend(frameon=False)
    axes.set_title(
        f"{result['task']}, {result['dummies']} dummies: gated linear RNN, {result['layers']} "
        f"layers of {result['dim']}\nmean over seeds, shaded from the worst to the best",
        loc="left",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_gates(result: dict[str, Any], path: Path) -> None:
    """The first layer's gates of every method, before and after training; one seed each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs: dict[str, dict[str, Any]] = {}
    for row in result["runs"]:
        runs.setdefault(row["method"], row)
    figure, panels = pyplot.subplots(
        2,
        len(runs),
        figsize=(2.5 * len(runs) + 0.6, 4.6),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, (method, row) in zip(panels.T, runs.items(), strict=True):
        color = COLORS[list(METHODS).index(method)]
        for axes, when in zip(column, ("before", "after"), strict=True):
            axes.bar(BINS[:-1], row["gates"][when], np.diff(BINS), align="edge", color=color)
            axes.set_xlim(0, 1)
            axes.grid(color="#e6e6e6", axis="y")
            axes.set_axisbelow(True)
        column[0].set_title(NAMES[method], fontsize=10)
        column[1].set_title(f"after {row['steps']:,} steps", fontsize=9)
    panels[0][0].set_ylabel("before training")
    panels[1][0].set_ylabel("after training")
    figure.supxlabel("forget gate: 0 forgets at once, 1 keeps for ever", fontsize=10)
    figure.supylabel("share of values, % (bins of 0.02)", fontsize=10)
    figure.suptitle(
        f"The first layer's gates, {result['task']}, {result['dummies']} dummies; seed "
        f"{next(iter(runs.values()))['seed']}",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gate_init"), help="a run folder a method and seed")
    add("--json", type=Path, help="write the sweep here")
    add("--plot", type=Path, help="draw accuracy by step here")
    add("--gates-plot", type=Path, help="draw the first layer's gates here")
    add("--from-json", type=Path, help="draw an earlier sweep instead of running one")
    add("--task", choices=("copying", "selective-copying"), default="copying")
    add("--dummies", type=int, default=1000)
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS)[:4])
    add("--seeds", type=int, nargs="+", default=(1, 2))
    add("--steps", type=int, default=100_000)
    add("--eval-every", type=int, default=500)
    add("--processes", type=int, default=4, help="runs at a time")
    add("--limit-minutes", type=float, default=600.0, help="ask all runs to stop after so long")
    add("--resume-only", action="store_true", help="begin no run that has no checkpoint yet")
    add("--add", type=Path, help="JSON of this script: its runs join those that are not run here")
    add("--device", default="auto")
    add("--commit", help="what the JSON says where this is no checkout")
    add(
        "--train",
        nargs=argparse.REMAINDER,
        default=(),
        metavar="FLAG",
        help="last: further flags of `tidegate train`",
    )
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    if arguments.from_json:
        result = json.loads(arguments.from_json.read_text(encoding="utf-8"))
    else:
        result = run_all(arguments)
    for row in result["runs"]:
        print(describe(row))
    if arguments.plot:
        plot(result, arguments.plot)
    if arguments.gates_plot:
        plot_gates(result, arguments.gates_plot)


if __name__ == "__main__":
    main()
