"""The tables of the CPU kernels: bench_kernels' beside copies, gla_cpu.py's beside torch ops."""

from __future__ import annotations

from report_tables import DTYPES, Record, aim_cell, cpu_where, percent, table

# Percent of copy speed asked of the CPU: hgru real fp32 B4 T2048 D1024 on two threads.
CPU_GOALS = {
    ("avx512", "forward"): 60,
    ("avx512", "backward"): 45,
    ("avx2", "forward"): 40,
    ("avx2", "backward"): 30,
}
CPU_HEAD = (
    *("work", "direction", "code", "GB/s", "copying", "of copy speed", "aim"),
    *("by CPU time", "of streaming copy"),
)


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


def cpu_machine(record: Record) -> str:
    context = record["context"]
    name = context.get("cpu", f"CPU of {context['mhz_per_cpu']} MHz")
    commit = f", commit {context['commit']}" if "commit" in context else ""
    load = context.get("load_avg", [])
    busy = f", load average {load[0]:.1f}" if load else ""
    return f"{name}, {context['num_cpus']} cores{busy}{commit}, {context['date'][:10]}"


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
    head = ("implementation", "median", "", "fastest", "", "largest error against float64")
    note = (
        'The torch versions are compiled by `torch.compile`. "One reference" is less work and '
        "overflows where gates shut; the others are exact for any gate. All take turns; "
        "where the load is above the number of cores, the fastest rounds say more."
    )
    return [cpu_where(record), "", *table(head, rows), "", note, ""]


def gla_cpu_page(record: Record) -> list[str]:
    return ["## Gated linear attention on the CPU", "", *gla_cpu_section(record)]
