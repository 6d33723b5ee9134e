"""What baselines.py prints: a line a row, and at the end which goals were reached."""

from __future__ import annotations

from report_tables import reaches_goal

# The names of results that are no other library's begin so.
OURS = ("tidegate", "copy_", "matmul")


def others(results: dict[str, dict]) -> list[str]:
    """The implementations of other libraries that compute the same."""
    return [name for name in results if not name.startswith((*OURS, "SDPA"))]


def attention_line(row: dict) -> str:
    """One short line of rates."""
    sizes = " ".join(f"{letter}{row[letter]}" for letter in "BTHD")
    parts = [f"{row['op']} {sizes} {row['direction']}{' pruned' if row.get('prune') else ''}"]
    for name, result in row["results"].items():
        rate = f" {result['tflops']:.0f}TF" if "tflops" in result else ""
        memory = f" +{result['extra_bytes_a_row']}B/row" if "extra_bytes_a_row" in result else ""
        parts.append(f"{name} {result['us']:.0f}us{rate}{memory}")
        if name == "tidegate":
            goal = row.get("goal_ms") or row["goal_tflops"]
            parts[-1] += f" (goal {goal}: {'ok' if reaches_goal(row) else 'MISSED'})"
    return " | ".join(parts)


def line_of(row: dict) -> str:
    """One short line a row."""
    if row.get("goal_tflops") or "prune" in row:
        return attention_line(row)
    kind = ("c" if row.get("complex") else "") + row["dtype"].replace("float", "")
    sizes = " ".join(f"{letter}{row[letter]}" for letter in "BTDH" if letter in row)
    shape = f"{row['op']:11.11} {kind:6} {sizes}"
    parts = [f"{shape:38} {row['direction'][:3]}"]
    ours = row["results"].get("tidegate")
    copies = [result for name, result in row["results"].items() if name.startswith("copy_")]
    copied = min(copies, key=lambda result: result["us"], default=None)
    if copied:
        parts.append(f"copy {copied['us']:.1f}us {copied['gb_per_s']:.0f}GB/s")
    if ours:
        percent = f" {ours['percent_of_copy']:.1f}%" if copied else ""
        verdict = ""
        if reaches_goal(row) is not None:
            goal = row.get("goal_percent") or f"{row['goal_ms']} ms"
            verdict = f" (goal {goal}: {'ok' if reaches_goal(row) else 'MISSED'})"
        parts.append(f"tg {ours['us']:.1f}us {ours['gb_per_s']:.0f}GB/s{percent}{verdict}")
    for name in others(row["results"]):
        result = row["results"][name]
        short = name.removeprefix("fla.").removesuffix("_hgrn")
        ratio = f" x{result['us'] / ours['us']:.2f}" if ours else ""
        parts.append(f"{short} {result['us']:.0f}us {result['gb_per_s']:.0f}GB/s{ratio}")
    return " | ".join(parts)


def summary_of(rows: list[dict], problems: list[str], baseline_problems: list[str]) -> list[str]:
    """What the run says of the goals, and of what failed."""
    lines = []
    goals = [reached for row in rows if (reached := reaches_goal(row)) is not None]
    lines.append(f"goals reached: {sum(goals)} of {len(goals)}")
    beside = [row for row in rows if "times_best_baseline" in row]
    if beside:
        worst = min(beside, key=lambda row: row["times_best_baseline"])
        lines.append(
            f"against the best baseline: {sum(r['times_best_baseline'] >= 1 for r in beside)} of "
            f"{len(beside)} rows not slower; worst x{worst['times_best_baseline']} at "
            f"{worst['op']} B{worst['B']} T{worst['T']} {worst['direction']}"
        )
    lines += [f"BASELINE PROBLEM {line}" for line in baseline_problems]
    lines += [f"PROBLEM {line}" for line in problems]
    return lines
