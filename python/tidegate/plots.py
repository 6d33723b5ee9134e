"""Plots of a run: loss curves, a task's accuracy, histograms of forget-gate values a layer (HGRN,
Figures 2-3) and token-mixing matrices (its Figure 4).

Each function draws one PNG that a reader who did not make it understands: what was trained, on
what, which way is better, and what the lines are.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import colors, pyplot, ticker

from .models._files import write_atomically

_UNTRAINED = "#555555"
_TRAIN, _VALID, _BASELINES = "#9aa7b8", "#1f5fa8", ("#b5542c", "#3d8a4e", "#7a4fa3")
_STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def plot_losses(
    metrics: Sequence[dict[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str = "Language-model loss while training",
    baselines: dict[str, float] | None = None,
    bytes_per_token: float | None = 1.0,
    asked: str = "token",
) -> None:
    """Training and validation loss against the tokens read, as a PNG.

    metrics: lines of metrics.jsonl. baselines: bits per byte by name, drawn as horizontal lines.
    bytes_per_token: turns nats a token into bits per byte; None plots nats a token, without
    baselines. asked: what a loss is the mean over: tokens, or a task's answers.

    Raises ValueError when there is no line of training to plot.
    """
    train = [row for row in metrics if row["kind"] == "train"]
    if not train:
        raise ValueError("plot_losses: metrics: expected lines of kind 'train', got none")
    scale = 1.0 if bytes_per_token is None else 1.0 / (math.log(2) * bytes_per_token)
    unit, factor = _token_unit(train[-1]["tokens"])
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(8.0, 4.8), layout="constrained")
        x = np.array([row["tokens"] for row in train]) / factor
        y = np.array([row["loss"] for row in train]) * scale
        axes.plot(x, y, color=_TRAIN, linewidth=1.2, label="training (mean of 10 steps)")
        y = _plot_validation(axes, metrics, factor, scale, y)
        lines = baselines if baselines and bytes_per_token is not None else {}
        for (name, value), color in zip(lines.items(), _BASELINES, strict=False):
            label = f"{name} ({value:.3f})"
            axes.axhline(value, color=color, linestyle="--", linewidth=1.3, label=label)
        _limit_losses(axes, y, list(lines.values()))
        axes.set_xlim(left=0.0)
        read = "bytes of text" if bytes_per_token == 1.0 else "tokens"
        axes.set_xlabel(f"{read} read in training{unit}")
        what = f"nats per {asked}" if bytes_per_token is None else "bits per byte"
        axes.set_ylabel(f"cross-entropy, {what} (lower is better)")
        axes.set_title(title)
        axes.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none")
        _save(figure, path)


def plot_accuracy(
    metrics: Sequence[dict[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str = "Accuracy while training",
    chance: float | None = None,
) -> None:
    """Share of a task's answers that are right against optimiser steps, as a PNG.

    metrics: lines of metrics.jsonl. chance: accuracy of guessing, drawn as a dashed line.

    Raises ValueError when there is no line with an accuracy.
    """
    if not any("accuracy" in row for row in metrics):
        raise ValueError("plot_accuracy: metrics: expected lines with an accuracy, got none")
    styles = {
        "train": ("-", _TRAIN, 1.2, "training (mean of 10 steps)"),
        "valid": ("o-", _VALID, 2.0, "validation on a part, ends at"),
        "final": ("*", "black", 2.0, "validation on all of it:"),
    }
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(8.0, 4.8), layout="constrained")
        for kind, (marks, color, width, label) in styles.items():
            rows = [row for row in metrics if row["kind"] == kind and "accuracy" in row]
            if not rows:
                continue
            y = np.array([row["accuracy"] for row in rows]) * 100.0
            if kind != "train":
                label = f"{label} {y[-1]:.1f}%"
            size = 13 if kind == "final" else 4.5
            axes.plot(
                [row["step"] for row in rows],
                y,
                marks,
                color=color,
                linewidth=width,
                markersize=size,
                label=label,
                zorder=2 if kind == "train" else 3,
            )
        if chance is not None:
            label = f"guessing ({chance:.1%})"
            axes.axhline(100 * chance, color=_BASELINES[0], linestyle="--", label=label)
        axes.set_ylim(0.0, 106.0)  # the star of 100 % is whole
        axes.set_xlim(left=0.0)
        axes.set_xlabel("optimiser steps")
        axes.set_ylabel("answers that are right, % (higher is better)")
        axes.set_title(title)
        axes.legend(loc="best", frameon=True, framealpha=0.9, edgecolor="none")
        _save(figure, path)


def _plot_validation(axes, metrics, factor: float, scale: float, losses: np.ndarray) -> np.ndarray:
    """Draws validations on the way and the last one, which reads more text, so that the two are not
    joined; returns `losses` and what was drawn."""
    for kind, style, label in (
        ("valid", "o-", "validation on a part, ends at"),
        ("final", "*", "validation on all of it:"),
    ):
        rows = [row for row in metrics if row["kind"] == kind]
        if not rows:
            continue
        x = np.array([row["tokens"] for row in rows]) / factor
        y = np.array([row["loss"] for row in rows]) * scale
        size, color = (4.5, _VALID) if kind == "valid" else (13, "black")
        label = f"{label} {y[-1]:.3f}"
        axes.plot(x, y, style, color=color, linewidth=2, markersize=size, label=label, zorder=3)
        losses = np.concatenate([losses, y])
    return losses


def _token_unit(largest: int) -> tuple[str, float]:
    for unit, factor in ((", billions", 1e9), (", millions", 1e6), (", thousands", 1e3)):
        if largest >= 2 * factor:
            return unit, factor
    return "", 1.0


def _limit_losses(axes, losses: np.ndarray, baselines: list[float]) -> None:
    """Shows all of every curve; on a logarithmic scale where the first steep drop would flatten
    what follows it."""
    values = [*losses[np.isfinite(losses)], *baselines]
    low, high = min(values), max(values)
    if low > 0 and high > 2 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
        room = (high / low) ** 0.06
        axes.set_ylim(low / room, high * room)
        return
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def plot_forget_gates(
    gates: Mapping[int, np.ndarray],
    path: str | os.PathLike[str],
    *,
    title: str = "Forget-gate values by layer",
    bounds: Mapping[int, float] | None = None,
    before: Mapping[int, np.ndarray] | None = None,
) -> None:
    """Histograms of forget-gate values, one panel a layer, as a PNG.

    gates: values in [0, 1] by number of the layer (`tidegate.training.forget_gates`). bounds: the
    mean lower bound of layers that have one, drawn as a dotted line. before: the gates of the
    untrained model, drawn as an outline.

    Raises ValueError when there is no layer.
    """
    if not gates:
        raise ValueError("plot_forget_gates: gates: expected at least one layer, got none")
    columns = min(4, len(gates)) if len(gates) != 6 else 3
    rows = -(-len(gates) // columns)
    edges = np.linspace(0.0, 1.0, 51)
    with pyplot.rc_context(_STYLE):
        figure, panels = pyplot.subplots(
            rows,
            columns,
            figsize=(2.7 * columns + 0.8, 2.5 * rows + 1.2),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, (layer, values) in zip(panels.flat, gates.items(), strict=False):
            flat = np.asarray(values, dtype=np.float64).ravel()
            share = np.histogram(flat, edges)[0] * (100.0 / flat.size)
            bars = {"align": "edge", "color": _VALID, "label": "trained"}
            axes.bar(edges[:-1], share, width=np.diff(edges), **bars)
            if before is not None:
                first = np.asarray(before[layer], dtype=np.float64).ravel()
                outline = np.histogram(first, edges)[0] * (100.0 / first.size)
                axes.stairs(outline, edges, color=_UNTRAINED, linewidth=1.2, label="untrained")
            median = float(np.median(flat))
            axes.axvline(median, color=_BASELINES[0], linewidth=1.4, label="median")
            said = f"mean {flat.mean():.2f}, median {median:.2f}"
            if bounds is not None and layer in bounds:
                bound, label = bounds[layer], "mean lower bound"
                axes.axvline(bound, color="black", linestyle=":", linewidth=1.4, label=label)
                said += f", bound {bound:.2f}"
            axes.set_title(f"layer {layer}\n{said}", fontsize=9)
            axes.set_xlim(0.0, 1.0)
        for axes in panels.flat[len(gates) :]:
            axes.set_visible(False)
        for axes in panels.flat[max(0, len(gates) - columns) : len(gates)]:  # the lowest ones
            axes.set_xlabel("forget gate", fontsize=9)
            axes.tick_params(labelbottom=True)
        meaning = "forget gate: 0 forgets at once, 1 keeps for ever"
        _legend_below(figure, panels.flat, title=meaning)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        figure.supylabel("share of values, % (bins of 0.02)", fontsize=10)
        _save(figure, path)


def plot_gate_parts(
    parts: Mapping[int, tuple[np.ndarray, np.ndarray]],
    path: str | os.PathLike[str],
    *,
    title: str = "Where the gate's logits come from",
) -> None:
    """Histograms of what input and state give to the gate, a column a layer, as a PNG: above after
    the sigmoid, as if each were alone, below before it.

    parts: by number of the layer, from the input and from the state
    (`tidegate.training.gate_parts`).

    Raises ValueError when there is no layer.
    """
    if not parts:
        raise ValueError("plot_gate_parts: parts: expected at least one layer, got none")
    sources = (("from the input x", _VALID), ("from the state h", _BASELINES[0]))
    with pyplot.rc_context(_STYLE):
        figure, panels = pyplot.subplots(
            2,
            len(parts),
            figsize=(2.7 * len(parts) + 0.9, 5.4),
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        for column, (layer, both) in enumerate(parts.items()):
            flat = [np.asarray(values, dtype=np.float64).ravel() for values in both]
            widest = max(1e-3, *(np.quantile(np.abs(values), 0.999) for values in flat))
            for values, (label, color) in zip(flat, sources, strict=True):
                views = ((1 / (1 + np.exp(-values)), (0.0, 1.0)), (values, (-widest, widest)))
                for axes, (shown, limits) in zip(panels[:, column], views, strict=True):
                    edges = np.linspace(*limits, 51)
                    share = np.histogram(shown, edges)[0] * (100.0 / shown.size)
                    axes.stairs(share, edges, fill=True, alpha=0.55, color=color, label=label)
                    axes.set_xlim(*limits)
            panels[0, column].set_title(f"layer {layer}", fontsize=10)
            panels[0, column].set_xlabel("sigmoid of the part", fontsize=9)
            panels[1, column].set_xlabel("part of the logit", fontsize=9)
        _legend_below(figure, panels[:1, 0])
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        figure.supylabel("share of values, % (50 bins)", fontsize=10)
        _save(figure, path)


def plot_token_mixing(
    matrices: Mapping[int, np.ndarray],
    path: str | os.PathLike[str],
    *,
    title: str = "Token mixing by layer",
    heads: int = 4,
    tokens: int | None = None,
) -> None:
    """Token-mixing matrices as images, one row of panels a layer, as a PNG.

    matrices: ``[H, P, P]`` by number of the layer (`tidegate.training.token_mixing`); of more than
    `heads` heads the first ones. tokens: how many they are of; None: P. Colours are magnitudes on a
    logarithmic scale over four decades below the largest value of a layer.

    Raises ValueError when there is no layer.
    """
    if not matrices:
        raise ValueError("plot_token_mixing: matrices: expected at least one layer, got none")
    columns = min(heads, max(len(matrix) for matrix in matrices.values()))
    alone = columns == 1
    across = min(4, len(matrices)) if alone else columns
    down = -(-len(matrices) // across) if alone else len(matrices)
    with pyplot.rc_context({**_STYLE, "axes.grid": False}):
        figure, panels = pyplot.subplots(
            down,
            across,
            figsize=(3.0 * across + 0.9, 2.8 * down + 0.9),
            squeeze=False,
            layout="constrained",
        )
        for axes in panels.flat:
            axes.set_visible(False)
        for row, (layer, matrix) in enumerate(matrices.items()):
            shown = np.abs(np.asarray(matrix))[:columns]
            high = shown.max() if shown.max() > 0 else 1.0
            scale = colors.LogNorm(vmin=high * 1e-4, vmax=high, clip=True)
            for head, values in enumerate(shown):
                axes = panels.flat[row] if alone else panels[row][head]
                axes.set_visible(True)
                later = np.triu(np.ones(values.shape, dtype=bool), 1)
                end = (len(values) if tokens is None else tokens) - 0.5
                image = axes.imshow(
                    np.ma.masked_array(values, later),
                    norm=scale,
                    cmap="magma",
                    interpolation="nearest",
                    extent=(-0.5, end, end, -0.5),
                )
                name = f"layer {layer}" if len(shown) == 1 else f"layer {layer}, head {head + 1}"
                axes.set_title(name, fontsize=10)
                if alone or head + 1 == len(shown):
                    bar = figure.colorbar(image, ax=axes, shrink=0.85)
                    bar.set_label("weight (mean of channels)" if alone else "|weight|", fontsize=8)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        what = "the state" if alone else "the output"
        figure.supxlabel(f"token s: how much of it is in {what} at t", fontsize=10)
        figure.supylabel("token t", fontsize=10)
        _save(figure, path)


def _legend_below(figure, panels: Iterable[pyplot.Axes], title: str | None = None) -> None:
    """One legend of all that any panel shows, outside them: what they show reaches into every
    corner."""
    shown = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(shown.values()),
        list(shown),
        loc="outside lower center",
        ncols=len(shown),
        fontsize=9,
        title=title,
        title_fontsize=10,
    )


def _save(figure, path: str | os.PathLike[str]) -> None:
    """Writes the PNG at once, so that a kill leaves the earlier one."""
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=130, format="png")
    finally:
        pyplot.close(figure)
    write_atomically(Path(path), content.getbuffer())
