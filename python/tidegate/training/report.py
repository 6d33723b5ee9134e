"""What is done with a run when its training ends: final score, plots, tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..models import CausalLM, SequenceClassifier
from .checkpoint import LOSS_PLOT, METRICS_FILE, RunFolder
from .config import read_run
from .errors import UserError
from .evaluate import Score
from .metrics import load_metrics, read_metrics
from .probes import forget_gates, gate_parts, token_mixing, windows_of
from .runs import Run
from .scoring import corpus_of_run
from .task_corpus import TaskCorpus
from .trained import initial_model, load_trained

ACCURACY_PLOT = "accuracy.png"
GATES_PLOT = "forget_gates.png"
PARTS_PLOT = "gate_parts.png"
MIXING_PLOT = "token_mixing.png"
# For pictures of token mixing: what is looked at, what may be asked for, and a picture's size and
# heads. Weights of all pairs of tokens are computed: 32 MiB a head of 2048.
MIXING_TOKENS, MIXING_LIMIT, MIXING_PIXELS, MIXING_HEADS = 256, 2048, 512, 4


def finish(run: Run) -> Score:
    """Scores the whole validation split and writes model/; once, however often it is called, and by
    all processes of a run together."""
    group = run.trainer.group
    with group.watch(lambda: "while the run was finished"):
        score = group.first(lambda: _recorded_score(run))
        if score is None:
            score = run.trainer.validate()
            run.trainer.save()
        run.export()
        group.everywhere(lambda: None)
    return score


def _recorded_score(run: Run) -> Score | None:
    if not run.folder.metrics.exists():
        return None
    last = (read_metrics(run.folder.metrics) or [{}])[-1]
    if last.get("kind") != "final" or last["step"] != run.trainer.position.step:
        return None
    bits = last.get("bits_per_byte")
    return Score(last["loss"], last["valid_tokens"], bits, last.get("accuracy"))


def _metrics_of(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that make sense; how many lines do not is said on stderr.

    Raises:
        UserError: no row is of a training step.
    """
    found = load_metrics(folder.metrics)
    lines = "1 line makes" if found.left_out == 1 else f"{found.left_out} lines make"
    problem = f"{lines} no sense, left out" if found.left_out else ""
    if not any(row["kind"] == "train" for row in found.rows):
        end = f": {problem}" if problem else ""
        raise UserError(f"plot: {folder.metrics} has no training steps yet{end}")
    if problem:
        print(f"{folder.metrics}: {problem}", file=sys.stderr)
    return found.rows


def plot_run(
    path: str | Path, *, baselines: dict[str, float] | None = None, device: str = "auto"
) -> list[Path]:
    """Draws loss.png, for tasks accuracy.png, and for models with data-dependent forget gates
    forget_gates.png; without the text or with another one, which is said on stderr, not the gates.

    Returns the files. Raises UserError when the folder holds no run, or nothing to plot yet.
    """
    from .. import plots

    folder = RunFolder(path)
    if not folder.metrics.exists():
        raise UserError(f"plot: {folder.path} holds no {METRICS_FILE}")
    values = read_run(folder.config)
    metrics = _metrics_of(folder)
    data = values["data"]
    name = _name_of(values)
    source = Path(data["name"]).name
    text = "the Python standard library's sources" if source == "stdlib" else source
    sizes = data["valid_bytes"], data.get("valid_tokens")
    bytes_per_token = sizes[0] / sizes[1] if all(sizes) else None
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
    if is_task and any("accuracy" in row for row in metrics):
        drawn.append(folder.path / ACCURACY_PLOT)
        plots.plot_accuracy(metrics, drawn[-1], title=title, chance=data["chance"])
    if folder.has_checkpoint:
        try:
            seen = _examined(folder, values, device)
        except _UnknownText as error:
            print(f"{GATES_PLOT}: not drawn: {error}", file=sys.stderr)
        else:
            drawn += _plot_forget_gates(folder, values, seen)
    return drawn


def plot_gates(path: str | Path, device: str = "auto") -> list[Path]:
    """Draws forget_gates.png, the values a layer before and after training, and, where gates read
    the state, gate_parts.png, what comes from the input and what from the state.

    Raises UserError when the folder holds no run with a checkpoint, or no layer of its model has a
    data-dependent forget gate.
    """
    from .. import plots

    folder = _with_checkpoint(path)
    values = read_run(folder.config)
    seen = _examined(folder, values, device)
    drawn = _plot_forget_gates(folder, values, seen)
    if not drawn:
        raise UserError(f"plot: no layer of {folder.path} has a data-dependent forget gate")
    if parts := gate_parts(seen.model, seen.ids, seen.lengths):
        drawn.append(folder.path / PARTS_PLOT)
        plots.plot_gate_parts(
            _by_number(parts),
            drawn[-1],
            title=f"What gates read, on {seen.what}: {_name_of(values)}",
        )
    return drawn


def plot_token_mixing(
    path: str | Path,
    *,
    layers: Sequence[int] | None = None,
    tokens: int | None = None,
    device: str = "auto",
) -> Path:
    """Draws token_mixing.png: the token-mixing matrix of every layer, or of some, counted from 1.

    tokens: how much of the validation text (of its first example, for a task) is read, at most
    2048; None: 256, or what there is. Above 512 a pixel is the largest weight of a tile.

    Raises UserError when the folder holds no run with a checkpoint, there are not as many tokens,
    or a layer is not there or has no such matrix.
    """
    from .. import plots

    folder = _with_checkpoint(path)
    values = read_run(folder.config)
    model = load_trained(str(folder.path), device).model
    ids = _validation_ids(str(folder.path), values, rows=1, context=MIXING_LIMIT)[0]
    most = min(ids.size(1), MIXING_LIMIT)
    tokens = min(most, MIXING_TOKENS) if tokens is None else tokens
    if not 2 <= tokens <= most:
        raise UserError(f"plot: tokens: expected 2 to {most}, got {tokens}")
    ids = ids[:, :tokens]
    count = len(model.blocks)
    chosen = range(1, count + 1) if layers is None else layers
    if wrong := [layer for layer in chosen if not 1 <= layer <= count]:
        raise UserError(f"plot: layers: expected numbers from 1 to {count}, got {wrong[0]}")
    try:
        matrices = token_mixing(
            model, ids, [layer - 1 for layer in chosen], heads=MIXING_HEADS, pixels=MIXING_PIXELS
        )
    except ValueError as error:
        raise UserError(f"plot: {error}") from error
    lacking = [layer for layer in chosen if layer - 1 not in matrices]
    if not matrices or (layers is not None and lacking):
        raise UserError(
            f"plot: {mixer_in_words(values['model']['mixer'])} has no token-mixing matrix in layer "
            f"{lacking[0]}"
        )
    drawn = folder.path / MIXING_PLOT
    plots.plot_token_mixing(
        _by_number(matrices),
        drawn,
        title=f"Token mixing over {tokens:,} tokens: {_name_of(values)}",
        heads=MIXING_HEADS,
        tokens=tokens,
    )
    return drawn


def _with_checkpoint(path: str | Path) -> RunFolder:
    folder = RunFolder(path)
    if not folder.has_checkpoint:
        raise UserError(f"plot: {folder.path} holds no {folder.checkpoint.name}")
    return folder


def _name_of(values: dict) -> str:
    """Mixer and size of a run's model."""
    model = model_name(values["model"]["mixer"])
    return f"{model}, {count_in_words(values['parameters'])} parameters"


def _validation_ids(
    path: str, values: dict, *, rows: int, context: int
) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """ids ``[B, T]`` to look at a model with, their lengths where they are padded, and what they
    are: `rows` windows of the validation text, or examples of the task."""
    corpus = corpus_of_run(path)
    if isinstance(corpus, TaskCorpus):
        batch = next(corpus.valid_batches(torch.device("cpu"), rows * corpus.task.length))
        return batch.ids, batch.lengths, "validation examples"
    ids = windows_of(corpus.valid, rows=rows, context=min(context, len(corpus.valid) - 1))
    return ids, None, "validation text"


class _UnknownText(UserError):
    """What a run was trained on is gone, or is not what it was."""


class _Examined(NamedTuple):
    """A trained model and what its gates are looked at with; see `_validation_ids`."""

    model: CausalLM | SequenceClassifier
    ids: torch.Tensor
    lengths: torch.Tensor | None
    what: str


def _examined(folder: RunFolder, values: dict, device: str) -> _Examined:
    path, context = str(folder.path), values["train"]["context"]
    model = load_trained(path, device).model
    try:
        text = _validation_ids(path, values, rows=8, context=context)
    except UserError as error:
        raise _UnknownText(str(error)) from error
    return _Examined(model, *text)


def _plot_forget_gates(folder: RunFolder, values: dict, seen: _Examined) -> list[Path]:
    """Draws forget_gates.png; nothing where no layer has a data-dependent forget gate."""
    from .. import plots

    model = seen.model
    gates = forget_gates(model, seen.ids, seen.lengths)
    if not gates:
        return []
    untrained = _untrained(values, model)
    gammas = {layer: gamma for layer, gamma in enumerate(model.gammas()) if gamma is not None}
    bounds = {layer: float(gammas[layer].detach().mean()) for layer in gates if layer in gammas}
    path = folder.path / GATES_PLOT
    plots.plot_forget_gates(
        _by_number(gates),
        path,
        title=f"Forget gates on {seen.what}: {_name_of(values)}",
        bounds=_by_number(bounds),
        before=untrained and _by_number(forget_gates(untrained, seen.ids, seen.lengths)),
    )
    return [path]


def _untrained(values: dict, model: CausalLM | SequenceClassifier) -> torch.nn.Module | None:
    """The run's model before its first step, where `model` is; None, which is said on stderr, where
    the weights that it began with are gone or others: the trained ones can be drawn without."""
    try:
        untrained = initial_model(values, type(model))
    except UserError as error:
        print(f"{GATES_PLOT}: drawn without the gates before training: {error}", file=sys.stderr)
        return None
    return untrained.to(next(model.parameters()).device)


def _by_number(layers: Mapping[int, Any]) -> dict[int, Any]:
    """What belongs to layers counted from 0, by the number that people give them."""
    return {layer + 1: value for layer, value in layers.items()}


# What the papers call a model over a mixer.
_MODEL_NAMES = {
    "hgrn": "HGRN",
    "hgrn2": "HGRN2",
    "gla": "GLA",
    "lru": "LRU",
    "slru": "SLRU",
    "rwkv4": "RWKV-4",
    "gated-linear-rnn": "gated linear RNN",
    "gated-rnn": "gated RNN",
    "fox": "FoT",
    "fox-pro": "FoT (Pro)",
    "transformer": "Transformer",
    "transformer-pro": "Transformer (Pro)",
}


def model_name(mixer: str | list[str]) -> str:
    """ "FoT" of the mixer "fox"; in titles."""
    names = [mixer] if isinstance(mixer, str) else dict.fromkeys(mixer)
    return " + ".join(_MODEL_NAMES.get(name, name) for name in names)


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
