"""Says how the speed of the ops differs between two builds of libtidegate.so.

    python scripts/compare_speed.py BEFORE.so AFTER.so [--filter ops/cuda] [--rounds 3] [--worst 1]

build/bin/bench_ops runs with either library preloaded, the two in turn, so that a machine that
warms up or slows down does so for both. A row's figure is the ratio of the fastest rounds, in
percent: what is above zero has become slower. Ends with 1 where a row lost more than --worst
percent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_BENCHMARK = Path(__file__).resolve().parent.parent / "build/bin/bench_ops"


def times(library: Path, chosen: str) -> dict[str, float]:
    """Seconds of every row of one run of the benchmark."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            str(_BENCHMARK),
            f"--benchmark_filter={chosen}",
            f"--benchmark_out={out.name}",
            "--benchmark_out_format=json",
        ]
        environment = {**os.environ, "LD_PRELOAD": str(library.absolute())}
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"compare_speed: {_BENCHMARK} failed with {library}:\n{result.stderr}")
        rows = json.loads(Path(out.name).read_text(encoding="utf-8"))["benchmarks"]
    failed = [row["name"] for row in rows if row.get("error_occurred")]
    if failed:
        sys.exit(f"compare_speed: wrong results with {library}: {', '.join(failed)}")
    return {row["name"]: float(row["real_time"]) for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--filter", default="ops/cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worst", type=float, default=1.0, help="percent that a row may lose")
    arguments = parser.parse_args()

    fastest: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for _ in range(arguments.rounds):
        for library, best in zip((arguments.before, arguments.after), fastest, strict=True):
            for name, seconds in times(library, arguments.filter).items():
                best[name] = min(seconds, best.get(name, seconds))
    before, after = fastest
    if not before:
        sys.exit(f"compare_speed: no row fits --filter {arguments.filter}")
    if before.keys() != after.keys():
        sys.exit("compare_speed: the two libraries have other rows")
    lost = {name: 100 * (after[name] / before[name] - 1) for name in before}
    for name, percent in sorted(lost.items(), key=lambda row: row[1]):
        print(f"{percent:+7.2f} %  {name.split('/iterations')[0]}")
    slower = sum(percent > arguments.worst for percent in lost.values())
    print(f"{len(lost)} rows, {slower} of them slower by more than {arguments.worst:g} %")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
