#!/usr/bin/env python3
"""README's figures and docs/benchmarks.md, made from benchmarks/results/*.json.

    python benchmarks/report.py            # writes both
    python benchmarks/report.py --check    # fails when one is not what the results say

Results are told apart by what they hold: peers.py's runs ("kind": "peers"), Google Benchmark files
of the CPU kernels ("benchmarks"), gla_cpu.py's, attention_cpu.py's, cpu_loops.py's,
gla_errors.py's, gated_rnn.py's, copying_step.py's and bench_models' by their "kind", and the demo's
comparison ("others"). README shows the rows that have an aim; docs/benchmarks.md shows every row.
Results whose kernels have changed since their commit are warned of on stderr (report_age.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import report_age
from report_attention import attention_cpu_page, attention_cpu_section, attention_table
from report_commands import commands_section
from report_loops import loops_page, loops_section
from report_models import models_page, models_readme
from report_tables import (
    DTYPES,
    GPU_HEAD,
    Record,
    aim_cell,
    cpu_where,
    gpu_row,
    microseconds,
    percent,
    reaches_goal,
    seen_from_docs,
    shape_of,
    table,
)
from report_text import fox_text_page, fox_text_section

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
NOTHING = "No results are committed yet."
# Percent of copy speed asked of the CPU: hgru real fp32 B4 T2048 D1024 on two threads.
CPU_GOALS = {
    ("avx512", "forward"): 60,
    ("avx512", "backward"): 45,
    ("avx2", "forward"): 40,
    ("avx2", "backward"): 30,
}

# ---- peers.py ----


def gla_row(row: Record, rows: Sequence[Record]) -> list[str]:
    """As gpu_row, with aims in milliseconds and memory; hgrn2 beside fla's time for as many tokens
    of gated linear attention, which is timed once."""
    cells = gpu_row(row | {"goal_percent": row.get("goal_percent")})
    ours = row["results"].get("tidegate")
    if ours is None:
        return [*cells, ""]
    if row.get("goal_ms"):
        cells[5] = aim_cell(f"{1000 * row['goal_ms']:.0f} us", reaches_goal(row))
    key = ("B", "T", "H", "K", "V", "direction")
    same = [r for r in rows if all(r[k] == row[k] for k in key) and "fla.chunk_gla" in r["results"]]
    peer = same[0]["results"]["fla.chunk_gla"] if same else None
    if peer is not None:
        times = peer["us"] / ours["us"]
        cells[6] = f"fla.chunk_gla: {microseconds(peer['us'])}, {times:.1f}x"
    memory = ""
    if "peak_bytes" in ours:
        memory = f"{ours['peak_bytes'] / 2**30:.2f} GiB"
        if peer is not None and "peak_bytes" in peer:
            memory += f" of {peer['peak_bytes'] / 2**30:.2f}"
    return [*cells, memory]


GLA_HEAD = (
    *GPU_HEAD[:4],
    "of copy speed (its bytes alone)",
    *GPU_HEAD[5:],
    "peak memory, of fla's",
)


def gla_table(record: Record) -> list[str]:
    rows = [row for row in record["rows"] if row["group"] == "gla"]
    return [*table(GLA_HEAD, (gla_row(row, rows) for row in rows)), ""] if rows else []


def machine_line(record: Record) -> str:
    """GPU, driver, versions, commit."""
    gpu = record["machine"].get("gpu", {})
    where = gpu.get("name", "CPU")
    details = [f"driver {gpu['driver_version']}"] if "driver_version" in gpu else []
    details += [f"{name} {value}" for name, value in record["versions"].items()]
    return f"{where}, {', '.join(details)}, commit {record['commit']}, {record['date']}"


def sweep_line(record: Record) -> str | None:
    """One sentence on the shapes beside those that have aims."""
    rows = [r for r in record["rows"] if r["group"] == "sweep" and "times_best_peer" in r]
    if not rows:
        return None
    ratios = sorted(row["times_best_peer"] for row in rows)
    slower = [row for row in rows if row["times_best_peer"] < 1]
    shapes = len({(row["B"], row["T"], row["D"]) for row in rows})
    text = (
        f"In a sweep of {shapes} other shapes the faster of fla's two scans takes {ratios[0]:.1f} "
        f"to {ratios[-1]:.1f} times as long, forward and backward."
    )
    if slower:
        names = ", ".join(f"{shape_of(row)} {row['direction']}" for row in slower)
        text += f" tidegate is slower in {len(slower)} of {len(rows)}: {names}."
    return text


WHY_NOT = {  # group -> where it says why an aim was not reached
    "aims": "docs/kernels/scan_cuda_measured.md#aims-not-reached",
    "gla": "docs/kernels/gla_cuda.md#what-was-measured",
}


def missed_line(record: Record) -> str | None:
    """Where to read about the aims that were not reached."""
    missed = {row["group"] for row in record["rows"] if reaches_goal(row) is False}
    pages = [f"[{page.partition('#')[0]}]({page})" for g, page in WHY_NOT.items() if g in missed]
    return f"Why an aim was not reached: {', '.join(pages)}." if pages else None


def gpu_readme(record: Record) -> list[str]:
    rows = [gpu_row(row) for row in record["rows"] if row["group"] == "aims"]
    lines = [machine_line(record) + ":", "", *gla_table(record), *attention_table(record)]
    lines += [*table(GPU_HEAD, rows), ""] if rows else []
    notes = []
    if len(lines) > 2:  # tables
        notes += [
            "GB/s count each tensor once; copy speed is `copy_` moving as many bytes in the same "
            "run and harness. Other libraries get their gates and inputs precomputed, untimed.",
            missed_line(record),
        ]
    notes.append(sweep_line(record))
    return [*lines, *filter(None, notes), ""]


ATTENTIONS = {  # group -> title, table
    "gla": ("Gated linear attention", gla_table),
    "attention": ("Forgetting attention", attention_table),
}


def has_group(record: Record, group: str) -> bool:
    return any(row["group"] == group for row in record["rows"])


def gpu_page(record: Record) -> list[str]:
    gpu = record["machine"].get("gpu", {})
    attentions = [title for group, (title, _) in ATTENTIONS.items() if has_group(record, group)]
    swept = has_group(record, "sweep") and not has_group(record, "aims")
    what = " and ".join(attentions or ["A sweep of scans" if swept else "Scans"])
    lines = [f"## {what} on {gpu.get('name', 'CPU')}, beside copies and other libraries", ""]
    lines += [machine_line(record) + ".", ""]
    clocks = [f"{k} {v}" for k, v in gpu.items() if k.startswith(("clocks", "power"))]
    if clocks:
        lines += [f"As found: {', '.join(clocks)}.", ""]
    lines += [f"- {note}" for note in (*record["notes"], *record["missing"])] + [""]
    titles = {"aims": "Aims", "sweep": "Sweep of training shapes", "extra": "Further"}
    for group, title in titles.items():
        rows = [row for row in record["rows"] if row["group"] == group]
        if rows:
            lines += [f"### {title}", "", *table(GPU_HEAD, map(gpu_row, rows)), ""]
            lines += every_figure(rows)
    for group, (title, table_of) in ATTENTIONS.items():
        rows = [row for row in record["rows"] if row["group"] == group]
        if rows:
            lines += [f"### {title}", "", *table_of(record), *every_figure(rows)]
    if missed := missed_line(record):
        lines += [seen_from_docs(missed), ""]
    lists = {
        "Problems": record["problems"],
        "Wrong results of other libraries, left out of their rows": record.get("peer_problems"),
    }
    for title, problems in lists.items():
        if problems:
            lines += [f"{title}:", "", *(f"- {problem}" for problem in problems), ""]
    return lines


def every_figure(rows: list[Record]) -> list[str]:
    """Times of all contenders, with their spread and error."""
    names = list(dict.fromkeys(name for row in rows for name in row["results"]))
    body = []
    for row in rows:
        cells = [f"`{row['op']}` {shape_of(row)} {row['direction']}"]
        for name in names:
            result = row["results"].get(name)
            if result is None:
                cells.append("")
                continue
            error = f", error {result['error']:.0e}" if not name.startswith("copy_") else ""
            cells.append(f"{result['us']} ({result['us_low']}-{result['us_high']}){error}")
        body.append(cells)
    note = "Microseconds: the median, the middle 80%, and the error against float64."
    return [note, "", *table(["work", *names], body), ""]


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


def errors_readme(record: Record) -> list[str]:
    longest = max(row["T"] for row in record["rows"])
    return errors_section(record | {"rows": [r for r in record["rows"] if r["T"] == longest]})


def errors_page(record: Record) -> list[str]:
    return ["## The gradient of log decays", "", *errors_section(record)]


# ---- CPU kernels (Google Benchmark) ----


def cpu_rows(record: Record) -> list[Record]:
    """Rows with the parts of their names: cpu/hgru/forward/real/float32/B4/T2048/D1024/isa/..."""
    rows = []
    for run in record["benchmarks"]:
        parts = run["name"].split("/")
        if parts[0] != "cpu" or "percent_of_copy" not in run or len(parts) < 10:
            continue
        names = ("op", "direction", "kind", "dtype", "B", "T", "D", "isa", "threads")
        rows.append(run | dict(zip(names, parts[1:10], strict=True)))
    return rows


def cpu_row(row: Record) -> list[str]:
    kind = "complex " if row["kind"] == "complex" else ""
    dtype = DTYPES.get(row["dtype"], row["dtype"])
    asked = (row["kind"], dtype, row["threads"]) == ("real", "fp32", "threads2")
    goal = CPU_GOALS.get((row["isa"], row["direction"])) if asked else None
    return [
        f"`{row['op']}` {kind}{dtype} {row['B']} {row['T']} {row['D']}",
        row["direction"],
        f"{row['isa']}, {row['threads'].removeprefix('threads')} threads",
        f"{row['GB/s']:.1f}",
        f"{row['copy_GB/s']:.1f}",
        percent(row["percent_of_copy"]),
        aim_cell(percent(goal), goal is None or row["percent_of_copy"] >= goal),
        percent(row.get("cpu_percent_of_copy")),
        percent(row.get("percent_of_streaming_copy")),
    ]


def busy_note(record: Record) -> list[str]:
    """A warning where other work ran on the machine."""
    load = record["context"].get("load_avg", [0])
    if load[0] <= record["context"]["num_cpus"]:
        return []
    return [
        "Other work kept this machine busy, so the GB/s are lower than it can do; kernels and "
        "copies took turns, so the percentages compare like with like.",
        "",
    ]


CPU_HEAD = (
    *("work", "direction", "code", "GB/s", "copying", "of copy speed", "aim"),
    *("by CPU time", "of streaming copy"),
)
CPU_README_COLUMNS = 8


def cpu_machine(record: Record) -> str:
    context = record["context"]
    name = context.get("cpu", f"CPU of {context['mhz_per_cpu']} MHz")
    commit = f", commit {context['commit']}" if "commit" in context else ""
    load = context.get("load_avg", [])
    busy = f", load average {load[0]:.1f}" if load else ""
    return f"{name}, {context['num_cpus']} cores{busy}{commit}, {context['date'][:10]}"


def cpu_readme(record: Record) -> list[str]:
    shown = []
    for row in cpu_rows(record):
        asked = (row["kind"], row["dtype"], row["threads"]) == ("real", "float32", "threads2")
        if asked and (row["isa"], row["direction"]) in CPU_GOALS:
            shown.append(cpu_row(row))
    if not shown:
        return []
    columns = CPU_README_COLUMNS
    shown = [row[:columns] for row in shown]
    return [
        cpu_machine(record) + ":",
        "",
        *table(CPU_HEAD[:columns], shown),
        "",
        *busy_note(record),
    ]


def cpu_page(record: Record) -> list[str]:
    rows = map(cpu_row, cpu_rows(record))
    note = (
        "`bench_kernels`: copies (memcpy of as many bytes on as many threads), copies with "
        "streaming stores, and kernels take turns; medians. By CPU time: the same ratio in the "
        "time that the threads really ran, which other work on the machine disturbs less."
    )
    head = ["## CPU kernels beside copying", "", cpu_machine(record) + ".", "", note, ""]
    head += busy_note(record)
    return [*head, *table(CPU_HEAD, rows), ""]


# ---- gla_cpu.py ----


def gla_cpu_section(record: Record) -> list[str]:
    """gated_linear_attention on the CPU, and the same maths in torch ops."""
    best = record["results"]["tidegate"]["best_ms"]
    rows = [
        [
            name,
            f"{result['ms']:.1f} ms",
            f"{result['times']:.1f}x",
            f"{result['best_ms']:.1f} ms",
            f"{result['best_ms'] / best:.1f}x",
            f"{result['error']:.0e}",
        ]
        for name, result in record["results"].items()
    ]
    head = ("contender", "median", "", "fastest", "", "largest error against float64")
    note = (
        'The torch versions are compiled by `torch.compile`. "One reference" is less work and '
        "overflows where gates shut; the others are exact for any gate. Contenders take turns; "
        "where the load is above the number of cores, the fastest rounds say more."
    )
    return [cpu_where(record), "", *table(head, rows), "", note, ""]


def gla_cpu_page(record: Record) -> list[str]:
    return ["## Gated linear attention on the CPU", "", *gla_cpu_section(record)]


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

SECTIONS = {  # kind -> README, page; in this order
    "peers": (gpu_readme, gpu_page),
    "gla_errors": (errors_readme, errors_page),
    "cpu": (cpu_readme, cpu_page),
    "gla_cpu": (gla_cpu_section, gla_cpu_page),
    "attention_cpu": (attention_cpu_section, attention_cpu_page),
    "cpu_loops": (loops_section, loops_page),
    "gated_rnn": (gated_rnn_section, gated_rnn_page),
    "copying_step": (copying_step_section, copying_step_page),
    "models": (models_readme, models_page),
    "fox_text": (fox_text_section, fox_text_page),
    "demo": (demo_section, demo_page),
}


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
            record = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise SystemExit(f"report: {path} is not JSON: {error}") from error
        kind = kind_of(record)
        if kind is not None:
            found.append((kind, record))
    order = list(SECTIONS)
    return sorted(found, key=lambda pair: order.index(pair[0]))


def readme_section(results: list[tuple[str, Record]]) -> str:
    """What stands between the markers: every result under the heading that its page has."""
    lines: list[str] = []
    for kind, record in results:
        short, whole = (make(record) for make in SECTIONS[kind])
        if short:
            lines += ["###" + whole[0].removeprefix("##"), "", *short]
    if not lines:
        return NOTHING
    lines += ["All rows, and how they were measured: [docs/benchmarks.md](docs/benchmarks.md)."]
    return "\n".join(lines)


def page(results: list[tuple[str, Record]]) -> str:
    """docs/benchmarks.md."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `benchmarks/report.py` from `benchmarks/results/*.json`; not edited by hand.",
        "Every output is checked before it is timed; a library whose result is wrong in a row is",
        "left out of it, and named.",
        "",
        *commands_section(),
    ]
    lines += [line for kind, record in results for line in SECTIONS[kind][1](record)]
    return "\n".join(lines if results else [*lines, NOTHING, ""]).rstrip("\n") + "\n"


def with_section(readme: str, section: str) -> str:
    """README with the section between its markers replaced. ValueError when it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def expected_files(root: Path) -> dict[Path, str]:
    """What README.md and docs/benchmarks.md should hold."""
    results = load_results(root / "benchmarks" / "results")
    readme = root / "README.md"
    return {
        readme: with_section(readme.read_text(encoding="utf-8"), readme_section(results)),
        root / "docs" / "benchmarks.md": page(results),
    }


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
