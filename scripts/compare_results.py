"""Says whether two builds of tidegate compute the same bits.

    python scripts/compare_results.py BEFORE AFTER [--device cuda] [--count 2000] [--long]

BEFORE and AFTER are folders that hold the package, such as build/python of two checkouts. Each is
loaded by processes of its own, which make the same random calls (tests/fuzz.py draws them: every
op, dtype, layout and gate regime), forward and backward, and print a digest of every result and
gradient. --long adds long sequences, which CUDA kernels divide among blocks. Sums whose order is
not fixed are switched off (torch.use_deterministic_algorithms). Ends with 1 where a digest differs,
and names the case.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent / "tests"


def drawn_cases(count: int) -> Iterator[object]:
    import fuzz

    for seed in range(count):
        yield fuzz.random_case(seed)


def long_cases() -> Iterator[object]:
    """Every kind of call for few wide and for many narrow sequences."""
    import fuzz
    import torch
    from support import gla_cases, rnn_cases, scan_cases, wkv4_cases

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for kind in (*scan_cases.KINDS, *wkv4_cases.KINDS):
        for dtype in dtypes:
            for batch, time, channels in ((1, 20000, 256), (3, 3001, 1000), (8, 2048, 512)):
                if kind.dtype.is_complex or kind.lengths is not None:
                    continue
                yield replace(kind, dtype=dtype, batch=batch, time=time, channels=channels)
    for kind in gla_cases.KINDS:
        for dtype in dtypes:
            for batch, time, width in ((1, 8000, 128), (4, 1000, 64), (2, 500, 256)):
                if kind.lengths is None:
                    sizes = {"batch": batch, "time": time, "key_dim": width, "value_dim": width}
                    yield replace(kind, dtype=dtype, **sizes)
    for kind in rnn_cases.KINDS:
        for width in (128, 256, 512, 1024):
            if kind.lengths is None:
                yield replace(kind, batch=3, time=130, channels=width)
    attention = [case for seed in range(5, 1000, 8) if (case := fuzz.random_case(seed))]
    for case in attention[:40]:
        if case.lengths is None:
            for width in (64, 96, 128, 192, 256):
                yield replace(case, queries=1500, head_dim=width, dtype=torch.bfloat16)


def print_digests(arguments: argparse.Namespace) -> None:
    """What a process of one side does: a line a case, its number and digest."""
    import torch
    from support import cases

    torch.use_deterministic_algorithms(True)
    listed = list(drawn_cases(arguments.count))
    if arguments.long:
        listed += list(long_cases())
    for number, case in list(enumerate(listed))[arguments.part :: arguments.jobs]:
        run = vars(sys.modules[type(case).__module__]).get("run", cases.run)
        digest = hashlib.sha256()
        for name, value in sorted(run(case, arguments.device, backward=True).items()):
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(name.encode())
            digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        print(number, digest.hexdigest(), str(case).replace(" ", ""), flush=True)


def start(package: Path, part: int) -> subprocess.Popen[str]:
    """One process of one side: every so many of the cases, beginning with number `part`."""
    if not (package / "tidegate").is_dir():
        sys.exit(f"compare_results: no package tidegate in {package}")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package.absolute()), str(_TESTS)]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--part", str(part)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def digests(package: Path, processes: list[subprocess.Popen[str]]) -> list[str]:
    """The lines of all processes of one side, by case."""
    lines = [line for process in processes for line in process.communicate()[0].splitlines()]
    if any(process.returncode != 0 for process in processes):
        sys.exit(f"compare_results: the calls of {package} failed")
    return sorted(lines, key=lambda line: int(line.split()[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=2000, help="of random calls")
    parser.add_argument("--long", action="store_true", help="long sequences, too")
    parser.add_argument("--jobs", type=int, default=1, help="processes a side")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        print_digests(arguments)
        return 0
    packages = (arguments.before, arguments.after)
    running = [[start(package, part) for part in range(arguments.jobs)] for package in packages]
    before, after = (digests(p, r) for p, r in zip(packages, running, strict=True))
    pairs = list(zip(before, after, strict=True))
    differing = [new for old, new in pairs if old != new]
    for line in differing[:40]:
        print("differs:", line)
    print(f"{len(pairs)} calls on {arguments.device}: {len(differing)} with other bits")
    return 1 if differing or not pairs else 0


if __name__ == "__main__":
    sys.exit(main())
