"""Signatures as plain values, to compare a stand-in with what it stands in for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

RECORDED = Path(__file__).with_name("fla_signatures.json")  # of fla-core 0.6.0
FLA_OPS = {
    "chunk_hgrn": "fla.ops.hgrn",
    "fused_recurrent_hgrn": "fla.ops.hgrn",
    "chunk_gla": "fla.ops.gla",
    "fused_chunk_gla": "fla.ops.gla",
    "fused_recurrent_gla": "fla.ops.gla",
    "parallel_forgetting_attn": "fla.ops.forgetting_attn",
    "fused_recurrent_rwkv4": "fla.ops.rwkv4",
}
FLA_LAYERS = ("HGRNAttention", "HGRN2Attention", "GatedLinearAttention", "ForgettingAttention")


def signature_of(call: Callable[..., object]) -> list[list[str]]:
    """A list of [name, kind, default]; of a class, its constructor's."""
    return [
        [p.name, p.kind.name, "" if p.default is p.empty else repr(p.default)]
        for p in inspect.signature(call).parameters.values()
    ]


def of_library(ops: dict[str, Callable], layers: dict[str, Callable]) -> dict[str, list]:
    """The signatures of ops, and of layers' constructors and forward()."""
    found = {name: signature_of(op) for name, op in ops.items()}
    for name, layer in layers.items():
        found[name] = signature_of(layer)
        found[f"{name}.forward"] = signature_of(layer.forward)
    return found


def recorded() -> dict[str, list]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))
