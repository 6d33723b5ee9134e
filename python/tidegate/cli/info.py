"""`tidegate info`: versions, devices and kernels."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("info", help="versions, devices, and which kernels were built")
    parser.set_defaults(command=run)


def run(_options: argparse.Namespace) -> int:
    from .._system import info_lines

    print("\n".join(info_lines()))
    return 0
