"""report.py's tables of forgetting attention: baselines.py's group "attention" and
attention_cpu.py."""

from __future__ import annotations

from report_tables import (
    GPU_HEAD,
    Record,
    aim_cell,
    cpu_where,
    gpu_row,
    microseconds,
    reaches_goal,
    shape_of,
    table,
)

ATTENTION_HEAD = (
    *(
        "work",
        "direction",
        "time",
        "TFLOP/s",
        "aim",
        "matrix products",
        "fla",
        "the paper's kernel",
    ),
    *("FlashAttention-2, no gate", "cuDNN, no gate", "bytes a row and head beside, allowed"),
)
ATTENTION_BESIDE = (
    "matmul",
    "fla.parallel_forgetting_attn",
    "paper's forgetting_attention",
    "SDPA FlashAttention-2, no gate",
    "SDPA cuDNN, no gate",
)


def attention_row(row: Record) -> list[str]:
    """Rates; where work is pruned, times."""
    ours, pruned = row["results"].get("tidegate"), "prune" in row
    title = f"`{row['op']}` {shape_of(row)}" + (f" prune {row['prune']:.1e}" if pruned else "")
    if ours is None:
        return [title, row["direction"], "failed", *[""] * (len(ATTENTION_HEAD) - 3)]

    def rate(name: str) -> str:
        result = row["results"].get(name)
        if result is None:
            return ""
        return (
            microseconds(result["us"]) if pruned and name != "matmul" else f"{result['tflops']:.0f}"
        )

    aim = f"{1000 * row['goal_ms']:.0f} us" if pruned else f"{row['goal_tflops']}"
    memory = ""
    if "extra_bytes_a_row" in ours:
        memory = f"{ours['extra_bytes_a_row']:.1f}, {ours['goal_bytes_a_row']}"
    return [
        title,
        row["direction"],
        microseconds(ours["us"]),
        "" if pruned else f"{ours['tflops']:.0f}",
        aim_cell(aim, reaches_goal(row)),
        *map(rate, ATTENTION_BESIDE),
        memory,
    ]


def attention_table(record: Record) -> list[str]:
    """Forgetting attention: rates, and the step beside a copy."""
    rows = [row for row in record["rows"] if row["group"] == "attention"]
    if not rows:
        return []
    passes = [row for row in rows if not row["op"].endswith("_step")]
    steps = [gpu_row(row) for row in rows if row["op"].endswith("_step")]
    return [
        *table(ATTENTION_HEAD, map(attention_row, passes)),
        "",
        *(["Decoding:", "", *table(GPU_HEAD, steps), ""] if steps else []),
    ]


def attention_cpu_section(record: Record) -> list[str]:
    """forgetting_attention on the CPU, and SDPA with the gate as a matrix."""
    ours = record["results"]["tidegate"]
    rows = [
        [
            name,
            f"{result['ms']:.0f} ms",
            f"{result['ms'] / ours['ms']:.1f}x",
            f"{result['best_ms']:.0f} ms",
            f"{result['cpu_ms']:.0f} ms",
            f"{result['cpu_ms'] / ours['cpu_ms']:.1f}x",
            f"{result['peak_bytes'] / 2**20:.1f} MiB",
            f"{result['beside_bytes'] / 2**20:.1f} MiB",
            f"{result['error']:.0e}",
        ]
        for name, result in record["results"].items()
    ]
    head = (
        *("implementation", "median", "", "fastest", "processor time", ""),
        *("memory at the peak", "beside o and gradients", "largest error against float64"),
    )
    note = (
        '"Bias given": the matrix of c_i - c_j is made untimed and has no gradient; "from log f": '
        "it is made and differentiated. All take turns in one process; memory is the growth "
        "of the resident set, the matrix included."
    )
    return [cpu_where(record), "", *table(head, rows), "", note, ""]


def attention_cpu_page(record: Record) -> list[str]:
    return ["## Forgetting attention on the CPU", "", *attention_cpu_section(record)]
