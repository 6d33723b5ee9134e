"""report.py's table of cpu_loops.py: ops on the CPU beside torch ops, token by token."""

from __future__ import annotations

from report_tables import Record, cpu_where, table


def loops_section(record: Record) -> list[str]:
    """Each op beside its loop."""
    rows = []
    for row in record["results"]:
        ours, loop = row["results"]["tidegate"], row["results"]["loop"]
        rows.append(
            [
                f"`{row['work']}`",
                f"{ours['ms']:.2f} ms",
                f"{loop['ms']:.1f} ms",
                f"{loop['ms'] / ours['ms']:.1f}x",
                f"{loop['cpu_ms'] / ours['cpu_ms']:.1f}x",
                ">= 5x",
                f"{ours['error']:.0e}",
            ]
        )
    head = (
        *("work", "tidegate", "loop", "", "by processor time", "aim"),
        "largest error against float64",
    )
    note = (
        "The loop is the op's equations in torch ops, one token after the other, eager; autograd "
        "differentiates it. Both take turns; medians. `gated_rnn` is products above all, 13 GFLOP "
        "at B16 T512 D512, which the loop leaves to torch's matrix library."
    )
    return [cpu_where(record), "", *table(head, rows), "", note, ""]


def loops_page(record: Record) -> list[str]:
    return ["## Recurrences on the CPU beside a loop", "", *loops_section(record)]
