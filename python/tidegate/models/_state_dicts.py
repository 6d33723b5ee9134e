"""Reading state dicts whole, and what Hugging Face language models have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .block import CONFIG_FILE, load_exactly
from .config import LMConfig

# A config.json's content, an object that has it (transformers' configurations), or its folder.
Config = Mapping[str, Any] | str | os.PathLike[str] | Any


def config_of(owner: str, config: Config) -> Mapping[str, Any]:
    """A configuration as plain values."""
    if isinstance(config, (str, os.PathLike)):
        from ..convert import read_json  # which imports this package

        path = Path(config)
        return read_json(path / CONFIG_FILE if path.is_dir() else path)
    if isinstance(config, nn.Module):
        config = getattr(config, "config", None)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{owner}: config: expected a folder, a dictionary or an object with to_dict(); got a "
            f"{type(config).__name__}"
        )
    return config


def tensors_of(owner: str, given: Mapping[str, Tensor] | nn.Module) -> Mapping[str, Tensor]:
    """A state dict, or that of a module."""
    if isinstance(given, nn.Module):
        given = given.state_dict()
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{owner}: state_dict: expected tensors by name or a module; got a "
            f"{type(given).__name__}"
        )
    return given


def checkpoint_of(
    owner: str, config: Config, state_dict: Mapping[str, Tensor] | nn.Module | None
) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Configuration and tensors. state_dict None: `config` is a model, or a folder that holds both,
    weights in model.safetensors or pytorch_model.bin, whole or in shards."""
    values = config_of(owner, config)
    if state_dict is None and isinstance(config, (str, os.PathLike)):
        from ..convert import read_weights

        return values, read_weights(Path(config))
    return values, tensors_of(owner, config if state_dict is None else state_dict)


class Source:
    """A state dict that remembers what was taken from it."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor] | nn.Module) -> None:
        self.name = name
        self.tensors = dict(tensors_of(name, tensors))

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
