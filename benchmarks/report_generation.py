"""report.py's table of `tidegate bench --generate`: tokens/s beside what the memory's speed allows,
and beside an earlier library's where both ran on one machine in turn."""

from __future__ import annotations

from report_tables import Record, table


def generation_section(record: Record) -> list[str]:
    """Tokens/s a sequence."""
    earlier = record.get("before", {"rows": []})
    has_eager = any(row["eager"] for row in record["rows"])
    before = {
        tuple(row[key] for key in ("model", "batch", "prompt")): row for row in earlier["rows"]
    }

    def row_of(row: Record) -> list[str]:
        old = before.get((row["model"], row["batch"], row["prompt"]))
        speed, bound = row["tokens_per_second"], row["bound"]
        return [
            f"`{row['model']}`",
            str(row["batch"]),
            f"{row['prompt']:,}",
            f"{speed:,.0f}",
            f"{speed / bound:.0%}",
            *([f"{row['eager']:,.0f}" if row["eager"] else ""] if has_eager else []),
            *([f"{old['tokens_per_second']:,.0f}" if old else ""] if before else []),
            f"{row['batch'] * speed:,.0f}",
        ]

    head = ["model", "sequences", "prompt", "tokens/s a sequence", "of the bound"]
    head += ["without graphs"] if has_eager else []
    head += [f"at {earlier['commit'][:7]}"] if before else []
    new_tokens = " or ".join(str(n) for n in dict.fromkeys(row["new"] for row in record["rows"]))
    where = (
        f"{record['device']}, torch {record['torch']}, {record['dtype'].removeprefix('torch.')}, "
        f"commit {record['commit']}, {new_tokens} new tokens, sampling on:"
    )
    note = (
        "The bound is what reading the weights once, the caches once, and reading and writing the "
        f"states take at a copy's speed, {record['copy_bytes_per_second'] / 1e9:,.0f} GB/s."
    )
    return [where, "", *table((*head, "in all"), map(row_of, record["rows"])), "", note, ""]


def generation_page(record: Record) -> list[str]:
    return ["## Generation", "", *generation_section(record)]
