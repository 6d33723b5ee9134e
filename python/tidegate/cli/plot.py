"""`tidegate plot`: pictures of a run."""

from __future__ import annotations

import argparse
from typing import Any

from .errors import refuse


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plot",
        help="draw a run's losses, accuracy, forget gates or token mixing as PNG",
        description="`tidegate plot RUN` draws losses, a task's accuracy and forget gates; with a "
        "name before RUN that picture alone: `gates`, the forget gates before and after training; "
        "`token-mixing`, what every layer's state is made of; `attention`, forget-gate matrices "
        "and attention maps of single heads.",
    )
    parser.add_argument(
        "what", nargs="?", choices=("run", "gates", "token-mixing", "attention"), default="run"
    )
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--no-baselines", action="store_true", help="leave order-2 and bz2 out")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        help="counted from 1 (token-mixing: default all; attention: four, spread over them)",
    )
    parser.add_argument("--heads", type=int, nargs="+", help="of attention, from 1 (default: 1)")
    parser.add_argument(
        "--tokens",
        type=int,
        help="how many are read (token-mixing: 256, at most 2048; attention: the training context)",
    )
    parser.add_argument("--device", default="auto")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from ..training.report import plot_gates, plot_run, plot_token_mixing
    from ..training.scoring import corpus_of_run

    meant = {
        "layers": ("token-mixing", "attention"),
        "heads": ("attention",),
        "tokens": ("token-mixing", "attention"),
        "no_baselines": ("run",),
    }
    for name, pictures in meant.items():
        if options.what not in pictures:
            refuse(options, "plot", name, " and ".join(pictures), options.what)
    if options.what == "gates":
        drawn = plot_gates(options.run, options.device)
    elif options.what == "token-mixing":
        chosen = {"layers": options.layers, "tokens": options.tokens, "device": options.device}
        drawn = [plot_token_mixing(options.run, **chosen)]
    elif options.what == "attention":
        from ..training.context import maps_of_run

        chosen = {"layers": options.layers, "heads": options.heads, "length": options.tokens}
        drawn = [maps_of_run(options.run, **chosen, device=options.device)]
    else:
        lines = None if options.no_baselines else corpus_of_run(options.run).baselines()
        drawn = plot_run(options.run, baselines=lines, device=options.device)
    for path in drawn:
        print(path)
    return 0
