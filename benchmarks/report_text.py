"""report.py's table of fox_text.py: language models on real text, within and beyond the context
that they were trained on."""

from __future__ import annotations

import math

from report_tables import Record, table

HEAD = (
    "model",
    "parameters",
    "validation, windows of {context}",
    "the first {context} bytes of {length}",
    "all {length}",
    "around byte {context}",
    "around byte {length}",
    "needle up to {context}",
    "needle beyond",
    "bytes/s",
)


def fox_text_row(run: Record) -> list[str]:
    """A model's bits a byte, and the share of the needle test's answers that match."""
    found, needle = run["per_token"], run["needle"]
    context, length = str(found["trained_context"]), max(found["perplexity"], key=int)
    bits = [math.log2(found["perplexity"][n]) for n in (context, length)]
    bits += [found["loss"][n] / math.log(2) for n in (context, length)]
    shares = [
        [
            share
            for row in needle["exact_match"]
            for share, n in zip(row, needle["lengths"], strict=True)
            if (n > int(context)) == beyond
        ]
        for beyond in (False, True)
    ]
    return [
        run["name"],
        f"{run['parameters']:,}",
        f"{run['bits_per_byte']:.4f}",
        *(f"{value:.4f}" for value in bits),
        *(f"{sum(some) / len(some):.0%}" if some else "" for some in shares),
        f"{run['tokens_per_second'] / 1e6:.2f}M",
    ]


def fox_text_section(record: Record) -> list[str]:
    """What was read, and the table; bits a byte, the lower the better."""
    runs, machine, data = record["runs"], record["machine"], record["data"]
    length = max(runs[0]["per_token"]["perplexity"], key=int)
    where = (
        f"Byte-level language models on {data['train_tokens'] / 1e6:.0f} MB of Python's sources "
        f"and documentation, {runs[0]['tokens'] / 1e6:.0f}M bytes read in contexts of "
        f"{record['context']}; bits a byte on {data['valid_tokens'] / 1e6:.0f} MB of other files, "
        f"{machine['device_name']}, torch {machine['torch']}, commit {record['commit']} (what it "
        "shows: [docs/forgetting_transformer.md](docs/forgetting_transformer.md)):"
    )
    head = tuple(title.format(context=record["context"], length=length) for title in HEAD)
    return [where, "", *table(head, map(fox_text_row, runs)), ""]


def fox_text_page(record: Record) -> list[str]:
    section = "\n".join(fox_text_section(record)).replace("(docs/", "(")
    return ["## Forgetting attention on real text", "", *section.split("\n")]
