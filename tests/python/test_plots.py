"""Every picture says what it shows: a title, both axes, and what its lines or colours are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tidegate import plots, plots_context
from tidegate.training.maps import HeadMap
from tidegate.training.needle import NeedleScores
from tidegate.training.per_token import PerToken

RANDOM = np.random.default_rng(0)
GATES = {layer: RANDOM.random((4, 9)) for layer in (1, 2, 5)}
PARTS = {layer: (RANDOM.normal(size=(4, 9)), RANDOM.normal(size=(4, 9))) for layer in (1, 2)}
METRICS = [
    {"kind": "train", "step": 10, "tokens": 6_000, "loss": 5.0, "accuracy": 0.2},
    {"kind": "valid", "step": 10, "tokens": 6_000, "loss": 4.9, "accuracy": 0.3},
    {"kind": "train", "step": 20, "tokens": 12_000, "loss": 4.0, "accuracy": 0.4},
    {"kind": "final", "step": 20, "tokens": 12_000, "loss": 3.9, "accuracy": 0.5},
]
TEXT = [{k: v for k, v in row.items() if k != "accuracy"} for row in METRICS]
MAP = np.tril(RANDOM.random((6, 6)))


def mixing(heads: int, layers: int = 2) -> dict[int, np.ndarray]:
    return {layer + 1: np.tril(RANDOM.random((heads, 7, 7))) for layer in range(layers)}


# Each picture, and what is beside it: names of a legend, or the label of a colour bar.
PICTURES: dict[str, tuple[Callable[..., None], tuple, dict, list[str]]] = {
    "losses": (
        plots.plot_losses,
        (TEXT,),
        {"baselines": {"gzip -9": 2.5}},
        [
            "training (mean of 10 steps)",
            "validation on a part, ends at 7.069",
            "validation on all of it: 5.627",
            "gzip -9 (2.500)",
        ],
    ),
    "losses-of-a-task": (
        plots.plot_losses,
        (METRICS[:1],),
        {"bytes_per_token": None, "asked": "answer"},
        ["training (mean of 10 steps)"],
    ),
    "accuracy": (
        plots.plot_accuracy,
        (METRICS,),
        {"chance": 0.1},
        [
            "training (mean of 10 steps)",
            "validation on a part, ends at 30.0%",
            "validation on all of it: 50.0%",
            "guessing (10.0%)",
        ],
    ),
    "gates": (
        plots.plot_forget_gates,
        (GATES,),
        {"bounds": {2: 0.25}, "before": GATES},
        ["untrained", "median", "trained", "mean lower bound"],
    ),
    "gates-of-six-layers": (
        plots.plot_forget_gates,
        (dict.fromkeys(range(1, 7), GATES[1]),),
        {},
        ["median", "trained"],
    ),
    "gates-of-five-layers": (
        plots.plot_forget_gates,
        (dict.fromkeys(range(1, 6), GATES[1]),),
        {},
        ["median", "trained"],
    ),
    "gate-parts": (plots.plot_gate_parts, (PARTS,), {}, ["from the input x", "from the state h"]),
    "token-mixing": (plots.plot_token_mixing, (mixing(1),), {}, ["weight (mean of channels)"] * 2),
    "token-mixing-of-heads": (plots.plot_token_mixing, (mixing(6),), {}, ["|weight|"] * 2),
    "token-mixing-of-unlike-heads": (
        plots.plot_token_mixing,
        ({1: mixing(1)[1], 2: mixing(3)[1]},),
        {"tokens": 21},
        ["|weight|"] * 2,
    ),
    "per-token": (
        plots_context.plot_per_token,
        ({name: PerToken(RANDOM.random(300), 4, 200) for name in ("hgrn2", "fox")},),
        {},
        ["hgrn2", "fox"],
    ),
    "needle": (
        plots_context.plot_needle,
        (NeedleScores((50, 70), (0.0, 1.0), np.zeros((2, 2)), np.ones((2, 2)), 1, 60),),
        {},
        ["answers that match"],
    ),
    "head-maps": (
        plots_context.plot_head_maps,
        ([HeadMap(1, 1, 2, MAP, MAP), HeadMap(2, 3, 2, None, MAP)],),
        {},
        ["largest F of a tile", "largest weight of a tile"],
    ),
}


def colour_bars(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]


def keys_of(figure: Figure) -> list[str]:
    """What legends and colour bars say."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    named = [text.get_text() for legend in legends if legend for text in legend.get_texts()]
    return named + [bar.get_ylabel() for bar in colour_bars(figure)]


def panels_of(figure: Figure) -> list[Axes]:
    bars = colour_bars(figure)
    return [axes for axes in figure.axes if axes.get_visible() and axes not in bars]


def has_numbers(axes: Axes) -> bool:
    """Whether the ticks of the x axis have numbers."""
    return any(tick.get_visible() and tick.get_text() for tick in axes.get_xticklabels())


def outermost(panels: list[Axes], lowest: bool = True) -> list[Axes]:
    """The lowest panel of every column, or the highest."""
    places = [(axes.get_subplotspec(), axes) for axes in panels]
    places.sort(key=lambda place: place[0].rowspan.start, reverse=not lowest)
    return list({place.colspan.start: axes for place, axes in places}.values())


@pytest.fixture(scope="module", params=PICTURES)
def picture(request, tmp_path_factory) -> tuple[str, Figure]:
    """A picture's name in PICTURES, and the figure that was written."""
    figures, save = [], plots._save

    def keep(figure: Figure, path: Path) -> None:
        save(figure, path)
        figure.canvas.draw()
        figures.append(figure)

    path = tmp_path_factory.mktemp("picture") / "picture.png"
    draw, given, options, _ = PICTURES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        for module in (plots, plots_context):
            patch.setattr(module, "_save", keep)
        draw(*given, path, title="What: HGRN, 1.0M parameters", **options)
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    return request.param, figure


def test_a_picture_says_what_it_shows(picture):
    name, figure = picture
    panels = panels_of(figure)
    titles = [figure.get_suptitle(), *(axes.get_title(loc="left") for axes in panels)]
    assert "What: HGRN, 1.0M parameters" in titles
    if len(panels) > 1 and name != "per-token":  # whose two panels differ by their y axes
        assert all(axes.get_title(loc="left") for axes in outermost(panels, lowest=False))
    assert figure.get_supxlabel() or all(axes.get_xlabel() for axes in outermost(panels))
    assert figure.get_supylabel() or all(axes.get_ylabel() for axes in panels)
    assert all(has_numbers(axes) for axes in outermost(panels))
    assert keys_of(figure) == PICTURES[name][3]


def test_what_is_written_does_not_overlap(picture):
    """Titles, names of axes and legends stand clear of each other, inside the picture."""
    _, figure = picture
    texts = [figure._suptitle, figure._supxlabel, figure._supylabel]
    for axes in panels_of(figure):
        texts += [axes.xaxis.label, axes.yaxis.label]
    written = [text for text in texts if text is not None and text.get_text()]
    boxes = [part.get_window_extent() for part in (*written, *figure.legends)]
    assert len(boxes) >= 2
    for i, box in enumerate(boxes):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:i])


@pytest.mark.parametrize(
    ("draw", "given", "message"),
    [
        (plots.plot_losses, METRICS[1:2], "plot_losses: metrics: expected lines of kind 'train'"),
        (plots.plot_accuracy, TEXT, "plot_accuracy: metrics: expected lines with an accuracy"),
        (plots.plot_forget_gates, {}, "plot_forget_gates: gates: expected at least one layer"),
        (plots.plot_gate_parts, {}, "plot_gate_parts: parts: expected at least one layer"),
        (plots.plot_token_mixing, {}, "plot_token_mixing: matrices: expected at least one layer"),
    ],
)
def test_nothing_to_draw_is_an_error(draw, given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        draw(given, tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())


def test_no_curve_is_cut_off(tmp_path, monkeypatch):
    """Not even where the first steps fall from far above the rest."""
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    for first in (8.0, 80.0, 2.6):
        losses = [first, *np.linspace(2.5, 2.2, 100)]
        rows = [
            {"kind": "train", "tokens": 1000 * (i + 1), "loss": loss, "step": i}
            for i, loss in enumerate(losses)
        ]
        plots.plot_losses(rows, tmp_path / "loss.png", bytes_per_token=None)
        (axes,) = figures.pop().axes
        low, high = axes.get_ylim()
        assert low < 2.2
        assert first < high


def test_models_are_named_as_in_their_papers():
    from tidegate.models import mixers
    from tidegate.training.report import model_name

    names = {mixer: model_name(mixer) for mixer in mixers()}
    assert names["fox"] == "FoT"
    assert names["fox-pro"] == "FoT (Pro)"
    assert model_name(["hgrn", "fox", "hgrn"]) == "HGRN + FoT"
    assert len(set(names.values())) == len(names)


def test_benchmarks_of_models_are_drawn(tmp_path):
    from tidegate.plots_bench import plot_models, plot_times
    from tidegate.training.errors import UserError

    rows = [
        {
            "mixer": mixer,
            "context": context,
            "batch": 4096 // context,
            "train": {"tokens_per_s": 1000.0 + context, "peak_bytes": 2**30},
            "decode": {"tokens_per_s": 50.0, "state_bytes": 4096},
        }
        for mixer in ("transformer", "fox")
        for context in (256, 1024)
    ]
    rows += [{"mixer": "lru", "context": 256, "batch": 16, "errors": ["training: no memory"]}]
    record = {"rows": rows, "machine": {"name": "a CPU"}, "size": "tiny", "precision": "fp32"}
    record["tokens"] = 4096
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")):
        plot_models(record, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(UserError, match=r"a name that ends in .png, .svg or .pdf"):
        plot_models(record, tmp_path / "a.txt")
    with pytest.raises(UserError, match="rows that were measured"):
        plot_models({**record, "rows": rows[-1:]}, tmp_path / "b.png")
    times = {
        "context": {"host_name": "here"},
        "benchmarks": [{"name": "hgru/cpu", "real_time": 3.5, "time_unit": "ms"}],
    }
    plot_times(times, tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
