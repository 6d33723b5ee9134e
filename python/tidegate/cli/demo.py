"""`tidegate demo`: the run that `make demo` begins with."""

from __future__ import annotations

import argparse
from typing import Any

from .errors import STOPPED
from .train import seconds


def add(commands: Any) -> None:
    parser = commands.add_parser("demo", help="train a small HGRN in three minutes and report")
    parser.add_argument("--out", default="runs/demo", help="run folder (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="another wall-time budget of training")
    parser.add_argument("--seed", type=int)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from ..training.demo import run_demo

    budget = None if options.minutes is None else seconds("demo", options.minutes)
    return 0 if run_demo(options.out, seconds=budget, seed=options.seed) else STOPPED
