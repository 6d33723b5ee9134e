"""Plots of what a model makes of its context: loss by position, the needle test, attention maps."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .plots import _STYLE, _save, colors, pyplot

if TYPE_CHECKING:
    from .training.maps import HeadMap
    from .training.needle import NeedleScores
    from .training.per_token import PerToken

_COLORS = ("#1f5fa8", "#b5542c", "#3d8a4e", "#7a4fa3", "#5b6570", "#c08a1e")


def plot_per_token(
    curves: Mapping[str, PerToken], path: str | os.PathLike[str], *, title: str, window: int = 101
) -> None:
    """L(i), smoothed over `window` tokens, and P(l) against the position, by name, as a PNG
    (Forgetting Transformer, Figure 2). Raises ValueError when there is no curve."""
    if not curves:
        raise ValueError("plot_per_token: curves: expected at least one, got none")
    with pyplot.rc_context(_STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.0, 4.4), layout="constrained")
        for (name, curve), color in zip(curves.items(), itertools.cycle(_COLORS), strict=False):
            x = np.arange(1, len(curve.losses) + 1)
            left.plot(x, curve.smoothed(window), color=color, linewidth=1.4, label=name)
            right.plot(x, curve.perplexities, color=color, linewidth=1.4, label=name)
        for trained in {curve.trained for curve in curves.values()} - {None}:
            for axes in (left, right):
                axes.axvline(trained, color="black", linestyle="--", linewidth=1.0)
                axes.annotate(
                    "trained on up to here",
                    (trained, 1.0),
                    xycoords=("data", "axes fraction"),
                    xytext=(4, -10),
                    textcoords="offset points",
                    fontsize=8,
                )
        left.set_ylabel("loss L(i), nats (lower is better)")
        right.set_ylabel("perplexity P(l) (lower is better)")
        left.set_xlabel(f"position i, tokens (mean over {window} positions)")
        right.set_xlabel("context length l, tokens")
        for axes in (left, right):
            _limit(axes, max((c.trained for c in curves.values() if c.trained), default=None))
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)))
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        _save(figure, path)


def _limit(axes, trained: int | None) -> None:
    """Cuts off the steep drop of the first tokens, and what rises far above all that the models do
    within the context of training: they would flatten the rest."""
    lines = [line.get_ydata() for line in axes.get_lines() if len(line.get_ydata()) > 2]
    kept = np.concatenate([y[len(y) // 50 :] for y in lines] or [np.zeros(1)])
    kept = kept[np.isfinite(kept)]
    if kept.size:
        low, high = float(kept.min()), float(kept.max())
        within = [y[len(y) // 50 : trained].max(initial=low) for y in lines] if trained else []
        if within:
            high = min(high, low + 1.5 * (float(max(within)) - low))
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + 2 * margin)
    axes.set_xlim(left=0)


def plot_needle(scores: NeedleScores, path: str | os.PathLike[str], *, title: str) -> None:
    """Exact-match scores over depth x length as a heat map, a PNG (Figure 4)."""
    rows, columns = scores.exact.shape
    with pyplot.rc_context({**_STYLE, "axes.grid": False}):
        width = max(2.6 + 0.75 * columns, 0.4 + 0.1 * len(title))  # a long title fits too
        size = (width, 1.8 + 0.42 * rows)
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        image = axes.imshow(scores.exact, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for row in range(rows):
            for column in range(columns):
                text = f"{scores.exact[row, column]:.2f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=8)
        axes.set_xticks(range(columns), [f"{n:,}" for n in scores.lengths])
        axes.set_yticks(range(rows), [f"{d:.0%}" for d in scores.depths])
        beyond = [i for i, n in enumerate(scores.lengths) if scores.trained and n > scores.trained]
        where = ""
        if len(beyond) == columns:
            where = "\n(all beyond training)"
        elif beyond:
            axes.axvline(beyond[0] - 0.5, color="black", linestyle="--", linewidth=1.2)
            where = "\n(right of the line: beyond training)"
        axes.set_xlabel(f"length, tokens{where}")
        axes.set_ylabel("depth of the needle")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        figure.colorbar(image, ax=axes, label="answers that match")
        _save(figure, path)


def plot_head_maps(maps: Sequence[HeadMap], path: str | os.PathLike[str], *, title: str) -> None:
    """The forget-gate matrix (above) and the attention map (below) of each head, a PNG (Figure 3).
    Raises ValueError when there is no head."""
    if not maps:
        raise ValueError("plot_head_maps: maps: expected at least one head, got none")
    has_gates = any(found.forget is not None for found in maps)
    rows = 1 + has_gates
    with pyplot.rc_context({**_STYLE, "axes.grid": False}):
        figure, panels = pyplot.subplots(
            rows,
            len(maps),
            figsize=(2.7 * len(maps) + 1.0, 2.8 * rows + 0.6),
            squeeze=False,
            layout="constrained",
        )
        images = {}
        for column, found in enumerate(maps):
            tokens = found.tile * len(found.attention)
            kinds = [("attention", found.attention)]
            if has_gates:
                kinds.insert(0, ("F", found.forget))
            for row, (kind, values) in enumerate(kinds):
                axes = panels[row, column]
                if values is None:
                    axes.set_visible(False)
                    continue
                hidden = np.ma.masked_where(np.triu(np.ones_like(values), 1) > 0, values)
                # Weights of far keys are small: colours go by their root.
                norm = colors.PowerNorm(1.0 if kind == "F" else 0.5, vmin=0, vmax=1)
                extent = (0, tokens, tokens, 0)
                images[row] = axes.imshow(hidden, norm=norm, cmap="viridis", extent=extent)
                name = f"{kind}: layer {found.layer}, head {found.head}"
                axes.set_title(name, fontsize=9)
                axes.tick_params(labelsize=7)
        figure.supxlabel("key, token", fontsize=9)
        figure.supylabel("query, token", fontsize=9)
        labels = ["largest F of a tile"] * has_gates + ["largest weight of a tile"]
        for row, image in images.items():  # each has a scale of its own
            figure.colorbar(image, ax=panels[row], label=labels[row], shrink=0.8)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        _save(figure, path)
