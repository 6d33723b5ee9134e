"""report.py's table of cpu_loops.py: ops on the CPU beside torch ops, token by token."""

from __future__ import annotations

from report_tables import Record, aim_cell, cpu_where, seen_from_docs, table

AIM = 5  # times as fast as the loop


def loops_section(record: Record) -> list[str]:
    """Each op beside its loop."""
    rows, missed = [], []
    for row in record["results"]:
        ours, loop = row["results"]["tidegate"], row["results"]["loop"]
        times = loop["ms"] / ours["ms"]
        if times < AIM:
            missed.append(row["work"])
        rows.append(
            [
                f"`{row['work']}`",
                f"{ours['ms']:.2f} ms",
                f"{loop['ms']:.1f} ms",
                f"{times:.1f}x",
                f"{loop['cpu_ms'] / ours['cpu_ms']:.1f}x",
                aim_cell(f">= {AIM}x", times >= AIM),
                f"{ours['error']:.0e}",
            ]
        )
    head = (
        *("work", "tidegate", "loop", "", "by processor time", "aim"),
        "largest error against float64",
    )
    note = (
        "The loop is the op's equations in torch ops, one token after the other, eager; autograd "
        "differentiates it. Both take turns; medians."
    )
    if any(work.startswith("gated_rnn") for work in missed):
        note += (
            " At B16 T512 D512 `gated_rnn`'s aim is not reached, because the products, 13 GFLOP, "
            "take nearly all of the time, and the loop leaves them to torch's matrix library: "
            "[docs/kernels/rnn.md](docs/kernels/rnn.md#on-the-cpu)."
        )
    return [cpu_where(record), "", *table(head, rows), "", note, ""]


def loops_page(record: Record) -> list[str]:
    section = seen_from_docs("\n".join(loops_section(record)))
    return ["## Recurrences on the CPU beside a loop", "", *section.split("\n")]
