#!/usr/bin/env python3
"""Associative recall by width: HGRN beside HGRN2 at equal width (HGRN2's paper, Figure 3).

    python benchmarks/mqar.py --json benchmarks/results/mqar_h200.json --plot docs/mqar.png

For every sequence length, mixer, width, learning rate and seed a two-layer language model learns
the task `mqar` by the recipe `mqar` of `tidegate train`. Small models leave a GPU idle, so one
process trains many at a time (--at-once a GPU), each captured in a CUDA graph on a stream of its
own. The best learning rate of a width counts, as in the paper. The JSON holds every run, with
device, versions and commit, and is written after every one; the plot is drawn from it. Runs that
are not done after --limit-minutes are left out, and the JSON says so.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sweep
import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate.models import CausalLM, LMConfig
from tidegate.training import TrainConfig, recipes
from tidegate.training.batches import IGNORED
from tidegate.training.captured import CapturedStep
from tidegate.training.optim import set_rates
from tidegate.training.runtime import autocast, describe_machine, resolve_device
from tidegate.training.task_corpus import draw
from tidegate.training.tasks import Mqar

MIXERS = ("hgrn", "hgrn2")
WIDTHS = (64, 128, 256)
LENGTHS = (256, 512)
RECIPE = recipes()["mqar"]  # the model and the optimiser
RATES = (3e-3, 6e-3)
ROWS = 250  # examples drawn, and scored, at a time
GOOD = 0.999  # a model this good has learned the task
GATE_INITS = {"chrono": "chrono:{length}", "standard": None}
DONE = object()  # what a run that is over gives


class Job(NamedTuple):
    """What tells one run from another."""

    length: int
    width: int
    mixer: str
    rate: float
    seed: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> Job:
        """The job that a row of the JSON is of."""
        return cls(row["length"], row["width"], row["mixer"], row["learning_rate"], row["seed"])


def model_config(mixer: str, width: int, vocabulary: int, gate_init: str | None) -> LMConfig:
    """The recipe's model in another width: HGRN with a real state as wide as the model, HGRN2 with
    heads of up to 64."""
    options: dict[str, Any] = {"preset": "official", "gate_init": gate_init}
    if mixer == "hgrn":
        options |= {"complex": False, "bias": False, "norm": "rms_no_weight"}  # as HGRN2's preset
    else:
        options["expand_ratio"] = min(64, width)
    changes = {"mixer": mixer, "mixer_options": options, "vocab_size": vocabulary}
    return LMConfig.from_dict({**RECIPE.model, **changes, "dim": width, "glu_hidden": width})


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


class Place:
    """Where a run goes: a device, and there a CUDA stream that no other run at the time has."""

    def __init__(self, device: str) -> None:
        self.device = resolve_device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def captured(self, update: Callable[..., tuple[Tensor]]) -> Callable[..., tuple[Tensor]]:
        """The update replayed from a CUDA graph, where there is CUDA."""
        if self.stream is None:
            return update
        return CapturedStep(update, self.device, self.stream)

    def advance(self, run: Iterator[None]) -> bool:
        """One step of a run; whether there are more."""
        with torch.cuda.stream(self.stream):  # None changes nothing
            return next(run, DONE) is not DONE


class Pool:
    """The examples of every length on every device, drawn once for all runs."""

    def __init__(self, train_examples: int) -> None:
        self.train_examples = train_examples
        self._drawn: dict[tuple[int, torch.device], tuple[tuple[Tensor, ...], ...]] = {}

    def of(self, length: int, device: torch.device) -> tuple[Mqar, Sequence[Tensor], ...]:
        """The task, its examples to train on and its examples to score, as `examples` has them."""
        task = Mqar(length=length, train_examples=self.train_examples)
        if (length, device) not in self._drawn:
            scored = min(task.valid_examples, task.train_examples)
            self._drawn[length, device] = (
                examples(task, task.train_examples, device, split=0),
                examples(task, scored, device, split=1),
            )
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # other streams read them
        return task, *self._drawn[length, device]


def train(
    job: Job,
    place: Place,
    pool: Pool,
    arguments: argparse.Namespace,
    finish: Callable[[dict[str, Any]], None],
) -> Iterator[None]:
    """One run, pausing after every step; at its end (all steps are done, or the task is learned)
    `finish` gets its row of the JSON."""
    device = place.device
    task, data, test = pool.of(job.length, device)
    gate_init = GATE_INITS[arguments.gate_init]
    if gate_init is not None:
        gate_init = gate_init.format(length=job.length)
    torch.manual_seed(job.seed)
    config = model_config(job.mixer, job.width, task.vocabulary, gate_init)
    model = CausalLM(config).to(device)
    settings = TrainConfig(**{**RECIPE.train, "lr": job.rate, "steps": arguments.steps})
    optimizer = settings.make_optimizer(model, capturable=device.type == "cuda")
    schedule = settings.learning_rate()

    def update(*given: Tensor) -> tuple[Tensor]:
        loss = F.cross_entropy(*answers_of(model, given, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.detach(),)

    step_on = place.captured(update)
    generator = torch.Generator(device).manual_seed(job.seed)
    batch = max(1, arguments.tokens // job.length)
    curve: list[tuple[int, float, float]] = []
    start, step = time.perf_counter(), 0
    while step < arguments.steps:
        set_rates(optimizer, schedule(step, step / arguments.steps))
        chosen = torch.randint(task.train_examples, (batch,), generator=generator, device=device)
        (loss,) = step_on(*(part[chosen] for part in data))
        step += 1
        if step % arguments.score_every == 0 or step == arguments.steps:
            curve.append((step, round(loss.item(), 4), accuracy(model, test, device)))
            if curve[-1][2] >= GOOD or not math.isfinite(curve[-1][1]):
                break
        yield
    finish(
        {
            "mixer": job.mixer,
            "width": job.width,
            "length": job.length,
            "pairs": task.pairs,
            "learning_rate": job.rate,
            "seed": job.seed,
            "batch": batch,
            "steps": step,
            "of_steps": arguments.steps,
            "seconds": round(time.perf_counter() - start, 1),
            "parameters": sum(p.numel() for p in model.parameters()),
            "accuracy": curve[-1][2],
            "curve": curve,
        }
    )


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs with the first seed and rate, then the next, long and wide ones first; --at-once of
    them on every device."""
    jobs = [
        Job(length, width, mixer, rate, seed)
        for seed in arguments.seeds
        for rate in arguments.rates
        for length in sorted(arguments.lengths, reverse=True)
        for width in sorted(arguments.widths, reverse=True)
        for mixer in arguments.mixers
    ]
    devices = sweep.places(arguments.device)
    places = [Place(device) for _ in range(arguments.at_once) for device in devices]
    about = {"jobs": len(jobs), "devices": len(devices), "begun": time.monotonic()}
    about |= {"commit": arguments.commit}
    machine = describe_machine(torch.device(devices[0]))
    pool = Pool(arguments.examples)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    earlier = sweep.earlier_runs(arguments.add, jobs, Job.of)

    def finish(row: dict[str, Any]) -> None:
        print(describe(row), file=sys.stderr, flush=True)
        rows.append({**row, "machine": machine})
        runs = [{name: row[name] for name in row if name != "machine"} for row in rows] + earlier
        order = ("length", "width", "mixer", "learning_rate", "seed")
        runs.sort(key=lambda row: [row[name] for name in order])
        result.update(
            **sweep.record(rows, **about),
            gate_init=arguments.gate_init,
            at_once=arguments.at_once,
            runs=runs,
        )
        sweep.write_json(arguments.json, result)

    def begin(job: Job, place: Place) -> Iterator[None]:
        return train(job, place, pool, arguments, finish)

    interleave(jobs, places, begin, end=about["begun"] + 60 * arguments.limit_minutes)
    if not rows:
        raise SystemExit("mqar: no run was done within --limit-minutes")
    return result


def interleave(
    jobs: Sequence[Job],
    places: Sequence[Place],
    begin: Callable[[Job, Place], Iterator[None]],
    *,
    end: float,
) -> None:
    """Advances a run at every place by a step in turn, and begins the next job where one is done;
    what is not done at `end` (time.monotonic()) is left."""
    waiting = deque(jobs)
    live: dict[int, Iterator[None]] = {}
    while (live or waiting) and time.monotonic() < end:
        for number, place in enumerate(places):
            if number not in live:
                if not waiting:
                    continue
                live[number] = begin(waiting.popleft(), place)
            if not place.advance(live[number]):
                del live[number]


def describe(row: dict[str, Any]) -> str:
    return (
        f"{row['mixer']:6} length {row['length']} width {row['width']:3} "
        f"rate {row['learning_rate']:g} seed {row['seed']}: accuracy {row['accuracy']:.4f} "
        f"after {row['steps']} steps, {row['seconds']:.0f} s"
    )


def best(result: dict[str, Any]) -> dict[tuple[int, str], dict[int, list[float]]]:
    """(length, mixer) -> width -> the accuracies of all seeds with the learning rate whose mean
    over them is best."""
    scores: dict[tuple[int, str], dict[int, dict[float, list[float]]]] = defaultdict(dict)
    for row in result["runs"]:
        rates = scores[row["length"], row["mixer"]].setdefault(row["width"], {})
        rates.setdefault(row["learning_rate"], []).append(row["accuracy"])
    return {
        panel: {width: max(rates.values(), key=statistics.mean) for width, rates in widths.items()}
        for panel, widths in scores.items()
    }


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
            widths = [width for width, _ in points]
            means = [100 * statistics.mean(values) for _, values in points]
            axes.plot(widths, means, f"{mark}-", color=color, label=name)
            low = [100 * min(values) for _, values in points]
            high = [100 * max(values) for _, values in points]
            axes.fill_between(widths, low, high, color=color, alpha=0.15, linewidth=0)
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
    add("--add", type=Path, help="JSON of this script: its runs join those that are not run here")
    add("--from-json", type=Path, help="draw an earlier sweep instead of running one")
    add("--mixers", nargs="+", choices=MIXERS, default=MIXERS)
    add("--widths", type=int, nargs="+", default=WIDTHS)
    add("--lengths", type=int, nargs="+", default=LENGTHS)
    add("--rates", type=float, nargs="+", default=RATES)
    add("--seeds", type=int, nargs="+", default=(1, 2))
    add("--gate-init", choices=GATE_INITS, default="chrono", help="how forget gates start")
    add("--steps", type=int, default=RECIPE.train["steps"])
    add("--tokens", type=int, default=32768, help="a step: a batch has tokens / length sequences")
    add("--examples", type=int, default=100_000, help="to train on")
    add("--score-every", type=int, default=500)
    add("--at-once", type=int, choices=range(1, 25), default=12, metavar="1..24", help="a device")
    add("--limit-minutes", type=float, default=60.0, help="leave out what is not done by then")
    add("--device", default="auto")
    add("--commit", help="what the JSON says where this is no checkout")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    if arguments.from_json:
        result = json.loads(arguments.from_json.read_text(encoding="utf-8"))
    else:
        result = run_all(arguments)
    for (length, mixer), widths in sorted(best(result).items()):
        cells = ", ".join(
            f"{width}: {statistics.mean(values):.3f}" for width, values in sorted(widths.items())
        )
        print(f"{length} tokens, {mixer}: {cells}")
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
