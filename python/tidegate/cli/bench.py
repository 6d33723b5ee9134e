"""`tidegate bench`: the benchmarks of a build tree."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("bench", help="run the benchmark programs of a build tree")
    parser.add_argument("filter", nargs="?", default="", help="part of a benchmark's name")
    parser.add_argument("--list", action="store_true", help="print the names, run nothing")
    parser.add_argument("--json", metavar="PATH", help="write the results here")
    parser.add_argument("--plot", metavar="PATH", help="draw the times here (.png, .svg or .pdf)")
    parser.add_argument(
        "--models",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="instead, training and decoding of every mixer beside Transformers of as many "
        "parameters; what follows goes to that program (--models --help lists its flags: --mixers, "
        "--dim, --layers, --contexts, --json ...), but for --plot PATH: speed and memory over "
        "the context",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from .._benchmarks import list_benchmarks, run_benchmarks, run_model_benchmark

    if options.models is not None:
        return run_model_benchmark(options.models)
    if options.list:
        return list_benchmarks(options.filter)
    return run_benchmarks(options.filter, json_path=options.json, plot_path=options.plot)
