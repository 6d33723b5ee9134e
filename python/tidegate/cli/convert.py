"""`tidegate convert`: checkpoints of other implementations."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="checkpoints of other implementations into ours, and back",
        description="Folders with config.json and weights, whole or in shards. What cannot be said "
        "in the other format is an error, and then nothing is written.",
    )
    formats = ("tidegate", "hf", "fla", "fox", "hgru2-pytorch")
    parser.add_argument("source", help="folder of a checkpoint")
    parser.add_argument("out", help="new folder")
    parser.add_argument(
        "--to", choices=formats, help="default: ours; from ours, where it came from"
    )
    parser.add_argument(
        "--from", dest="given", choices=formats, help="default: what config.json says"
    )
    parser.add_argument(
        "--shard-gb", type=float, help="the most that a file of weights holds; not of ours"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from ..convert import run as convert

    return convert(options)
