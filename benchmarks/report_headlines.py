"""The few figures of README: which work they are of, its table, and the bars of its picture.

All come from baselines.py's results on a GPU, and the models' decoding from bench_models'.
docs/benchmarks.md holds all of them, and everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from report_tables import DTYPES, Record, microseconds, percent, same_shape, table

Results = Sequence[tuple[str, Record]]  # kind, result


class Headline(NamedTuple):
    """Work that README shows: what it is called there, and the fields that tell its rows."""

    part: str  # of the picture
    title: str
    fields: dict[str, object]


def scan(title: str, op: str, batch: int, time: int, channels: int, kind: bool = False) -> Headline:
    fields = {"op": op, "B": batch, "T": time, "D": channels, "complex": kind, "dtype": "bfloat16"}
    return Headline("Element-wise scans", title, fields)


def attention(title: str, time: int, heads: int, head_dim: int, pruned: bool) -> Headline:
    sizes = {"T": time, "H": heads, "D": head_dim}
    fields = {"op": "forgetting_attention", **sizes, "pruned": pruned}
    return Headline("Forgetting attention", title, fields)


GLA, DECODING = "Gated linear attention", "Decoding, one token"
HEADLINES = (
    scan("HGRN", "hgru", 8, 2048, 2048),
    scan("HGRN, long", "hgru", 1, 131072, 1024),
    scan("LRU, complex", "lru_scan", 8, 2048, 1024, True),
    scan("linear scan", "linear_scan", 8, 2048, 2048),
    scan("RWKV-4", "wkv4", 8, 4096, 2048),
    Headline(GLA, "GLA", {"op": "gated_linear_attention", "B": 8, "T": 4096, "H": 16}),
    Headline(GLA, "HGRN2", {"op": "hgrn2", "B": 8, "T": 4096, "H": 16}),
    attention("heads of 128", 16384, 16, 128, False),
    attention("heads of 64", 16384, 24, 64, False),
    attention("heads of 128, pruned", 16384, 16, 128, True),
    Headline(DECODING, "HGRN2 step", {"op": "hgrn2_step", "B": 256}),
    Headline(DECODING, "forgetting attention step", {"op": "forgetting_attention_step", "B": 64}),
)
# A row an op; the picture shows these, too.
NOT_IN_TABLE = {"HGRN, long", "heads of 64", "heads of 128, pruned"}
MODELS = {"hgrn": "HGRN model", "hgrn2": "HGRN2 model", "fox": "FoT (LLaMA) model"}


class Bar(NamedTuple):
    """One pass of some work: how many times as fast as the fastest baseline."""

    direction: str
    times: float


class Bars(NamedTuple):
    """What the picture shows of one piece of work."""

    part: str
    title: str
    note: str  # shape and baselines
    bars: list[Bar]


def baseline_rows(results: Results) -> list[Record]:
    """All rows of baselines.py's results of a GPU."""
    records = [record for kind, record in results if kind == "baselines"]
    return [row for r in records if "gpu" in r["machine"] for row in r["rows"]]


def rows_of(headline: Headline, rows: Iterable[Record]) -> dict[str, Record]:
    """Its rows, by direction; the deterministic backward pass is none of README's."""
    found = {}
    for row in rows:
        shown = row | {"pruned": "prune" in row}
        if all(shown.get(key) == value for key, value in headline.fields.items()):
            found[row["direction"]] = row
    return {d: found[d] for d in ("forward", "backward") if d in found}


def best_baseline(row: Record, rows: Sequence[Record]) -> tuple[str, float] | None:
    """The fastest other library that computes the same, and how many times as long it takes."""
    ours = row["results"].get("tidegate")
    if ours is None:
        return None
    if "best_baseline" in row:
        name = row["best_baseline"]
        return name, row["results"][name]["us"] / ours["us"]
    if row["op"] != "hgrn2":
        return None
    other = same_shape(row, rows, "fla.chunk_gla")
    return None if other is None else ("fla.chunk_gla", other["us"] / ours["us"])


def times_of(value: float) -> str:
    """A ratio with the digits that mean something."""
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    return f"{value:.{digits}f}x"


def library_of(baseline: str) -> str:
    """A baseline's name as README has it."""
    return "the paper's kernel" if baseline.startswith("paper's") else baseline.split(".")[0]


def shape_cell(row: Record) -> str:
    """Type and sizes, without what all rows have alike."""
    sizes = " ".join(f"{size}{row[size]}" for size in ("B", "T", "H", "D", "K") if size in row)
    kind = "complex " if row.get("complex") else ""
    return f"{kind}{DTYPES.get(row['dtype'], row['dtype'])} {sizes}"


def bound_cell(rows: Sequence[Record]) -> str:
    """How near the work comes to what bounds it: a copy of its bytes, or a large matrix product."""
    ours = [row["results"]["tidegate"] for row in rows]
    if "matmul" in rows[0]["results"]:
        rates = " / ".join(f"{result['tflops']:.0f}" for result in ours)
        return f"{rates} of {rows[0]['results']['matmul']['tflops']:.0f} TFLOP/s"
    shares = [percent(r["percent_of_copy"]) for r in ours if "percent_of_copy" in r]
    return f"{' / '.join(shares)} of a copy" if shares else ""


def headline_row(headline: Headline, rows: Sequence[Record]) -> list[str] | None:
    """A row of README's table; None where nothing was measured."""
    passes = [r for r in rows_of(headline, rows).values() if "tidegate" in r["results"]]
    if not passes:
        return None
    beside = [best_baseline(row, rows) for row in passes]
    times = " / ".join(times_of(found[1]) for found in beside if found)
    names = dict.fromkeys(library_of(found[0]) for found in beside if found)
    return [
        f"`{passes[0]['op']}`",
        shape_cell(passes[0]),
        " / ".join(microseconds(r["results"]["tidegate"]["us"]).removesuffix(" us") for r in passes)
        + " us",
        bound_cell(passes),
        f"{times} ({', '.join(names)})" if times else "",
    ]


def headline_table(results: Results) -> list[str]:
    """README's table, and on which GPUs; empty without results of one."""
    rows = baseline_rows(results)
    shown = [headline_row(h, rows) for h in HEADLINES if h.title not in NOT_IN_TABLE]
    shown = [cells for cells in shown if cells]
    if not shown:
        return []
    head = ("op", "shape", "time", "how near its bound", "as fast as the fastest other library")
    machines = [record["machine"] for kind, record in results if kind == "baselines"]
    names = dict.fromkeys(m["gpu"].get("name", "GPU") for m in machines if "gpu" in m)
    return [
        *table(head, shown),
        "",
        f"Forward / backward, on one {' and one '.join(names)}. The bound is `copy_` of as many",
        "bytes, or a large matrix product, in the same run; fla is flash-linear-attention.",
        "Versions and all tables: [docs/benchmarks.md](docs/benchmarks.md).",
    ]


def model_bars(results: Results) -> list[Bars]:
    """Whole models that decode at the longest context, beside the Transformer."""
    found = []
    for kind, record in results:
        if kind != "models" or record["machine"]["device"] != "cuda":
            continue
        longest = max(row["context"] for row in record["rows"])
        rows = {row["mixer"]: row for row in record["rows"] if row["context"] == longest}
        for mixer, title in MODELS.items():
            if decode := rows.get(mixer, {}).get("decode"):
                note = f"{record['size']}, context {longest:,}; beside a Transformer"
                bar = Bar("forward", decode["speed_of_transformer"])
                found.append(Bars(DECODING, title, note, [bar]))
    return found


def bars_of(results: Results) -> list[Bars]:
    """What the picture shows, in its order."""
    rows = baseline_rows(results)
    found = []
    for headline in HEADLINES:
        passes = rows_of(headline, rows)
        beside = {d: best_baseline(row, rows) for d, row in passes.items()}
        beside = {d: pair for d, pair in beside.items() if pair}
        if beside:
            names = dict.fromkeys(library_of(name) for name, _ in beside.values())
            shape = shape_cell(passes[next(iter(beside))])
            note = f"{shape}; beside {', '.join(names)}"
            bars = [Bar(direction, times) for direction, (_, times) in beside.items()]
            found.append(Bars(headline.part, headline.title, note, bars))
    return found + model_bars(results)


def gpu_name(results: Results) -> str:
    """The GPU that the picture is of."""
    machines = [record["machine"] for kind, record in results if kind in ("baselines", "models")]
    names = [m.get("gpu", {}).get("name") or m.get("name") for m in machines]
    return next(filter(None, names), "CPU")
