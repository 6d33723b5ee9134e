"""The command line: `tidegate COMMAND`.

A command is a module here with a function `add(commands)`, which makes its parser and names the
function that runs it; COMMANDS lists them in the order of `tidegate --help`.

Exit status: 0 = done; 2 = something the caller can put right, said in one line on stderr; 130 = a
run stopped by Ctrl-C or SIGTERM, with a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from .._memory import keep_freed_memory
from .._several import end_with_the_others, is_one_of_several, tell_the_others
from ..training.errors import UserError
from . import bench, convert, demo, evaluate, export, generate, info, listing, plot, train
from .errors import STOPPED

COMMANDS = (train, demo, evaluate, generate, export, convert, plot, bench, listing, info)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = build_parser().parse_args(arguments)
    if arguments is None:  # the process is this command's alone
        keep_freed_memory()
    try:
        status = options.command(options)
        sys.stdout.flush()  # what the disk refuses is said here, not while Python shuts down
        return status
    except UserError as error:
        problem, cause = str(error), error
    except BrokenPipeError:
        _drop_output()
        return 0
    except KeyboardInterrupt:
        try:  # noqa: SIM105  (a second Ctrl-C may meet any function that is called here)
            print("tidegate: interrupted", file=sys.stderr)
        except KeyboardInterrupt:
            pass
        return STOPPED
    except OSError as error:
        _drop_output()
        where = error.filename if error.filename is not None else "the disk"
        problem, cause = f"{where}: cannot be read or written: {error.strerror or error}", error
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            tell_the_others(error, forces=arguments is None)
            raise
        problem, cause = f"out of memory: {error}", error
    except Exception as error:
        tell_the_others(error, forces=arguments is None)
        raise
    if is_one_of_several():
        return end_with_the_others(cause, problem, forces=arguments is None)
    print("tidegate:", " ".join(problem.split()), file=sys.stderr)
    return 2


def _drop_output() -> None:
    """Sends what is still to be written to stdout nowhere: whoever reads it is gone, or its disk is
    full, and Python would try once more while it shuts down."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, numpy or torch, on a CPU or a GPU, found no memory."""
    text = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tidegate", description="Train and use language models with gated linear recurrences."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
