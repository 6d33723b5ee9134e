"""The campaign: faults at every file event of a training run, broken files, and wrong calls.

    python tests/campaign.py --seconds 20 --seed 1     # what CI does (test_campaign.py)
    python tests/campaign.py --seconds 14400 --seed 7  # hours

Faults: a run of a few steps is killed (SIGKILL), finds its disk full or broken (ENOSPC, EIO), or is
interrupted once or twice (Ctrl-C) at its n-th write, fsync, rename, link, unlink, open or mkdir
below its folder (tests/support/file_faults.c, loaded before libc). It may end well or with one
line; started again, it must end with the bits of a run that nothing happened to, with every row of
the metrics once, and leave no temporary file.

Broken files: bits flipped, bytes cut, added and overwritten in any file of a finished run. Every
command must end well or with one line.

Wrong calls: ops and modules with arguments of another type, dtype, shape, stride or value
(tests/support/wrong_calls.py). They must be refused in a message that names the op, or compute what
contiguous copies and the reference do; 200 are a case.

Each case runs in a child of a process that has everything
imported, so a crash ends the case alone; what fails is printed with the arguments that repeat it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
CALLS = 200
TURNS = ("fault", "calls", "file")
KINDS = ("kill", "full", "broken", "interrupt", "interrupt-twice")
TIMES = ("seconds", "tokens_per_second")
LIMIT = 120  # seconds of a case
_REEXEC = "TIDEGATE_CAMPAIGN_SHIM"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--case", help="one case again, as a failure names it: KIND:N, file:N, calls:N or call:SEED"
    )
    options = parser.parse_args()
    if _REEXEC not in os.environ:
        return _with_shim()
    with tempfile.TemporaryDirectory() as folder:
        return Campaign(Path(folder).resolve(), options.seed).run(options.seconds, options.case)


def _with_shim() -> int:
    """This program again, with the faults' library loaded before libc."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "file_faults.so"
        source = HERE / "support" / "file_faults.c"
        build = ["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
        subprocess.run(build, check=True)
        environment = {**os.environ, _REEXEC: str(library), "LD_PRELOAD": str(library)}
        environment["OMP_NUM_THREADS"] = "1"  # children of fork() have no other threads
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


class Campaign:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.shim = ctypes.CDLL(os.environ[_REEXEC])
        self.shim.fault_events.restype = ctypes.c_long
        self.text = folder / "text.txt"
        words = ["def", "return", "self", "gate", "(", ")", ":\n", "    "]
        self.text.write_text(" ".join(random.Random(0).choices(words, k=5000)))
        self.count: Counter[str] = Counter()
        self.failures: list[str] = []

    def train(self, out: Path) -> list[str]:
        """The arguments of the run that faults meet."""
        flags = "--mixer=hgrn --set=mixer_options.complex=false --dim=16 --layers=1"
        flags += " --batch-size=2 --context=16 --precision=fp32 --device=cpu --threads=1"
        flags += " --steps=6 --checkpoint-every=2 --eval-every=3 --eval-tokens=64"
        flags += " --tokenizer=bpe:300 --quiet"
        return ["train", str(self.text), "--out", str(out), *flags.split()]

    def command(self, arguments: list[str], arm: Callable[[], object] = lambda: None) -> tuple:
        """What child() says of a command."""

        def work() -> int:
            from tidegate.cli import main as command

            arm()
            return command(arguments)

        return self.child(work)

    def child(self, work: Callable[[], int]) -> tuple:
        """Work in a child: its status, a negative one for a signal, what it wrote to stderr, and,
        on a good end, how many events there were."""
        said, events = self.folder / "stderr", self.folder / "events"
        events.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.alarm(LIMIT)
                for number, path in ((1, os.devnull), (2, str(said))):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
                status = work()
                count = self.shim.fault_events()
                self.shim.fault_arm(b"", 0, 0)
                events.write_text(str(count))
            except BaseException:
                self.shim.fault_arm(b"", 0, 0)
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, found = os.waitpid(pid, 0)
        count = int(events.read_text()) if events.exists() else 0
        return os.waitstatus_to_exitcode(found), said.read_text(errors="replace"), count

    def run(self, seconds: float, case: str | None) -> int:
        end = time.monotonic() + seconds
        # What every child would import by itself (torch._dynamo: its first optimiser).
        import torch._dynamo  # noqa: F401

        import tidegate.cli
        import tidegate.plots
        import tidegate.training.report  # noqa: F401

        whole = self.folder / "whole"
        below = str(self.folder / "whole").encode()
        status, said, events = self.command(
            self.train(whole), lambda: self.shim.fault_arm(below, 0, 0)
        )
        if status != 0:
            print(said)
            return 1
        print(f"{events} file events; seed {self.seed}", flush=True)
        draw = random.Random(self.seed)
        faults = [f"{kind}:{n}" for kind in KINDS for n in range(1, events + 1)]
        draw.shuffle(faults)
        number = 0
        # One of each, however busy the machine is.
        while time.monotonic() < end or case is not None or number < len(TURNS):
            number += 1
            name = case or f"{TURNS[number % len(TURNS)]}:{draw.getrandbits(22)}"
            if name.startswith("fault:"):
                name = faults.pop() if faults else f"file:{draw.getrandbits(30)}"
            kind, _, value = name.partition(":")
            before = len(self.failures)
            if kind == "file":
                self.broken_file(int(value), whole)
            elif kind in ("call", "calls"):
                self.wrong_calls(int(value), 1 if kind == "call" else CALLS)
            else:
                self.fault(kind, int(value), whole)
            self.count[kind] += 1
            for failure in self.failures[before:]:
                print(f"FAILED --case {name}: {failure}", flush=True)
            if case is not None:
                break
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.count.items()))
        print(f"{counts}; {len(self.failures)} failures")
        return 1 if self.failures else 0

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.failures.append(problem)

    def expect_one_line(self, status: int, said: str, allowed: tuple[int, ...]) -> None:
        self.expect(status in allowed, f"status {status}: {said[-1500:]}")
        self.expect("Traceback" not in said, f"traceback: {said[-1500:]}")
        if status == 2:
            errors = [line for line in said.splitlines() if line.startswith("tidegate: ")]
            self.expect(len(errors) == 1, f"{len(errors)} lines of error: {said[-1500:]}")

    def fault(self, kind: str, n: int, whole: Path) -> None:
        out = self.folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        number = KINDS.index(kind) + 1
        below = str(out).encode()
        status, said, _ = self.command(
            self.train(out), lambda: self.shim.fault_arm(below, n, number)
        )
        self.expect_one_line(status, said, (-signal.SIGKILL,) if kind == "kill" else (0, 2, 130))
        status, said, _ = self.command(self.train(out))
        self.expect(status == 0, f"started again: status {status}: {said[-1500:]}")
        if status == 0:
            self.compare(out, whole)

    def compare(self, out: Path, whole: Path) -> None:
        """A run that met a fault is the one that met none."""
        names, wanted = (sorted(str(p.relative_to(f)) for p in f.rglob("*")) for f in (out, whole))
        self.expect(names == wanted, f"files: {sorted(set(names) ^ set(wanted))}")
        for name in ("model/model.safetensors", "model/config.json", "tokenizer.json"):
            same = (out / name).read_bytes() == (whole / name).read_bytes()
            self.expect(same, f"{name} differs")
        rows, expected = (_rows(folder / "metrics.jsonl") for folder in (out, whole))
        # A run that stops writes the mean of the steps so far.
        kinds = [(row["kind"], row["step"]) for row in rows]
        self.expect(len(set(kinds)) == len(kinds), f"rows twice: {kinds}")
        for row in expected:
            if row["kind"] != "train":
                self.expect(row in rows, f"no row {row}")

    def wrong_calls(self, number: int, count: int) -> None:
        """The calls of `count` seeds; `calls:N` stands for those from N * CALLS on."""
        first = number * count
        begun = self.folder / "call"

        def work() -> int:
            from support import wrong_calls

            status = 0
            for seed in range(first, first + count):
                begun.write_text(str(seed))
                if problem := wrong_calls.check(seed):
                    print(f"call:{seed}: {problem}", file=sys.stderr)
                    status = 1
            return status

        status, said, _ = self.child(work)
        if status not in (0, 1):
            said = f"call:{begun.read_text()}: ended with {status}: {said[-1500:]}"
        self.expect(status == 0, said.strip())

    def broken_file(self, seed: int, whole: Path) -> None:
        draw = random.Random(seed)
        out = self.folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        texts = [p for p in sorted(out.rglob("*")) if p.is_file() and p.suffix != ".png"]
        path = draw.choice(texts)
        path.write_bytes(_broken(path.read_bytes(), draw))
        folder = out / "model" if draw.random() < 0.3 else out
        for command in (
            ["eval", str(folder), *([str(self.text)] if folder != out else [])],
            ["generate", str(folder), "--tokens=3"],
            ["plot", str(out)],
            self.train(out),
        ):
            status, said, _ = self.command(command)
            before = len(self.failures)
            self.expect_one_line(status, said, (0, 2))
            if len(self.failures) > before:
                self.failures[-1] = f"{path.relative_to(out)}, {command[0]}: {self.failures[-1]}"


def _rows(path: Path) -> list[dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def _broken(content: bytes, draw: random.Random) -> bytes:
    data = bytearray(content)
    way = draw.choice(("flip", "flips", "cut", "insert", "zeros", "value", "empty"))
    place = draw.randrange(max(len(data), 1))
    if way in ("flip", "flips"):
        for _ in range(1 if way == "flip" else 20):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif way == "cut":
        del data[place:]
    elif way == "insert":
        data[place:place] = draw.randbytes(draw.randrange(1, 50))
    elif way == "zeros":
        data[place : place + 100] = bytes(len(data[place : place + 100]))
    elif way == "value":
        with contextlib.suppress(ValueError, UnicodeDecodeError, IndexError):
            values = json.loads(content)
            return json.dumps(_other_value(values, draw)).encode()
    else:
        return b""
    return bytes(data)


def _other_value(values: object, draw: random.Random) -> object:
    """JSON with one value somewhere in it replaced by one of another kind, or left out."""
    others = (None, True, -1, 2**70, 1e300, "x", [], {}, "\ud83d", 0)
    if not values or not isinstance(values, (dict, list)):
        return draw.choice(others)
    key = draw.choice(list(values)) if isinstance(values, dict) else draw.randrange(len(values))
    if draw.random() < 0.2:
        del values[key]
    else:
        values[key] = _other_value(values[key], draw)
    return values


if __name__ == "__main__":
    sys.exit(main())
