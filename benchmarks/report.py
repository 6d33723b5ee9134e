#!/usr/bin/env python3
"""The figures of README, docs/benchmarks.md and docs/lab/benchmarks.md, from benchmarks/results.

    python benchmarks/report.py            # writes pages and pictures
    python benchmarks/report.py --check    # fails when one is not what the results say

README has a picture and about ten rows (report_headlines.py, report_picture.py); docs/benchmarks.md
has every table, once; docs/lab/benchmarks.md has how each was measured, with every implementation's
times and their spread.

Results are told apart by what they hold: baselines.py's runs, gla_cpu.py's, attention_cpu.py's,
cpu_loops.py's, gla_errors.py's, gated_rnn.py's, copying_step.py's, fox_text.py's, bench_models' and
`tidegate bench --generate`'s by their "kind", Google Benchmark files of the CPU kernels by
"benchmarks", and the demo's comparison by "others". Results whose kernels have changed since their
commit are warned of on stderr (report_age.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import report_age
from report_attention import attention_cpu_page
from report_commands import commands_section
from report_cpu import cpu_page, cpu_rows, gla_cpu_page
from report_generation import generation_page
from report_gpu import gpu_lab, gpu_page
from report_headlines import Results, bars_of, gpu_name, headline_table
from report_loops import loops_page
from report_models import models_page
from report_picture import THEMES, picture
from report_tables import Record, aim_cell, in_todays_words, machine_line, shape_of, table
from report_text import fox_text_page

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
NOTHING = "No results are committed yet."

# ---- gla_errors.py ----


def errors_section(record: Record) -> list[str]:
    """Errors of the decays' gradient, in percent."""
    names = list(dict.fromkeys(name for row in record["rows"] for name in row["errors"]))
    rows = [
        [row["gate"], row["T"], *(f"{100 * row['errors'].get(n, float('nan')):.3g}" for n in names)]
        for row in sorted(record["rows"], key=lambda row: (row["gate"], row["T"]))
    ]
    where = (
        f"Relative error of dlog f against float64, percent, B1 H16 K128 V128, bf16, with h0 and a "
        f"gradient of the final state (aim: {100 * record['aim']:g}): {machine_line(record)}:"
    )
    return [where, "", *table(("gate", "T", *names), rows), ""]


def errors_page(record: Record) -> list[str]:
    return ["## The gradient of log decays", "", *errors_section(record)]


# ---- gated_rnn.py ----


def gated_rnn_section(record: Record) -> list[str]:
    """gated_rnn beside cuDNN's GRU and a loop of torch ops, in milliseconds."""
    others = ("cuDNN GRU", "torch loop")

    def row_of(row: Record) -> list[str]:
        ours = row["results"]["tidegate"]["ms"]
        beside = [row["results"].get(name) for name in others]
        cells = [f"{r['ms']:.2f} ms, {r['ms'] / ours:.1f}x" if r else "" for r in beside]
        goal = row["goal_ms"]
        aim = aim_cell(f"{goal:g} ms", ours <= goal) if goal else ""
        return [f"`gated_rnn` {shape_of(row)}", f"{ours:.2f} ms", aim, *cells]

    head = (
        "work, forward and backward",
        "time",
        "aim",
        "cuDNN GRU of the same width",
        "torch loop",
    )
    note = (
        "One call is both passes with all gradients. The GRU has three such matrices a step; the "
        "loop is the same maths by torch's autograd"
        + (", captured whole in a CUDA graph." if "gpu" in record["machine"] else ".")
        + f" TF32 {'on' if record['allow_tf32'] else 'off'}."
    )
    return [machine_line(record) + ":", "", *table(head, map(row_of, record["rows"])), "", note, ""]


def gated_rnn_page(record: Record) -> list[str]:
    where = record["machine"].get("gpu", {}).get("name", "the CPU")
    return [f"## The gated RNN on {where}", "", *gated_rnn_section(record)]


# ---- copying_step.py ----


def copying_step_section(record: Record) -> list[str]:
    """A training step beside the same model with torch's loop over time."""
    ours, loop = (record["results"][name]["ms"] for name in ("tidegate", "torch loop"))
    model = record["model"]
    what = f"{model['layers']} x {model['dim']}, B{record['B']} T{record['T']}, fp32"
    head = ("training step of the copying task", "time", "torch loop", "", "aim")
    row = (what, f"{ours:.1f} ms", f"{loop:.1f} ms", f"{record['ratio']:.1f}x")
    row = (*row, aim_cell("5x", record["ratio"] >= 5))
    note = (
        "Forward, backward and AdamW"
        + (" in one CUDA graph" if "gpu" in record["machine"] else "")
        + "; the loop is the same recurrence by torch's autograd, all else is equal."
    )
    return [machine_line(record) + ":", "", *table(head, [row]), "", note, ""]


def copying_step_page(record: Record) -> list[str]:
    return ["## A training step of the copying task", "", *copying_step_section(record)]


# ---- the demo beside other models ----


def demo_section(record: Record) -> list[str]:
    """HGRN and other models after the same wall time, and the baselines."""
    rows = []
    named = [("HGRN (`make demo`)", record["hgrn"])] if "hgrn" in record else []
    named += [(other["model"], other) for other in record["others"]]
    for name, result in named:
        rows.append(
            [
                name,
                f"{result['parameters'] / 1e6:.1f}M",
                f"{result['seconds']:.0f} s",
                f"{result['bytes_per_second'] / 1000:.1f}k",
                f"{result['bits_per_byte']:.2f}",
            ]
        )
    rows += [[name, "", "", "", f"{bits:.2f}"] for name, bits in record["baselines"].items()]
    machine = record["machine"]
    where = (
        f"Byte-level language models, same text and wall time, {machine['device_name']}, "
        f"{machine['threads']} threads, torch {machine['torch']}, commit {record['commit']}:"
    )
    head = ("model", "parameters", "training", "bytes/s", "validation bits per byte")
    return [where, "", *table(head, rows), ""]


def demo_page(record: Record) -> list[str]:
    return ["## The demo beside other models", "", *demo_section(record)]


# ---- files ----


class Section(NamedTuple):
    """What a kind of result makes: its part of docs/benchmarks.md, and of docs/lab/benchmarks.md
    where there is more to say."""

    page: Callable[[Record], list[str]]
    lab: Callable[[Record], list[str]] | None = None


SECTIONS = {  # by kind, in the order of the pages
    "baselines": Section(gpu_page, gpu_lab),
    "gla_errors": Section(errors_page),
    "cpu": Section(cpu_page),
    "gla_cpu": Section(gla_cpu_page),
    "attention_cpu": Section(attention_cpu_page),
    "cpu_loops": Section(loops_page),
    "gated_rnn": Section(gated_rnn_page),
    "copying_step": Section(copying_step_page),
    "models": Section(models_page),
    "generation": Section(generation_page),
    "fox_text": Section(fox_text_page),
    "demo": Section(demo_page),
}

MADE = "Made by `benchmarks/report.py` from `benchmarks/results/*.json`; not edited by hand."
PAGE_HEAD = f"""# Benchmarks

{MADE}

How to read the tables:

- Every output is checked against float64 before it is timed. A library whose result is wrong in a
  row is left out of it, and named.
- A time is the median of one call. On a GPU the calls lie in a CUDA graph, one for each of several
  sets of inputs, so nobody's host time counts; implementations take turns.
- GB/s count each tensor once. Copy speed is `copy_` moving as many bytes in the same run and
  harness: no kernel that reads and writes these tensors can be much faster.
- An aim is what the project asked of itself before it measured.
- Other libraries get their gates and inputs precomputed, untimed.

How each group was measured, with every time, its spread and its error, is in
[lab/benchmarks.md](lab/benchmarks.md).
"""
LAB_HEAD = f"""# How the benchmarks were measured

{MADE}
The tables for users are in [benchmarks.md](../benchmarks.md); this page has the method of each run
on a GPU, and the times of all implementations in it.
"""


def kind_of(record: Record) -> str | None:
    """Which of SECTIONS a result belongs to, or None."""
    if record.get("kind") in SECTIONS:
        return record["kind"]
    if "benchmarks" in record and cpu_rows(record):
        return "cpu"
    return "demo" if "others" in record and "baselines" in record else None


def load_results(folder: Path) -> list[tuple[str, Record]]:
    """(kind, result) of every file, by kind and then by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = in_todays_words(json.loads(path.read_text(encoding="utf-8")))
        except json.JSONDecodeError as error:
            raise SystemExit(f"report: {path} is not JSON: {error}") from error
        kind = kind_of(record)
        if kind is not None:
            found.append((kind, record))
    order = list(SECTIONS)
    return sorted(found, key=lambda pair: order.index(pair[0]))


def readme_section(results: Results) -> str:
    """What stands between README's markers."""
    return "\n".join(headline_table(results)) or NOTHING


def page(results: Results) -> str:
    """docs/benchmarks.md."""
    lines = [line for kind, record in results for line in SECTIONS[kind].page(record)]
    head = [*PAGE_HEAD.split("\n"), "## Commands", "", *commands_section()]
    return "\n".join([*head, *(lines or [NOTHING])]).rstrip("\n") + "\n"


def lab_page(results: Results) -> str:
    """docs/lab/benchmarks.md."""
    sections = [(SECTIONS[kind].lab, record) for kind, record in results]
    lines = [line for make, record in sections if make for line in make(record)]
    return "\n".join([*LAB_HEAD.split("\n"), *(lines or [NOTHING])]).rstrip("\n") + "\n"


def with_section(readme: str, section: str) -> str:
    """README with the section between its markers replaced. ValueError when it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def expected_files(root: Path) -> dict[Path, str]:
    """What README.md, the two pages and the pictures should hold."""
    results = load_results(root / "benchmarks" / "results")
    readme = root / "README.md"
    files = {
        readme: with_section(readme.read_text(encoding="utf-8"), readme_section(results)),
        root / "docs" / "benchmarks.md": page(results),
        root / "docs" / "lab" / "benchmarks.md": lab_page(results),
    }
    if bars := bars_of(results):
        for theme in THEMES:
            files[root / "docs" / f"speed_{theme}.svg"] = picture(bars, gpu_name(results), theme)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    options = parser.parse_args()
    stale = []
    for path, text in expected_files(options.root).items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.name)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for line in report_age.warnings(options.root):
        print(f"report: warning: {line}", file=sys.stderr)
    if options.check and stale:
        print(f"report: {', '.join(stale)} not what the results say: run benchmarks/report.py")
        return 1
    print(f"report: {'wrote ' + ', '.join(stale) if stale else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
