"""What the tests of benchmarks/ share: results of each kind, and a checkout that holds them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def baselines_result(us: float, bytes_moved: int, percent: float) -> dict:
    return {
        "bytes": bytes_moved,
        "error": 1.5e-3,
        "timing": "CUDA graph",
        "us": us,
        "us_low": us - 1,
        "us_high": us + 1,
        "gb_per_s": bytes_moved / us * 1e-3,
        "samples": 60,
        "percent_of_copy": percent,
    }


BASELINES = {
    "kind": "baselines",
    "date": "2026-01-02",
    "commit": "abc123",
    "machine": {"gpu": {"name": "NVIDIA H200", "driver_version": "580", "clocks.sm": "1980 MHz"}},
    "versions": {"torch": "2.11.0", "fla": "0.6.0"},
    "missing": ["accelerated-scan: not timed: it is not installed"],
    "notes": ["a note"],
    "rows": [
        {
            "group": "aims",
            "op": "hgru",
            "complex": False,
            "dtype": "bfloat16",
            "B": 8,
            "T": 2048,
            "D": 2048,
            "direction": "forward",
            "bytes": 201326592,
            "sets": 8,
            "goal_percent": 85,
            "results": {
                "copy_": baselines_result(50.0, 201326592, 100.0),
                "tidegate": baselines_result(57.14, 201326592, 87.5),
                "fla.chunk_hgrn": baselines_result(313.1, 201326592, 16.0),
            },
            "best_baseline": "fla.chunk_hgrn",
            "times_best_baseline": 5.48,
        },
    ],
    "problems": [],
}

CPU = {
    "context": {
        "date": "2026-01-02T03:04:05+00:00",
        "num_cpus": 2,
        "mhz_per_cpu": 2100,
        "load_avg": [0.5, 0.4, 0.3],
    },
    "benchmarks": [
        {
            "name": f"cpu/hgru/forward/{kind}/float32/B4/T2048/D1024/avx512/threads2/iterations:40",
            "threads": 1,  # Google Benchmark's own, not the kernel's
            "GB/s": 21.0,
            "copy_GB/s": 33.0,
            "percent_of_copy": 63.6,
            "cpu_percent_of_copy": 71.4,
        }
        for kind in ("real", "complex")
    ],
}

DEMO = {
    "machine": {"device_name": "a CPU", "threads": 2, "torch": "2.11.0"},
    "commit": "abc123",
    "baselines": {"bz2": 1.62},
    "others": [
        {
            "model": "`torch.nn.GRU`, adamw",
            "parameters": 1_300_000,
            "optimizer": "adamw",
            "seconds": 170.0,
            "bytes_per_second": 9400,
            "bits_per_byte": 1.94,
        }
    ],
}


def fill_checkout(root: Path) -> Path:
    """Makes `root` a checkout with results of each kind and an empty README section."""
    results = root / "benchmarks" / "results"
    results.mkdir(parents=True)
    for name, record in (("baselines_h200", BASELINES), ("cpu_scan", CPU), ("demo", DEMO)):
        (results / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    marked = "# x\n\n<!-- benchmarks:begin -->\nold\n<!-- benchmarks:end -->\n\nrest\n"
    (root / "README.md").write_text(marked, encoding="utf-8")
    return root


def page_of(checkout: Path, name: str = "benchmarks.md") -> str:
    """A page of docs/ that the report wrote."""
    return (checkout / "docs" / name).read_text(encoding="utf-8")


def run_report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "report.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
