#!/usr/bin/env python3
"""Forgetting attention on real text: FoT (LLaMA), FoT (Pro), Transformer (LLaMA) and HGRN2 of 10M
parameters, trained on 2048 tokens and read at 8192 (Forgetting Transformer, sections 4.2 and 4.3).

    python benchmarks/text_corpus.py corpus.tar.xz
    python benchmarks/fox_text.py corpus.tar.xz --out runs/fox --limit-minutes 7.5

Every model trains in a process of its own, over all GPUs in turn, on the same batches in the same
order, and on as many: the processes first measure their speed, one at a time on a GPU, and the GPU
with the most to do decides how many steps there are. Tokens are bytes. Each leaves a run folder of
`tidegate train` with what `eval --per-token`, `eval --needle` and `plot attention` write; the
summary, fox_text.json, is written anew whenever a model is done, and the pictures that hold all
models at the end. Started again on the same --out, runs go on from their checkpoints.
--limit-minutes bounds it all: a run that is not done when the time that scoring needs is left stops
there, and the JSON says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import sweep
import text_corpus
import torch

from tidegate.training.checkpoint import RunFolder, read_metrics
from tidegate.training.config import read_json
from tidegate.training.context import needle_of_run, per_token_of_run
from tidegate.training.maps import head_maps
from tidegate.training.per_token import PerToken
from tidegate.training.probes import mixer_inputs
from tidegate.training.report import finish, plot_gates
from tidegate.training.runs import prepare_run
from tidegate.training.scoring import corpus_of_run
from tidegate.training.trained import load_trained

NAMES = {
    "fot-pro": "FoT (Pro)",
    "fot-llama": "FoT (LLaMA)",
    "transformer-llama": "Transformer (LLaMA)",
    "hgrn2": "HGRN2",
}
CALIBRATION = 30  # steps; the first ten are not timed
TRIAL_SECONDS = 120.0  # that they may take, the start of the process included
MARGIN = 0.92  # of the time for training that the steps should take
JSON = "fox_text.json"


def model_fields(name: str, width: int, layers: int) -> dict[str, Any]:
    """Fields of LMConfig: the paper's frame and initialisation (appendix B.1), heads of 64 channels
    for attention and of 128 for HGRN2. GLUs are 8/3 of the width, and 7/3 of it in FoT (Pro), whose
    output gate takes the rest."""
    heads = max(1, width // 64)
    mixer, options, ratio = {
        "fot-llama": ("fox", {"num_heads": heads}, 8),
        "fot-pro": ("fox-pro", {"num_heads": heads}, 7),
        # FoT's kernels with every gate open: the mixer `transformer` runs SDPA, which has no packed
        # sequences of its own.
        "transformer-llama": ("fox", {"num_heads": heads, "gate": "none", "rope": 500000.0}, 8),
        "hgrn2": ("hgrn2", {"num_heads": max(1, width // 128), "preset": "fla"}, 8),
    }[name]
    return {
        "mixer": mixer,
        "mixer_options": options,
        "vocab_size": 256,
        "dim": width,
        "layers": layers,
        "glu_hidden": ratio * width // 3,
        "glu_activation": "silu",
        "norm": "rms",
        "norm_eps": 1e-6,
        "tied": False,
        "init_std": 0.02,
    }


def train_fields(arguments: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Fields of TrainConfig: appendix B.1 with a batch of 2^16 tokens in place of 2^19. The rate is
    that of its 360M models: by the width it would be 1024/384 times as much, by the root of the
    batch 1/2.8."""
    on_cuda = not arguments.device.startswith("cpu")
    return {
        "data": str(arguments.corpus),
        "packed": True,
        "context": arguments.context,
        "batch_size": arguments.batch,
        "steps": steps,
        "lr": arguments.rate,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
        "clip": 1.0,
        "schedule": "cosine",
        "warmup_fraction": 0.04,
        "floor": 0.1,
        "cuda_graph": on_cuda,
        "precision": "bf16" if on_cuda else "fp32",
        "seed": arguments.seed,
        "eval_every": max(1, steps // 20),
        "eval_tokens": 256 * arguments.context,
        "device": arguments.device,
    }


# One model, in a process of its own


def train_one(arguments: argparse.Namespace, ask: Callable[[float], int]) -> dict[str, Any]:
    """Trains the model arguments.one, or goes on with it, and scores it: its row of the JSON.

    ask: given the tokens a second of a short trial, says how many steps there are; not called where
    the run's folder or the arguments say it."""
    folder = RunFolder(arguments.out / arguments.one)
    fields = model_fields(arguments.one, arguments.width, arguments.layers)
    if folder.config.exists():
        steps = read_json(folder.config)["train"]["steps"]
    else:
        steps = arguments.steps or ask(speed(arguments, fields))
    run = prepare_run(str(folder.path), train_fields(arguments, steps), fields)
    shutil.rmtree(trial_folder(arguments), ignore_errors=True)
    left = arguments.stop_at - time.time() if arguments.stop_at else threading.TIMEOUT_MAX
    if left <= 0 and run.trainer.position.step == 0:
        raise SystemExit("fox_text: --limit-minutes leaves no time to train")
    timer = threading.Timer(max(0.0, left), run.trainer.stop)
    timer.daemon = True
    timer.start()
    run.trainer.run()
    timer.cancel()
    finish(run)
    return row_of(folder, score(arguments, str(folder.path)))


def speed(arguments: argparse.Namespace, fields: dict[str, Any]) -> float:
    """Tokens a second of a run that is thrown away."""
    trial = trial_folder(arguments)
    shutil.rmtree(trial, ignore_errors=True)
    settings = train_fields(arguments, CALIBRATION) | {"eval_every": 0}
    prepare_run(str(trial), settings, fields).trainer.run(quiet=True)
    rows = read_metrics(RunFolder(trial).metrics)
    first, last = rows[0], rows[-1]
    return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])


def trial_folder(arguments: argparse.Namespace) -> Path:
    return arguments.out / f"{arguments.one}.trial"


def score(arguments: argparse.Namespace, run: str) -> list[str]:
    """What the model makes of its context, as files of the run; the parts that failed."""
    device = {"device": arguments.device}
    parts: dict[str, Callable[[], Any]] = {
        "per_token": lambda: per_token_of_run(
            run, length=arguments.length, sequences=arguments.sequences, batch=16, **device
        ),
        "needle": lambda: needle_of_run(
            run, lengths=arguments.needle_lengths, samples=arguments.samples, **device
        ),
    }
    if arguments.one != "hgrn2":
        parts["maps"] = lambda: draw_maps(arguments, run)
    if arguments.one != "transformer-llama":
        parts["gates"] = lambda: plot_gates(run, arguments.device)
    failed = []
    for name, part in parts.items():
        begun = time.monotonic()
        try:
            part()
        except Exception:  # the other parts are worth having
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    return failed


def draw_maps(arguments: argparse.Namespace, run: str) -> None:
    """attention_maps.png over a training context: of the first, a middle and the last layer the
    head that forgets most and the one that forgets least; the first and the last, where none does.
    """
    from tidegate import plots_context

    trained = load_trained(run, arguments.device)
    corpus = corpus_of_run(run)
    start = int(corpus.windows(arguments.context, 1)[0])
    ids = torch.from_numpy(corpus.valid[start : start + arguments.context].astype(np.int64))
    count = len(trained.model.blocks)
    layers = sorted({1, count // 2 + 1, count})
    inputs, gammas = mixer_inputs(trained.model, ids[None]), trained.model.gammas()
    maps = []
    for layer in layers:
        mixer = trained.model.blocks[layer - 1].mixer
        log_f = mixer.log_gate(inputs[layer - 1], gammas[layer - 1])
        order = log_f[0].mean(0).argsort(stable=True).tolist()
        heads = sorted({order[0] + 1, order[-1] + 1})
        found = head_maps(trained.model, ids, [layer], heads)
        is_open = not bool(log_f.any())
        maps += [dataclasses.replace(m, forget=None) if is_open else m for m in found]
    path = Path(run) / "attention_maps.png"
    title = f"Forget gates and attention over {len(ids):,} bytes: {NAMES[arguments.one]}"
    plots_context.plot_head_maps(maps, path, title=title)


def row_of(folder: RunFolder, failed: list[str]) -> dict[str, Any]:
    """What a run's folder says."""
    metrics = read_metrics(folder.metrics)
    values = read_json(folder.config)
    trained = [line for line in metrics if line["kind"] == "train"][-1]
    scored = [line for line in metrics if line["kind"] in ("valid", "final")]
    row = {
        "model": folder.path.name,
        "name": NAMES[folder.path.name],
        "parameters": values["parameters"],
        "steps": trained["step"],
        "of_steps": values["train"]["steps"],
        "tokens": trained["tokens"],
        "seconds": trained["seconds"],
        "tokens_per_second": trained["tokens_per_second"],
        "bits_per_byte": scored[-1]["bits_per_byte"],
        "valid_tokens": scored[-1]["valid_tokens"],
        "curve": [[line["tokens"], round(line["bits_per_byte"], 5)] for line in scored],
        "failed": failed,
        "machine": values["machine"],
        "data": values["data"],
    }
    for name in ("per_token", "needle"):
        path = folder.path / f"{name}.json"
        row[name] = read_json(path) if path.exists() else None
    return row


# All models


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """All models at once."""
    begun = time.monotonic()
    end = begun + 60 * arguments.limit_minutes
    stop_at = time.time() + end - begun - arguments.reserve_seconds
    places = sweep.places(arguments.device)
    speeds: list[dict[str, float]] = [{} for _ in places]
    alone = [threading.Lock() for _ in places]
    steps = [0]

    def agree() -> None:
        left = end - arguments.reserve_seconds - time.monotonic()
        tokens = arguments.batch * arguments.context
        steps[0] = steps_within(left, [[tokens / s for s in kind.values()] for kind in speeds])
        said = ", ".join(f"{NAMES[n]} {s:,.0f}" for kind in speeds for n, s in kind.items())
        print(f"tokens/s: {said}; {steps[0]} steps", file=sys.stderr, flush=True)

    needed = [
        name for name in arguments.models if not RunFolder(arguments.out / name).config.exists()
    ]
    barrier = threading.Barrier(max(1, len(needed)), action=agree)

    def run(name: str, number: int) -> dict[str, Any]:
        with (arguments.out / f"{name}.log").open("a", encoding="utf-8") as log:
            command = [*worker(arguments), f"--one={name}", f"--device={places[number]}"]
            command.append(f"--stop-at={stop_at}")

            def start() -> subprocess.Popen[str]:
                pipe = subprocess.PIPE
                return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)

            if name not in needed or arguments.steps:
                child = start()
            else:
                with alone[number]:
                    child = start()
                    too_long = threading.Timer(TRIAL_SECONDS, child.kill)
                    too_long.start()
                    first = child.stdout.readline()  # empty where it failed
                    too_long.cancel()
                if first:
                    speeds[number][name] = float(first)
                barrier.wait()
                if first:
                    child.stdin.write(f"{steps[0]}\n")
                    child.stdin.flush()
            said, _ = child.communicate()
        if child.returncode != 0:
            log_end = (arguments.out / f"{name}.log").read_text(encoding="utf-8")[-2000:]
            raise RuntimeError(f"fox_text: {name} ended with {child.returncode}: {log_end}")
        row = json.loads(said.splitlines()[-1])
        print(describe(row), file=sys.stderr, flush=True)
        return row

    rows: list[dict[str, Any]] = []
    errors: list[BaseException] = []
    result: dict[str, Any] = {}
    with ThreadPoolExecutor(len(arguments.models)) as pool:
        jobs = [
            pool.submit(run, name, number % len(places))
            for number, name in enumerate(arguments.models)
        ]
        for done in as_completed(jobs):
            if (error := done.exception()) is not None:
                errors.append(error)
                print(error, file=sys.stderr, flush=True)
                continue
            rows.append(done.result())
            result = summary(arguments, rows, len(places), begun)
            sweep.write_json(arguments.out / JSON, result)
    if not rows:
        raise errors[0]
    return result


def steps_within(seconds: float, places: Sequence[Sequence[float]]) -> int:
    """How many steps every model should take, a multiple of ten. places: of each device the seconds
    that a step of each of its models takes there alone; they share it."""
    longest = max(map(sum, places))
    return max(10, int(MARGIN * seconds / longest) // 10 * 10) if longest else 10


def worker(arguments: argparse.Namespace) -> list[str]:
    """The command of one model, but for its name and place."""
    command = [sys.executable, __file__, str(arguments.corpus), f"--out={arguments.out}"]
    for name in ("width", "layers", "context", "batch", "rate", "steps", "seed", "length"):
        command.append(f"--{name}={getattr(arguments, name)}")
    command += [f"--sequences={arguments.sequences}", f"--samples={arguments.samples}"]
    return [*command, "--needle-lengths", *map(str, arguments.needle_lengths)]


def summary(
    arguments: argparse.Namespace, rows: list[dict[str, Any]], devices: int, begun: float
) -> dict[str, Any]:
    about = {"jobs": len(arguments.models), "devices": devices, "begun": begun}
    shared = ("machine", "data")
    runs = [{name: row[name] for name in row if name not in shared} for row in rows]
    runs.sort(key=lambda row: list(NAMES).index(row["model"]))
    data = {name: value for name, value in rows[0]["data"].items() if name != "name"}
    return {
        "kind": "fox_text",
        **sweep.record(rows, **about, commit=arguments.commit),
        "context": arguments.context,
        "batch": arguments.batch,
        "learning_rate": arguments.rate,
        "seed": arguments.seed,
        "data": data,
        "runs": runs,
    }


def describe(row: dict[str, Any]) -> str:
    """A run in a line."""
    late = "" if row["steps"] == row["of_steps"] else f" of {row['of_steps']}"
    text = (
        f"{NAMES[row['model']]:19} {row['parameters']:,} parameters, {row['steps']}{late} steps, "
        f"{row['tokens_per_second']:,.0f} tokens/s: {row['bits_per_byte']:.4f} bits/byte"
    )
    if row["per_token"]:
        lengths = {int(n): p for n, p in row["per_token"]["perplexity"].items()}
        bits = {n: math.log2(p) for n, p in lengths.items()}
        trained, longest = row["per_token"]["trained_context"], max(bits)
        text += f"; windows of {trained} {bits[trained]:.4f}, of {longest} {bits[longest]:.4f}"
    if row["needle"]:
        exact = np.mean(row["needle"]["exact_match"], axis=0)
        found = [f"{n} {x:.0%}" for n, x in zip(row["needle"]["lengths"], exact, strict=True)]
        text += f"; needle {', '.join(found)}"
    return text + (f"; FAILED: {', '.join(row['failed'])}" if row["failed"] else "")


# Pictures of all models


def plot(result: dict[str, Any], out: Path) -> list[Path]:
    """fox_text_loss.png, fox_text_per_token.png and fox_text_needle.png in `out`."""
    from tidegate import plots_context

    context = result["context"]
    where = f"{context} bytes ({result['machine']['device_name']})"
    drawn = [out / f"fox_text_{name}.png" for name in ("loss", "per_token", "needle")]
    _plot_losses(result, drawn[0], f"Training on documents, contexts of {where}")
    curves = {
        _label(row): PerToken.read(out / row["model"]) for row in result["runs"] if row["per_token"]
    }
    if curves:
        title = f"Loss by position in documents, trained on contexts of {where}"
        plots_context.plot_per_token(curves, drawn[1], title=title)
    if any(row["needle"] for row in result["runs"]):
        _plot_needles(result, drawn[2], f"Needle test, easy mode, trained on contexts of {where}")
    return [path for path in drawn if path.exists()]


def _label(row: dict[str, Any]) -> str:
    """A model's name, and how far it came where it was stopped before the others' last step."""
    name = NAMES[row["model"]]
    if row["steps"] == row["of_steps"]:
        return name
    return f"{name}, stopped at step {row['steps']} of {row['of_steps']}"


def _plot_losses(result: dict[str, Any], path: Path, title: str) -> None:
    from tidegate.plots import _STYLE, _save, pyplot
    from tidegate.plots_context import _COLORS

    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(8.0, 4.4), layout="constrained")
        for row, color in zip(result["runs"], _COLORS, strict=False):
            tokens, bits = zip(*row["curve"], strict=True)
            label = f"{_label(row)}: {bits[-1]:.4f}"
            axes.plot([t / 1e6 for t in tokens], bits, "o-", ms=2.5, color=color, label=label)
        best = min(bits for row in result["runs"] for _, bits in row["curve"])
        axes.set_ylim(best - 0.03, best + 0.8)
        axes.set_xlabel("bytes read, millions")
        axes.set_ylabel("validation, bits a byte (lower is better)")
        axes.legend(title="at the end")
        axes.set_title(title)
        _save(figure, path)


def _plot_needles(result: dict[str, Any], path: Path, title: str) -> None:
    from tidegate.plots import _STYLE, _save, pyplot

    rows = [row for row in result["runs"] if row["needle"]]
    kinds = {"exact_match": "whole answers", "answer_tokens": "bytes of answers"}
    with pyplot.rc_context({**_STYLE, "axes.grid": False}):
        figure, panels = pyplot.subplots(
            len(kinds),
            len(rows),
            figsize=(3.4 * len(rows) + 1.0, 6.4),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for line, (kind, what) in zip(panels, kinds.items(), strict=True):
            for axes, row in zip(line, rows, strict=True):
                found = row["needle"]
                image = axes.imshow(found[kind], vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
                axes.set_xticks(range(len(found["lengths"])), found["lengths"], rotation=60)
                axes.set_yticks(range(len(found["depths"])), [f"{d:.0%}" for d in found["depths"]])
                axes.set_title(f"{NAMES[row['model']]}: {what}", fontsize=10)
                beyond = [n for n, x in enumerate(found["lengths"]) if x > found["trained_context"]]
                if beyond:
                    axes.axvline(beyond[0] - 0.5, color="black", linestyle="--", linewidth=1.2)
        figure.supylabel("depth of the needle", fontsize=10)
        figure.supxlabel("length, bytes (right of the line: beyond training)", fontsize=10)
        figure.colorbar(image, ax=panels, label="share that matches")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        _save(figure, path)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("corpus", type=Path, help="folder of text files, or the .tar.xz of text_corpus.py")
    add("--out", type=Path, required=True, help="folder of the run folders, the JSON, the plots")
    add("--plots-only", action="store_true", help="draw an earlier --out again")
    add("--models", nargs="+", choices=NAMES, default=list(NAMES))
    add("--limit-minutes", type=float, default=60.0, help="of everything")
    add("--reserve-seconds", type=float, default=100.0, help="of it kept for the scores")
    add("--steps", type=int, default=0, help="0: as many as the slowest has time for")
    add("--width", type=int, default=384)
    add("--layers", type=int, default=6)
    add("--context", type=int, default=2048)
    add("--batch", type=int, default=32, help="contexts a step")
    add("--rate", type=float, default=1.5e-3)
    add("--seed", type=int, default=1)
    add("--length", type=int, default=8192, help="tokens of eval --per-token")
    add("--sequences", type=int, default=1024, help="of eval --per-token")
    add("--samples", type=int, default=8, help="a cell of the needle test")
    lengths = [512, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    add("--needle-lengths", type=int, nargs="+", default=lengths)
    add("--device", default="auto")
    add("--commit", help="what the JSON says where this is no checkout")
    one = parser.add_argument_group("one model, as the whole starts them; prints its row as JSON")
    one.add_argument("--one", choices=NAMES)
    one.add_argument("--stop-at", type=float, default=0.0, help="seconds since 1970")
    found = parser.parse_args(arguments)
    found.corpus, found.out = found.corpus.absolute(), found.out.absolute()
    return found


def ask(found: float) -> int:
    """Tells the process that started this one, which answers how many steps there are."""
    print(found, flush=True)
    return int(sys.stdin.readline())


def main() -> None:
    arguments = parse()
    if arguments.one:
        print(json.dumps(train_one(arguments, ask)))
        return
    if arguments.plots_only:
        result = read_json(arguments.out / JSON)
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        if arguments.corpus.is_file():
            folder = arguments.out / "corpus"
            if not folder.exists():
                text_corpus.unpack(arguments.corpus, folder)
            arguments.corpus = folder
        result = run_all(arguments)
    for row in result["runs"]:
        print(describe(row))
    plot(result, arguments.out)


if __name__ == "__main__":
    main()
