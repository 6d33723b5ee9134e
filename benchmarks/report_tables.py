"""Cells and tables that report.py's sections share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}

Record = dict

# Results keep the words of the script that wrote them; the tables read them by today's.
OLD_KEYS = {
    "best_peer": "best_baseline",
    "times_best_peer": "times_best_baseline",
    "peer_problems": "baseline_problems",
}
OLD_KINDS = {"peers": "baselines"}
OLD_WORDS = {"contender's": "implementation's", "contenders": "implementations"}
OLD_WORDS |= {"peers'": "baselines'", "the peer": "the baseline"}


def in_todays_words(value: Any) -> Any:
    """A result with the keys, the kind and the notes that baselines.py writes today."""
    if isinstance(value, list):
        return [in_todays_words(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {OLD_KEYS.get(key, key): in_todays_words(item) for key, item in value.items()}
    if found.get("kind") in OLD_KINDS:
        found["kind"] = OLD_KINDS[found["kind"]]
    if found.get("kind") == "baselines":
        found["notes"] = [in_todays_note(note) for note in found.get("notes", ())]
    return found


def in_todays_note(note: str) -> str:
    for old, new in OLD_WORDS.items():
        note = note.replace(old, new)
    return note


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def microseconds(value: float) -> str:
    """With the digits that mean something."""
    return f"{value:,.0f} us" if value >= 100 else f"{value:.1f} us"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}%"


def reaches_goal(row: Record) -> bool | None:
    """Whether tidegate is as fast as aimed at; None where nothing is aimed at, or nothing known."""
    ours = row["results"].get("tidegate")
    if ours is None:
        return None
    if row.get("goal_ms"):
        return ours["us"] <= 1000 * row["goal_ms"]
    if row.get("goal_tflops"):
        return ours["tflops"] >= row["goal_tflops"]
    if row.get("goal_percent") and "percent_of_copy" in ours:
        return ours["percent_of_copy"] >= row["goal_percent"]
    return None


def seen_from_docs(text: str) -> str:
    """README's text as a page in docs/ has it: links, and what they are called, start there."""
    return re.sub(r"([\[(])docs/", r"\1", text)


def aim_cell(aim: str, reached: bool | None) -> str:
    """An aim, marked where it was missed."""
    return f"{aim}, not reached" if reached is False else aim


def shape_of(row: Record) -> str:
    kind = "complex " if row.get("complex") else ""
    dtype = DTYPES.get(row["dtype"], row["dtype"])
    sizes = ("B", "T", "H", "Hkv", "D", "K", "V")
    return f"{kind}{dtype} " + " ".join(f"{size}{row[size]}" for size in sizes if size in row)


def same_shape(row: Record, rows: Iterable[Record], name: str) -> Record | None:
    """What `name` took for gated linear attention of a row's shape; None where it was not timed."""
    key = ("B", "T", "H", "K", "V", "direction")
    for other in rows:
        if name in other["results"] and all(other.get(k) == row.get(k) for k in key):
            return other["results"][name]
    return None


def machine_line(record: Record) -> str:
    """GPU, driver, versions, commit."""
    gpu = record["machine"].get("gpu", {})
    where = gpu.get("name", "CPU")
    details = [f"driver {gpu['driver_version']}"] if "driver_version" in gpu else []
    details += [f"{name} {value}" for name, value in record["versions"].items()]
    return f"{where}, {', '.join(details)}, commit {record['commit']}, {record['date']}"


def baseline_cell(row: Record) -> str:
    """The fastest other library, and how many times as long it takes."""
    if "best_baseline" not in row:
        return ""
    name = row["best_baseline"]
    result = row["results"][name]
    time = microseconds(result["us"])
    return f"{name}: {time}, {result['gb_per_s']:.0f} GB/s, {row['times_best_baseline']:.1f}x"


def gpu_row(row: Record) -> list[str]:
    ours, copied = row["results"].get("tidegate"), row["results"].get("copy_")
    if ours is None:
        return [f"`{row['op']}` {shape_of(row)}", row["direction"], "failed", "", "", "", ""]
    return [
        f"`{row['op']}` {shape_of(row)}",
        row["direction"],
        microseconds(ours["us"]),
        f"{ours['gb_per_s']:.0f}",
        percent(ours.get("percent_of_copy")) if copied else "",
        aim_cell(percent(row["goal_percent"]), reaches_goal(row)),
        baseline_cell(row),
    ]


GPU_HEAD = ("work", "direction", "time", "GB/s", "of copy speed", "aim", "fastest other library")


def cpu_where(record: Record) -> str:
    """What was measured, and where."""
    return (
        f"`{record['work'].strip()}`, {record['direction']}, {record['machine']['device_name']}, "
        f"{record['threads']} threads, load average {record['load_average']:.1f}, "
        f"torch {record['versions']['torch']}, commit {record['commit']}, {record['date']}:"
    )
