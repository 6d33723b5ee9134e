"""Pictures of benchmarks: what models cost over the context, and times of single ops."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from .plots import _STYLE, pyplot, ticker
from .training.errors import UserError
from .training.report import model_name

_MARKS = "osD^vPX*<>hd"


def plot_models(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Speed and memory of models over the context, of what bench_models wrote: training and
    decoding, tokens a second; memory of a training step, and of the state of a sequence. Models of
    flash-linear-attention, where the record has them, are dashed.

    Raises:
        UserError: no row has a number.
    """
    baselines = [
        row | {"mixer": f"fla: {row['mixer']}"} for row in record.get("fla", {}).get("rows", [])
    ]
    rows = [row for row in [*record["rows"], *baselines] if "train" in row or "decode" in row]
    if not rows:
        raise UserError("bench: plot: expected rows that were measured, got none")
    panels = (
        ("training, tokens/s (higher is better)", lambda row: row["train"]["tokens_per_s"]),
        ("peak memory of a step, GiB", lambda row: row["train"]["peak_bytes"] / 2**30),
        (
            f"decoding, tokens/s of a batch of {record['tokens']:,} / context",
            lambda row: row["decode"]["tokens_per_s"],
        ),
        (
            "state of a sequence, MiB (lower is better)",
            lambda row: row["decode"]["state_bytes"] / row["batch"] / 2**20,
        ),
    )
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    colors = pyplot.get_cmap("tab20")
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(2, 2, figsize=(11.0, 7.6), layout="constrained")
        for panel, (label, value_of) in zip(axes.flat, panels, strict=True):
            for place, mixer in enumerate(mixers):
                points = [_point(row, value_of) for row in rows if row["mixer"] == mixer]
                points = [point for point in points if point is not None]
                if points:
                    panel.plot(
                        *zip(*points, strict=True),
                        marker=_MARKS[place % len(_MARKS)],
                        linestyle="--" if mixer.startswith("fla: ") else "-",
                        color=colors(place % 20),
                        markersize=5,
                        linewidth=1.4,
                        label=model_name(mixer),
                    )
            panel.set_xscale("log", base=2)
            _scale(panel)
            contexts = sorted({row["context"] for row in rows})
            panel.xaxis.set_major_locator(ticker.FixedLocator(contexts))
            panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
            panel.set_xlabel("context, tokens")
            panel.set_ylabel(label)
        handles, labels = max((p.get_legend_handles_labels() for p in axes.flat), key=len)
        figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=9)
        machine = record["machine"]["name"]
        what = f"{record['size']}, {record['precision']}, {record['tokens']:,} tokens a step"
        figure.suptitle(f"Models of equal size ({what}) on {machine}", x=0.01, ha="left")
        _save_any(figure, path)


def _scale(panel: Any) -> None:
    """Begins at zero, or is logarithmic where the largest number is many times the least."""
    values = [value for line in panel.get_lines() for value in line.get_ydata() if value > 0]
    if values and max(values) > 4 * min(values):
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        panel.set_ylim(0.0, 1.08 * max(values, default=1.0))
    panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:,g}"))


def _point(row: dict[str, Any], value_of: Any) -> tuple[int, float] | None:
    try:
        return row["context"], float(value_of(row))
    except (KeyError, TypeError):  # it failed, or the system does not say
        return None


def plot_times(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Times of Google Benchmark's results as bars, in the order in which they ran.

    Raises:
        UserError: there is none.
    """
    units = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
    rows = [
        (b["name"], b["real_time"] * units[b["time_unit"]])
        for b in record["benchmarks"]
        if "real_time" in b and "error_occurred" not in b
    ]
    if not rows:
        raise UserError("bench: plot: expected benchmarks that were measured, got none")
    with pyplot.rc_context({**_STYLE, "axes.grid.axis": "x"}):
        size = (10.0, 1.2 + 0.24 * len(rows))
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        axes.barh(np.arange(len(rows)), [time for _, time in rows], color="#1f5fa8")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel("time, microseconds (lower is better)")
        axes.set_ylabel("benchmark")
        host = record["context"].get("gpu") or record["context"].get("host_name", "this machine")
        axes.set_title(f"Times on {host}")
        _save_any(figure, path)


def _save_any(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a PNG, SVG or PDF, as the name ends."""
    kind = Path(path).suffix.removeprefix(".") or "png"
    if kind not in ("png", "svg", "pdf"):
        raise UserError(f"bench: plot: expected a name that ends in .png, .svg or .pdf, got {path}")
    try:
        figure.savefig(path, dpi=130, format=kind)
    finally:
        pyplot.close(figure)
