"""How the command ends where torchrun started several of it; needs torch only there."""

from __future__ import annotations

import os
import sys
import traceback


def is_one_of_several() -> bool:
    """Whether torchrun started this process beside others."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def end_with_the_others(cause: Exception, problem: str, *, forces: bool) -> int:
    """Says what ended the run, once for all its processes; the exit status. forces: what waits for
    other processes, threads that write among them, is left."""
    from .training.distributed import complain, is_joined

    complain(cause, problem)
    if forces and is_joined():
        sys.stdout.flush()
        os._exit(2)
    return 2


def tell_the_others(error: Exception, *, forces: bool) -> None:
    """Before a traceback is printed that only this process has; forces: prints it and ends."""
    if not is_one_of_several():
        return
    from .training.distributed import complain, is_joined

    complain(error, f"{type(error).__name__}: {error}: the traceback is this process's")
    if forces and is_joined():
        traceback.print_exc()
        os._exit(1)
