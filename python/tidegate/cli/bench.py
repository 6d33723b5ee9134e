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
        "the context; flash-linear-attention's models of the same sizes follow where they are "
        "installed, on a GPU, unless --no-fla is given",
    )
    parser.add_argument(
        "--generate",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="instead, tokens/s of generation beside what the memory's speed allows; the rest are "
        "flags of its own (--generate --help lists them)",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from .._benchmarks import list_benchmarks, run_benchmarks, run_model_benchmark

    if options.generate is not None:
        from ..bench_generation import main as bench_generation

        return bench_generation(options.generate)
    if options.models is not None:
        return run_model_benchmark(options.models)
    if options.list:
        return list_benchmarks(options.filter)
    return run_benchmarks(options.filter, json_path=options.json, plot_path=options.plot)
