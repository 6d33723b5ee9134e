"""Programs of benchmarks/ and examples/, run where torch has been imported already."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

import torch


def run_here(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`python PROGRAM ARGUMENTS` in this process, with one thread: its exit status and what it
    prints. An exception is raised here."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    before = sys.argv, list(sys.path), torch.get_num_threads()
    sys.argv = [str(program), *map(str, arguments)]
    sys.path.insert(0, str(program.parent))
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(program), run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            err.write(f"{error.code}\n")
    finally:
        sys.argv, sys.path[:] = before[:2]
        torch.set_num_threads(before[2])
    return subprocess.CompletedProcess(
        [program, *arguments], status, out.getvalue(), err.getvalue()
    )
