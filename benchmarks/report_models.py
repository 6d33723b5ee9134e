"""The tables of bench_models: models beside Transformers of as many parameters."""

from __future__ import annotations

from report_tables import Record, table

MODEL_PARTS = ("forward", "backward", "optimizer")
MODELS_HEAD = (
    "mixer",
    "context",
    "parameters, of the Transformer's",
    "training, tokens/s",
    "of the Transformer's",
    "step: forward + backward + optimiser",
    "peak memory",
    "decoding, tokens/s (batch)",
    "of the Transformer's",
    "prefill, tokens/s",
    "state, a sequence",
)


def times_of(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def size_of(size: float) -> str:
    """A size in the unit that fits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 2**10:.3g} KiB"


def models_row(row: Record) -> list[str]:
    train, decode = row.get("train"), row.get("decode")
    share = row["parameters_of_transformer"]
    cells = [f"`{row['mixer']}`", f"{row['context']}"]
    cells += [f"{row['parameters'] / 1e6:.1f}M" + ("" if share is None else f", {share:.1%}")]
    if train is None:
        cells += ["failed", "", "", ""]
    else:
        parts = " + ".join(f"{train[f'{part}_ms']:.1f}" for part in MODEL_PARTS)
        peak = train["peak_bytes"]
        cells += [
            f"{train['tokens_per_s']:,.0f}",
            times_of(train["speed_of_transformer"]),
            f"{parts} ms",
            "" if peak is None else f"{peak / 2**30:.2f} GiB",
        ]
    if decode is None:
        return [*cells, "", "", "", ""]
    return [
        *cells,
        f"{decode['tokens_per_s']:,.0f} ({row['batch']})",
        times_of(decode["speed_of_transformer"]),
        f"{decode['prefill_tokens_per_s']:,.0f}",
        size_of(decode["state_bytes"] / row["batch"]),
    ]


def models_where(record: Record) -> str:
    machine = record["machine"]
    tokens = f"{record['tokens']} tokens a step at every context"
    plain = record["rows"][0]  # the Transformer
    size = (
        f"{record['size']} ({plain['layers']} layers, {plain['parameters'] / 1e6:.0f}M parameters)"
    )
    return (
        f"Size {size}, {record['precision']}, {tokens}; {machine['name']}, "
        f"{machine['threads']} threads, torch {machine['torch']}, commit {record['commit']}, "
        f"{record['date']}"
    )


def models_page(record: Record) -> list[str]:
    where = record["machine"]["name"]
    optimizer = record.get("optimizer", "libtorch's AdamW")
    what = f"{record['size']}, {record['date']}"
    lines = [f"## Models of equal size ({what}) on {where}", "", models_where(record) + ".", ""]
    lines += [
        "`bench_models` (`tidegate bench --models`): a training step is forward, backward and "
        f"{optimizer}, in C++, eager; medians. "
        "The batch that decodes holds as many tokens as "
        "a training step reads; a step's logits are first held against the parallel form's. "
        "Parameters are counted; `fox` and the Transformers are the package's presets where there "
        "are any of this size, all others stand in the Transformer's frame with a GLU as wide as "
        "makes the parameters equal.",
        "",
    ]
    lines += [*table(MODELS_HEAD, map(models_row, record["rows"])), ""]
    if any("split" in row.get("train", {}) for row in record["rows"]):
        lines += [*models_split(record), ""]
    if record["pairs"]:
        lines += [*models_pairs(record), ""]
    lines += [f"- {note}" for note in record.get("notes", [])]
    return [*lines, ""] if record.get("notes") else lines


def models_split(record: Record) -> list[str]:
    """Where the time of a step goes, in milliseconds."""
    kinds = ("products", "attention", "ours", "optimizer", "rest", "idle", "floor")
    rows = [
        [f"`{row['mixer']}`", f"{row['context']}"]
        + [f"{row['train']['split'][f'{kind}_ms']:.1f}" for kind in kinds]
        for row in record["rows"]
        if "split" in row.get("train", {})
    ]
    head = ("a step's ms", "context", "matrix products", "torch's attention", "our ops", "AdamW")
    head += ("the rest", "between them", "floor")
    note = (
        "The floor: the products' operations at the speed of one large product "
        f"({record['product_operations_per_s'] / 1e12:.2f} TFLOP/s in this run), and seven numbers "
        f"a parameter for AdamW at that of a copy ({record['copy_bytes_per_s'] / 1e9:.0f} GB/s)."
    )
    return [note, "", *table(head, rows)]


def models_pairs(record: Record) -> list[str]:
    """A forgetting attention's step less its Transformer's, in milliseconds."""
    rows = [
        [
            " - ".join(f"`{name}`" for name in pair["mixers"]),
            pair["context"],
            *(f"{pair[part]:+.1f} ms" for part in ("step_ms", "attention_ms", "rest_ms")),
            f"{pair['rest_percent_of_step']:+.1f}%",
        ]
        for pair in record["pairs"]
    ]
    head = ("difference of", "context", "step", "attention alone", "the rest", "of the step")
    note = (
        "Attention alone: the op's forward and backward in the step's shapes, times the layers. "
        "The rest is what remains of the difference."
    )
    return [note, "", *table(head, rows)]
