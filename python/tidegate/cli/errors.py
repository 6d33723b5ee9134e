"""What commands raise and refuse in one voice."""

from __future__ import annotations

import argparse

from ..training.errors import UserError

STOPPED = 130  # the exit status of a run that Ctrl-C or SIGTERM stopped


def refuse(options: argparse.Namespace, command: str, name: str, place: str, given: str) -> None:
    """Raises UserError where an option that has no meaning here was given."""
    if getattr(options, name) not in (None, False):
        flag = "--" + name.replace("_", "-")
        raise UserError(f"{command}: {flag}: expected with {place} only, got it with {given}")
