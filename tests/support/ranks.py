"""Processes that train together, for tests of several: forked from one that has imported all that
they need, so that a scenario costs what it computes.

`Ranks` starts that one and asks it for as many as a test wants; they find each other by the
variables that torchrun sets. `Ranks.python` takes the arguments of `python`, and is forked, too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.forked_python import ForkedPython

HERE = Path(__file__).resolve().parent


class Ended(NamedTuple):
    """How a process ended: its exit status, a negative one for a signal; what it wrote to stderr;
    what its function returned."""

    status: int
    stderr: str
    value: Any


class Ranks:
    """A context in which run() is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Ranks:
        path = os.pathsep.join([str(HERE.parent / "python"), str(HERE.parent), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other way rules out fork()
        self._server = subprocess.Popen(
            [sys.executable, __file__, "serve", self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.python = self._server.stdout.readline().rstrip()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=30)

    def run(
        self, count: int, function: str, *arguments: Any, seconds: float = 240.0, **variables: str
    ) -> list[Ended]:
        """`function` ("module:name") of as many ranks with the arguments, which JSON can say.

        seconds: whoever runs longer is killed. variables: of the environment; None: leave it out.
        """
        (ended,) = self.run_together((count, function, *arguments), seconds=seconds, **variables)
        return ended

    def run_together(
        self, *scenarios: Sequence[Any], seconds: float = 240.0, **variables: str
    ) -> list[list[Ended]]:
        """What run() returns for each ``(count, function, *arguments)``; all run at the same time,
        for those that wait for something more than they compute."""
        asked = {
            "scenarios": json.loads(json.dumps(scenarios, default=str)),
            "folder": str(self._folder),
            "seconds": seconds,
            "variables": variables,
        }
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        ended = json.loads(self._server.stdout.readline())
        return [[Ended(*each) for each in ranks] for ranks in ended]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(folder: Path) -> None:
    # What a process of a run needs, torch.optim's first optimiser included (torch._dynamo).
    import numpy.random  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch._dynamo.backends.common  # noqa: F401

    import tidegate.cli
    import tidegate.plots
    import tidegate.training.report
    import tidegate.training.sharded  # noqa: F401

    gc.freeze()  # no rank looks for garbage among what was imported here
    if not _may_fork():
        print(sys.executable, flush=True)
        for line in sys.stdin:
            print(json.dumps(_run(_spawned, **json.loads(line))), flush=True)
        return
    python = ForkedPython(folder)
    print(python.path, flush=True)
    with selectors.DefaultSelector() as asked:
        asked.register(sys.stdin, selectors.EVENT_READ)
        asked.register(python.listener, selectors.EVENT_READ)
        while True:
            for key, _ in asked.select():
                if key.fileobj is python.listener:
                    python.answer()
                elif line := sys.stdin.readline():
                    print(json.dumps(_run(_forked, **json.loads(line))), flush=True)
                else:
                    return


def _may_fork() -> bool:
    """Whether a forked process can use the GPUs: not if an import here asked the driver."""
    import torch

    pid = os.fork()
    if pid == 0:
        try:
            if os.path.exists("/dev/nvidiactl"):
                torch.zeros(1, device="cuda")
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def _forked(*how: Any) -> int:
    pid = os.fork()
    if pid == 0:
        _child(*how)
    return pid


def _spawned(*how: Any) -> int:
    arguments = json.dumps(how, default=str)
    return subprocess.Popen([sys.executable, __file__, arguments]).pid


def _run(
    start: Callable[..., int],
    scenarios: list[list[Any]],
    folder: str,
    seconds: float,
    variables: dict[str, str | None],
) -> list[list[tuple[int, str, Any]]]:
    running = {}
    ended: list[Any] = []
    for number, (count, function, *arguments) in enumerate(scenarios):
        port = str(free_port())
        ended.append([None] * count)
        for rank in range(count):
            files = [Path(folder) / f"{number}.rank{rank}.{kind}" for kind in ("err", "json")]
            for file in files:
                file.unlink(missing_ok=True)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
            running[start(function, arguments, own, *files)] = (number, rank, files)
    end = time.monotonic() + seconds
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            number, rank, (err, out) = running.pop(pid)
            value = json.loads(out.read_text()) if out.exists() else None
            said = err.read_text(errors="replace")
            ended[number][rank] = (os.waitstatus_to_exitcode(status), said, value)
            continue
        if time.monotonic() > end:
            for left in running:
                os.kill(left, signal.SIGKILL)
        time.sleep(0.01)
    return ended


def _child(
    function: str,
    arguments: list[Any],
    variables: dict[str, str | None],
    err: Path | str,
    out: Path | str,
) -> None:
    status = 99
    try:
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ.update({name: value for name, value in variables.items() if value is not None})
        module, _, name = function.partition(":")
        value = getattr(importlib.import_module(module), name)(*arguments)
        Path(out).write_text(json.dumps(value))
        status = value if isinstance(value, int) else 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(Path(sys.argv[2])) if sys.argv[1] == "serve" else _child(*json.loads(sys.argv[1]))
