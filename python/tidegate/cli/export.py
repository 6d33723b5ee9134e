"""`tidegate export`: a run's model as plain files."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "export", help="write the model of a run's last checkpoint as plain files"
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("out", nargs="?", help="folder to write to (default: the run's model/)")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from ..training.trained import export_trained

    print(export_trained(options.run, options.out))
    return 0
