"""A Python that starts at once: `ForkedPython.path` takes the arguments of `python`, and what it
runs is forked from a process that has imported all that a training run needs.

A process imports torch for two seconds, and trains after five; a test of many processes waits for
little else. Where the start of a process is what a test is about, it takes `sys.executable`.

How it works: the path is a script of a line, which starts this file without any import of note. It
connects to the process to fork from (`serve`), and sends its arguments, folder and environment and
its three standard files. That process forks a monitor, and the monitor the program: so whoever
started the script finds a process whose output, exit status or signal is the program's, that passes
SIGINT and SIGTERM on, and whose death ends it soon after. -u, -m, -c and a file are understood; for
any other arguments the script becomes the real Python.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ForkedPython:
    """The side of the process to fork from. `selector` reads `listener`; whoever connects is
    `answer`ed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "python"
        address = folder / "python.socket"
        words = " ".join(
            "'" + str(word).replace("'", "'\\''") + "'"
            for word in (sys.executable, "-IS", Path(__file__).resolve(), address)
        )
        self.path.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        self.path.chmod(0o755)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(address))
        self.listener.listen(64)

    def answer(self) -> None:
        """Takes one call, and leaves it to a monitor."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # monitors that have ended
                pass
        connection, _ = self.listener.accept()
        with connection:
            if os.fork() == 0:
                status = 1
                try:
                    status = self._monitor(connection)
                finally:
                    os._exit(status)

    def _monitor(self, connection: socket.socket) -> int:
        self.listener.close()
        asked, files = _receive(connection)
        program = os.fork()
        if program == 0:
            connection.close()
            _become(str(self.path), files, **asked)
        for file in files:
            os.close(file)
        connection.sendall(b"%d\n" % program)
        ended = os.pidfd_open(program)
        while True:
            ready, _, _ = select.select([ended, connection], [], [])
            if ended in ready:
                break
            if not connection.recv(1):  # whoever called is gone
                os.kill(program, signal.SIGKILL)
                break
        _, status = os.waitpid(program, 0)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        return 0


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """What `call` sends."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 16)
    return json.loads(data), list(files)


def _become(
    python: str, files: list[int], arguments: list[str], folder: str, environment: dict[str, str]
) -> None:
    """Runs what `python ARGUMENTS` would, and ends this process."""
    import atexit
    import random
    import runpy
    import threading
    import traceback

    status = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, encoding="utf-8", closefd=False)  # noqa: SIM115
        for passed_on in PASSED_ON:
            signal.signal(passed_on, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        random.seed()
        atexit._clear()  # what the process to fork from would do at its end
        sys.executable = python
        if arguments[0] == "-u":
            arguments = arguments[1:]
            sys.stdout.reconfigure(line_buffering=True)
        kind, *rest = arguments
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:0] = [path for path in paths if path not in sys.path]
        try:
            if kind == "-m":
                sys.argv, sys.path[:0] = rest, [folder]
                runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
            elif kind == "-c":
                sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
                exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
            else:
                sys.argv, sys.path[:0] = [kind, *rest], [str(Path(kind).resolve().parent)]
                runpy.run_path(kind, run_name="__main__")
            status = 0
        finally:
            threading._shutdown()
            atexit._run_exitfuncs()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status & 0xFF)


def call(address: str, arguments: list[str]) -> int:
    """The side of the script: the exit status of what it asked for, a negative one for a signal."""
    first = (arguments[1:] if arguments[:1] == ["-u"] else arguments)[:1]
    if not first or (first[0].startswith("-") and first[0] not in ("-m", "-c")):
        os.execv(sys.executable, [sys.executable, *arguments])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    asked = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    data = json.dumps(asked).encode() + b"\n"
    sent = socket.send_fds(connection, [data], [0, 1, 2])
    connection.sendall(data[sent:])
    with connection.makefile() as answers:
        program = int(answers.readline())
        for number in PASSED_ON:
            signal.signal(number, lambda received, _: os.kill(program, received))
        return int(answers.readline())


if __name__ == "__main__":
    ended = call(sys.argv[1], sys.argv[2:])
    if ended < 0:
        with contextlib.suppress(OSError):  # nobody handles SIGKILL
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    sys.exit(ended)
