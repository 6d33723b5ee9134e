"""The error that a person is meant to read: one line, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something that the caller can put right (a path, a flag, a damaged file).

    The command line prints the message as one line on stderr and exits with status 2. Nothing on
    disk was changed when it is raised.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class DamagedCheckpoint(UserError):
    """A checkpoint whose bytes are not those that were written, or that is none."""
