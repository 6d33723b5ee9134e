"""`tidegate bench`: the benchmarks of a build tree."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("bench", help="run the benchmark binaries of a build tree")
    parser.add_argument("filter", nargs="?", default="", help="part of a benchmark's name")
    parser.add_argument(
        "--models",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="instead, training and decoding of every mixer beside Transformers of as many "
        "parameters; the rest goes to that program (--models --help lists its flags)",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from .._system import run_benchmarks, run_model_benchmark

    if options.models is not None:
        return run_model_benchmark(options.models)
    return run_benchmarks(options.filter)
