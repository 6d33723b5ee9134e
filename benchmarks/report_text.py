"""report.py's table of fox_text.py: language models on real text, within and beyond the context
that they were trained on."""

from __future__ import annotations

import math

from report_tables import Record, seen_from_docs, table

HEAD = (
    "model",
    "parameters",
    "bytes read",
    "validation, windows of {context}",
    "the same after {equal:.0f}M bytes",
    "the first {context} bytes of {length}",
    "all {length}",
    "around byte {context}",
    "around byte {length}",
    "bytes of the needle's answer, up to {context}",
    "beyond",
)


def equal_tokens(runs: list[Record]) -> int:
    """The most tokens after which all models were scored, whatever they read in the end."""
    return max(set.intersection(*({tokens for tokens, _ in run["curve"]} for run in runs)))


def fox_text_row(run: Record, equal: int) -> list[str]:
    """A model's bits a byte, and the share of the needle test's answers that matches, in bytes."""
    found, needle = run["per_token"], run["needle"]
    context, length = str(found["trained_context"]), max(found["perplexity"], key=int)
    bits = [math.log2(found["perplexity"][n]) for n in (context, length)]
    bits += [found["loss"][n] / math.log(2) for n in (context, length)]
    shares = [
        [
            share
            for row in needle["answer_tokens"]
            for share, n in zip(row, needle["lengths"], strict=True)
            if (n > int(context)) == beyond
        ]
        for beyond in (False, True)
    ]
    return [
        run["name"],
        f"{run['parameters']:,}",
        f"{run['tokens'] / 1e6:.1f}M",
        f"{run['bits_per_byte']:.4f}",
        f"{dict(run['curve'])[equal]:.4f}",
        *(f"{value:.4f}" for value in bits),
        *(f"{sum(some) / len(some):.0%}" if some else "" for some in shares),
    ]


def fox_text_section(record: Record) -> list[str]:
    """What was read, and the table; bits a byte, the lower the better."""
    runs, machine, data = record["runs"], record["machine"], record["data"]
    length = max(runs[0]["per_token"]["perplexity"], key=int)
    commit = record["commit"]
    for later in record.get("later", ()):  # models that were run once more
        named = " and ".join(run["name"] for run in runs if run["model"] in later["models"])
        commit += f", {named} {later['commit'][:12]}"
    where = (
        f"Byte-level language models on {data['train_tokens'] / 1e6:.0f} MB of Python's sources "
        f"and documentation, trained on contexts of {record['context']}; bits a byte on "
        f"{data['valid_tokens'] / 1e6:.0f} MB of other files, {machine['device_name']}, torch "
        f"{machine['torch']}, commit {commit} (what it shows: "
        "[docs/forgetting_transformer.md](docs/forgetting_transformer.md)):"
    )
    equal = equal_tokens(runs)
    names = {"context": record["context"], "length": length, "equal": equal / 1e6}
    rows = (fox_text_row(run, equal) for run in runs)
    return [where, "", *table([title.format(**names) for title in HEAD], rows), ""]


def fox_text_page(record: Record) -> list[str]:
    section = seen_from_docs("\n".join(fox_text_section(record)))
    return ["## Forgetting attention on real text", "", *section.split("\n")]
