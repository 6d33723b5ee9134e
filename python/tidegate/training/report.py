"""What is done with a run when its training ends: final score, plots, tables."""

from __future__ import annotations

from pathlib import Path

import torch

from .checkpoint import METRICS_FILE, RunFolder, read_metrics
from .config import read_json
from .errors import UserError
from .evaluate import Score
from .gates import forget_gates, windows_of
from .runs import Run, load_trained
from .scoring import corpus_of_run
from .task_corpus import TaskCorpus

LOSS_PLOT = "loss.png"
ACCURACY_PLOT = "accuracy.png"
GATES_PLOT = "forget_gates.png"


def finish(run: Run) -> Score:
    """Scores the whole validation split and writes model/; once, however often it is called."""
    score = _recorded_score(run)
    if score is None:
        score = run.trainer.validate()
        run.trainer.save()
        run.export()
    return score


def _recorded_score(run: Run) -> Score | None:
    if not run.folder.metrics.exists() or not run.folder.model.is_dir():
        return None
    last = (read_metrics(run.folder.metrics) or [{}])[-1]
    if last.get("kind") != "final" or last["step"] != run.trainer.position.step:
        return None
    return Score(last["loss"], last["valid_tokens"], last["bits_per_byte"], last.get("accuracy"))


def plot_run(
    path: str | Path, *, baselines: dict[str, float] | None = None, device: str = "auto"
) -> list[Path]:
    """Draws loss.png, for tasks accuracy.png, and for models with data-dependent forget gates
    forget_gates.png.

    Returns the files. Raises UserError when the folder holds no run, or nothing to plot yet.
    """
    from .. import plots

    folder = RunFolder(path)
    if not folder.metrics.exists():
        raise UserError(f"plot: {folder.path} holds no {METRICS_FILE}")
    values = read_json(folder.config)
    metrics = read_metrics(folder.metrics)
    if not any(row["kind"] == "train" for row in metrics):
        raise UserError(f"plot: {folder.metrics} has no training steps yet")
    data, model = values["data"], values["model"]
    mixer = mixer_in_words(model["mixer"]).upper()
    name = f"{mixer}, {count_in_words(values['parameters'])} parameters"
    source = Path(data["name"]).name
    text = "the Python standard library's sources" if source == "stdlib" else source
    bytes_per_token = data["valid_bytes"] / data["valid_tokens"] if data["valid_bytes"] else None
    title = f"{name}, learning {text}"
    is_task = data.get("chance") is not None
    drawn = [folder.path / LOSS_PLOT]
    plots.plot_losses(
        metrics,
        drawn[0],
        title=title,
        baselines=baselines,
        bytes_per_token=bytes_per_token,
        asked="answer" if is_task else "token",
    )
    if is_task:
        drawn.append(folder.path / ACCURACY_PLOT)
        plots.plot_accuracy(metrics, drawn[-1], title=title, chance=data["chance"])
    if folder.checkpoint.exists():
        gates_plot = _plot_gates(folder, values, name, device)
        drawn += [gates_plot] if gates_plot else []
    return drawn


def _plot_gates(folder: RunFolder, values: dict, name: str, device: str) -> Path | None:
    from .. import plots

    trained = load_trained(str(folder.path), device)
    corpus = corpus_of_run(str(folder.path))
    if isinstance(corpus, TaskCorpus):
        batch = next(corpus.valid_batches(torch.device("cpu"), 8 * corpus.task.length))
        what, gates = "validation examples", forget_gates(trained.model, batch.ids, batch.lengths)
    else:
        context = min(values["train"]["context"], len(corpus.valid) - 1)
        ids = windows_of(corpus.valid, context=context)
        what, gates = "validation text", forget_gates(trained.model, ids)
    if not gates:
        return None
    bounds = [
        None if gamma is None else float(gamma.detach().mean()) for gamma in trained.model.gammas()
    ]
    path = folder.path / GATES_PLOT
    plots.plot_forget_gates(
        gates,
        path,
        title=f"Forget gates on {what}: {name}",
        bounds=None if None in bounds else bounds,
    )
    return path


def mixer_in_words(mixer: str | list[str]) -> str:
    """ "hgrn", or "hgrn + gated-linear-rnn" where layers differ."""
    return mixer if isinstance(mixer, str) else " + ".join(dict.fromkeys(mixer))


def count_in_words(count: int) -> str:
    """2698752 -> "2.7M"; 9600 -> "9,600"."""
    return f"{count / 1e6:.1f}M" if count >= 1_000_000 else f"{count:,}"


def table(rows: list[tuple[str, float]]) -> str:
    """Names and bits per byte, the lowest first."""
    width = max(len(name) for name, _ in rows)
    ordered = sorted(rows, key=lambda row: row[1])
    return "\n".join(f"  {name:<{width}}  {value:6.3f}" for name, value in ordered)
