"""`tidegate list`: what has a name, and what each is."""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Callable
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("list", help="mixers, presets, recipes or tasks by name")
    parser.add_argument("what", choices=tuple(_LISTS))
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    rows = _LISTS[options.what]()
    width = max(map(len, rows))
    for name, about in rows.items():
        print(f"{name:{width}}  {about}")
    return 0


class WholeNames(argparse.HelpFormatter):
    """Help whose lines do not break within a name, hgrn-44m."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def names(what: str) -> str:
    """The names of a list, with commas between them."""
    return ", ".join(_LISTS[what]())


def _mixers() -> dict[str, str]:
    from ..models import mixers

    rows = {name: _first_sentence(cls.__doc__ or "") for name, cls in mixers().items()}
    for name in rows:
        if (plain := name.removesuffix("-pro")) != name:
            rows[name] = f'{plain} with preset "pro": QK-norm, output gate and norm, KV-shift'
    return rows


def _presets() -> dict[str, str]:
    from ..models import presets

    return {
        name: f"{_in_words(config.mixer)}, {config.layers} layers of {config.dim}, "
        + (f"vocabulary {config.vocab_size:,}" if config.vocab_size else "images")
        for name, config in presets().items()
    }


def _recipes() -> dict[str, str]:
    from ..training.recipe import recipes

    return {name: recipe.about for name, recipe in recipes().items()}


def _tasks() -> dict[str, str]:
    from ..training.tasks import TASKS

    rows = {}
    for name, task in TASKS.items():
        options = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(task))
        rows[name] = _first_sentence(task.__doc__ or "") + (f" ({options})" if options else "")
    return rows


def _in_words(mixer: str | list[str]) -> str:
    return mixer if isinstance(mixer, str) else " and ".join(dict.fromkeys(mixer))


def _first_sentence(text: str) -> str:
    first = re.split(r"(?<!\bal)(?<!\beq)[.:] |::", " ".join(text.split("\n\n")[0].split()) + " ")[
        0
    ]
    return first.strip().rstrip(".")


_LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "mixers": _mixers,
    "presets": _presets,
    "recipes": _recipes,
    "tasks": _tasks,
}
