"""The pages of baselines.py's results: tidegate's ops on a GPU, beside copies and other libraries.

`gpu_page` is the part of docs/benchmarks.md (one table a group of work), `gpu_lab` that of
docs/lab/benchmarks.md (how it was measured, and every implementation's times, spread and error).
"""

from __future__ import annotations

from collections.abc import Sequence

from report_attention import attention_table
from report_tables import (
    GPU_HEAD,
    Record,
    aim_cell,
    gpu_row,
    machine_line,
    microseconds,
    reaches_goal,
    same_shape,
    seen_from_docs,
    shape_of,
    table,
)

GLA_HEAD = (
    *GPU_HEAD[:4],
    "of copy speed (its bytes alone)",
    *GPU_HEAD[5:],
    "peak memory, of fla's",
)
WHY_NOT = {  # group -> where it says why an aim was not reached
    "aims": "docs/lab/scan.md#aims-not-reached",
    "gla": "docs/kernels/gla_cuda_backward.md#what-bounds-it",
}


def gla_row(row: Record, rows: Sequence[Record]) -> list[str]:
    """gpu_row's cells with aims in microseconds, and memory; hgrn2 stands beside fla's time for as
    many tokens of gated linear attention, which is timed once."""
    cells = gpu_row(row | {"goal_percent": row.get("goal_percent")})
    ours = row["results"].get("tidegate")
    if ours is None:
        return [*cells, ""]
    if row.get("goal_ms"):
        cells[5] = aim_cell(f"{1000 * row['goal_ms']:.0f} us", reaches_goal(row))
    baseline = same_shape(row, rows, "fla.chunk_gla")
    if baseline is not None:
        times = baseline["us"] / ours["us"]
        cells[6] = f"fla.chunk_gla: {microseconds(baseline['us'])}, {times:.1f}x"
    memory = ""
    if "peak_bytes" in ours:
        memory = f"{ours['peak_bytes'] / 2**30:.2f} GiB"
        if baseline is not None and "peak_bytes" in baseline:
            memory += f" of {baseline['peak_bytes'] / 2**30:.2f}"
    return [*cells, memory]


def gla_table(record: Record) -> list[str]:
    rows = rows_of(record, "gla")
    return [*table(GLA_HEAD, (gla_row(row, rows) for row in rows)), ""] if rows else []


ATTENTIONS = {  # group -> title, table
    "gla": ("Gated linear attention", gla_table),
    "attention": ("Forgetting attention", attention_table),
}
SCANS = {"aims": "Shapes with aims", "sweep": "Sweep of training shapes", "extra": "Further shapes"}


def rows_of(record: Record, group: str) -> list[Record]:
    return [row for row in record["rows"] if row["group"] == group]


def gpu_title(record: Record) -> str:
    """The heading of a result, on both pages."""
    attentions = [title for group, (title, _) in ATTENTIONS.items() if rows_of(record, group)]
    swept = rows_of(record, "sweep") and not rows_of(record, "aims")
    what = " and ".join(attentions or ["A sweep of scans" if swept else "Scans"])
    name = record["machine"].get("gpu", {}).get("name", "CPU")
    return f"## {what} on {name}, beside copies and other libraries"


def sweep_line(record: Record) -> str | None:
    """One sentence on the shapes beside those that have aims."""
    rows = [row for row in rows_of(record, "sweep") if "times_best_baseline" in row]
    if not rows:
        return None
    ratios = sorted(row["times_best_baseline"] for row in rows)
    slower = [row for row in rows if row["times_best_baseline"] < 1]
    shapes = len({(row["B"], row["T"], row["D"]) for row in rows})
    text = (
        f"In a sweep of {shapes} other shapes the faster of fla's two scans takes {ratios[0]:.1f} "
        f"to {ratios[-1]:.1f} times as long, forward and backward."
    )
    if slower:
        names = ", ".join(f"{shape_of(row)} {row['direction']}" for row in slower)
        text += f" tidegate is slower in {len(slower)} of {len(rows)}: {names}."
    return text


def missed_line(record: Record) -> str | None:
    """Where to read about the aims that were not reached."""
    missed = {row["group"] for row in record["rows"] if reaches_goal(row) is False}
    pages = [f"[{page.partition('#')[0]}]({page})" for g, page in WHY_NOT.items() if g in missed]
    return f"Why an aim was not reached: {', '.join(pages)}." if pages else None


def gpu_page(record: Record) -> list[str]:
    """One table a group of work."""
    lines = [gpu_title(record), "", machine_line(record) + ".", ""]
    for group, title in SCANS.items():
        if rows := rows_of(record, group):
            lines += [f"### {title}", ""] if len(rows) < len(record["rows"]) else []
            lines += [*table(GPU_HEAD, map(gpu_row, rows)), ""]
    for group, (_, table_of) in ATTENTIONS.items():
        if rows_of(record, group):
            lines += table_of(record)
    notes = [sweep_line(record), missed_line(record)]
    lines += [line for note in filter(None, notes) for line in (seen_from_docs(note), "")]
    lists = {
        "Problems": record["problems"],
        "Wrong results of other libraries, left out of their rows": record.get("baseline_problems"),
    }
    for title, problems in lists.items():
        if problems:
            lines += [f"{title}:", "", *(f"- {problem}" for problem in problems), ""]
    return lines


def gpu_lab(record: Record) -> list[str]:
    """How it was measured, and all times."""
    lines = [gpu_title(record), "", machine_line(record) + ".", ""]
    gpu = record["machine"].get("gpu", {})
    clocks = [f"{k} {v}" for k, v in gpu.items() if k.startswith(("clocks", "power"))]
    if clocks:
        lines += [f"As found: {', '.join(clocks)}.", ""]
    lines += [f"- {note}" for note in (*record["notes"], *record["missing"])] + [""]
    return [*lines, *every_figure(record["rows"])]


def every_figure(rows: list[Record]) -> list[str]:
    """Times of all implementations, with their spread and error."""
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
