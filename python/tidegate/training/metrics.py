"""What metrics.jsonl holds, and which of its lines make sense."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("train", "valid", "final")
# Numbers that a row may lack, or have null for.
_OPTIONAL = (
    "accuracy",
    "bits_per_byte",
    "grad_norm",
    "lr",
    "perplexity",
    "seconds",
    "tokens_per_second",
    "valid_tokens",
)


class Metrics(NamedTuple):
    """The rows of a metrics.jsonl, and how many lines were left out: because they are no rows, or
    one of the same kind and step came before."""

    rows: list[dict[str, Any]]
    left_out: int


def load_metrics(path: str | os.PathLike[str]) -> Metrics:
    """The rows that make sense, in their order. A last line cut short by a kill counts as none."""
    *lines, _ = Path(path).read_bytes().split(b"\n")
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for line in lines:
        row = _parsed(line)
        if row is not None:
            rows.setdefault((row["kind"], row["step"]), row)
    return Metrics(list(rows.values()), len(lines) - len(rows))


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of `load_metrics`."""
    return load_metrics(path).rows


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None where it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and _makes_sense(row) else None


def _makes_sense(row: dict[str, Any]) -> bool:
    counts = [row.get(name) for name in ("step", "tokens")]
    if row.get("kind") == "final":
        counts.append(row.get("valid_tokens"))
    numbers = [row[name] for name in _OPTIONAL if row.get(name) is not None]
    return (
        row.get("kind") in KINDS
        and all(type(count) is int and 0 <= count < 1 << 63 for count in counts)
        and _is_number(row.get("loss"))
        and math.isfinite(row["loss"])
        and all(map(_is_number, numbers))
    )


def _is_number(value: object) -> bool:
    # Integers without a bound would not fit a float.
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)
