"""Reading state dicts whole, and what Hugging Face language models have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .block import load_exactly
from .config import LMConfig


class Source:
    """A state dict that remembers what was taken from it."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        self.tensors = dict(tensors)

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    def take(self, key: str) -> Tensor:
        if key not in self.tensors:
            raise ValueError(f"{self.name}: no tensor {key!r}")
        return self.tensors.pop(key).detach()

    def finish(self) -> None:
        if self.tensors:
            left = ", ".join(repr(key) for key in sorted(self.tensors)[:5])
            raise ValueError(f"{self.name}: tensors without a place here: {left}")


def fill(module: torch.nn.Module, tensors: dict[str, Tensor], source: str) -> Any:
    """`module`, made on the meta device, with copies of `tensors` as its parameters."""
    load_exactly(module, {name: t.clone() for name, t in tensors.items()}, source)
    return module


def take_head(source: Source, ours: LMConfig, tensors: dict[str, Tensor]) -> None:
    """The head of a Hugging Face language model; where it is tied, it may be there all the same."""
    if ours.tied:
        source.tensors.pop("lm_head.weight", None)
    else:
        tensors["head.weight"] = source.take("lm_head.weight")


def fla_hidden(config: Mapping[str, Any], dim: int) -> int:
    """Hidden width of its channel mixer: stated, or 2/3 of a ratio, rounded up to 256."""
    if config.get("intermediate_size") is not None:
        return config["intermediate_size"]
    ratio = config.get("hidden_ratio") or 4
    return 256 * -(-int(dim * ratio * 2 / 3) // 256)


def take_frame(source: Source, layers: int) -> dict[str, Tensor]:
    """Norms, channel mixers and embedding of flash-linear-attention's language models, whose names
    those of the Forgetting Transformer follow, under ours."""
    tensors = {
        "embedding.weight": source.take("model.embeddings.weight"),
        "norm.weight": source.take("model.norm.weight"),
    }
    for k in range(layers):
        theirs, block = f"model.layers.{k}.", f"blocks.{k}."
        tensors[f"{block}mixer_norm.weight"] = source.take(f"{theirs}attn_norm.weight")
        tensors[f"{block}glu_norm.weight"] = source.take(f"{theirs}mlp_norm.weight")
        gate = [source.take(f"{theirs}mlp.gate_proj.weight")]
        if f"{theirs}mlp.up_proj.weight" in source:  # older versions hold both in gate_proj
            gate.append(source.take(f"{theirs}mlp.up_proj.weight"))
        tensors[f"{block}glu.in_proj.weight"] = torch.cat(gate)
        tensors[f"{block}glu.out_proj.weight"] = source.take(f"{theirs}mlp.down_proj.weight")
    return tensors
