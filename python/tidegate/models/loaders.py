"""Weights published for other implementations of HGRN, under our parameters' names.

Two sources: hgru-pytorch, the authors' modules (`hgru_from_hgru_pytorch`), and
flash-linear-attention's ``HGRNForCausalLM`` and its layer (`causal_lm_from_fla`,
`hgru_from_fla`). Each takes a state dict and returns a module that computes the same function;
tensors are copied, in their dtype, but for phases and bounds, which are at least fp32. Whatever a
state dict holds beyond what the mapping knows raises ValueError, as does anything it lacks: a
model loaded in part is another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..nn import HGRU
from ..nn._common import widen
from .block import load_exactly
from .causal_lm import CausalLM
from .config import LMConfig


class _Source:
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


def _fill(module: torch.nn.Module, tensors: dict[str, Tensor], source: str) -> Any:
    """`module`, made on the meta device, with copies of `tensors` as its parameters."""
    load_exactly(module, {name: t.clone() for name, t in tensors.items()}, source)
    return module


def hgru_from_hgru_pytorch(
    state_dict: Mapping[str, Tensor], *, bidirectional: bool = False, norm_eps: float = 1e-5
) -> HGRU:
    """`HGRU(preset="official")` from the state dict of ``Hgru1d``, ``BiHgru1d`` or ``HgruRealV6``.

    bidirectional: for an ``Hgru1d`` or ``HgruRealV6`` made with causal=False, which nothing in a
    state dict shows; its one theta then serves both directions. Their tensors are [T, B, dim],
    ours [B, T, dim]; their rows for real and imaginary part alternate, ours come in two blocks.
    """
    source = _Source("hgru_from_hgru_pytorch", state_dict)
    both = "theta_forward" in source
    is_complex = both or "theta" in source
    bias = "input_proj.bias" in source
    rows = ["input_proj", "lambda_proj", "gate"]
    tensors: dict[str, Tensor] = {}
    for kind in ("weight", "bias") if bias else ("weight",):
        c, f, g = (source.take(f"{name}.{kind}") for name in rows)
        if is_complex:
            c = torch.cat([c[0::2], c[1::2]])
        tensors[f"in_proj.{kind}"] = torch.cat([c, f, g])
        tensors[f"out_proj.{kind}"] = source.take(f"out_proj.{kind}")
        tensors[f"norm.{kind}"] = source.take(f"norm.{kind}")
    if not bias:
        tensors["norm.bias"] = source.take("norm.bias")
    if both:
        thetas = [widen(source.take(f"theta_{way}")).flatten() for way in ("forward", "reverse")]
        tensors["theta"] = torch.stack(thetas)
    elif is_complex:
        theta = widen(source.take("theta")).flatten()
        tensors["theta"] = theta.repeat(2, 1) if bidirectional else theta
    source.finish()
    module = HGRU(
        tensors["out_proj.weight"].size(0),
        complex=is_complex,
        bidirectional=bidirectional or both,
        preset="official",
        bias=bias,
        norm_eps=norm_eps,
        device="meta",
    )
    return _fill(module, tensors, source.name)


def _fla_mixer(source: _Source, prefix: str) -> dict[str, Tensor]:
    """One ``HGRNAttention``'s tensors under HGRU's names."""
    parts = [source.take(f"{prefix}{name}_proj.weight") for name in ("i", "f", "g")]
    tensors = {
        "in_proj.weight": torch.cat(parts),
        "out_proj.weight": source.take(f"{prefix}o_proj.weight"),
    }
    if f"{prefix}g_norm.weight" in source:
        tensors["norm.weight"] = source.take(f"{prefix}g_norm.weight")
    return tensors


def hgru_from_fla(state_dict: Mapping[str, Tensor], *, norm_eps: float = 1e-5) -> HGRU:
    """`HGRU(preset="fla")` from the state dict of flash-linear-attention's ``HGRNAttention``
    (without short convolutions)."""
    source = _Source("hgru_from_fla", state_dict)
    tensors = _fla_mixer(source, "")
    source.finish()
    dim, channels = tensors["out_proj.weight"].shape
    module = HGRU(
        dim,
        expand=max(channels // dim, 1),
        preset="fla",
        norm="rms" if "norm.weight" in tensors else "rms_no_weight",
        norm_eps=norm_eps,
        device="meta",
    )
    return _fill(module, tensors, source.name)


def _fla_hidden(config: Mapping[str, Any], dim: int) -> int:
    """Hidden width of its channel mixer: stated, or 2/3 of a ratio, rounded up to 256."""
    if config.get("intermediate_size") is not None:
        return config["intermediate_size"]
    ratio = config.get("hidden_ratio") or 4
    return 256 * -(-int(dim * ratio * 2 / 3) // 256)


def config_from_fla(config: Mapping[str, Any]) -> LMConfig:
    """The LMConfig that equals the config.json of an ``HGRNForCausalLM``.

    ValueError for what has no equal here: short convolutions, attention layers in between,
    another activation than "swish", a fractional state.
    """
    refused = {
        "use_short_conv": config.get("use_short_conv", False) is False,
        "attn": config.get("attn") is None,
        "hidden_act": config.get("hidden_act", "swish") in ("swish", "silu"),
    }
    expand = config.get("expand_ratio", 1)
    expand = 1 if expand is None else expand
    bounds = config.get("use_lower_bound", True)
    # Its bounds are as wide as the model, which only fits a state of that width.
    refused["expand_ratio"] = expand == 1 or (expand == int(expand) and not bounds)
    for key, fits in refused.items():
        if not fits:
            raise ValueError(f"config_from_fla: {key}: {config[key]!r} has no equal here")
    eps = config.get("norm_eps", 1e-6)
    affine = config.get("elementwise_affine", True) is not False
    dim = config.get("hidden_size", 2048)
    return LMConfig(
        mixer="hgrn",
        mixer_options={
            "preset": "fla",
            "expand": int(expand),
            "norm": "rms" if affine else "rms_no_weight",
        },
        vocab_size=config.get("vocab_size", 32000),
        dim=dim,
        layers=config.get("num_hidden_layers", 24),
        glu_hidden=_fla_hidden(config, dim),
        glu_activation="silu",
        norm="rms",
        norm_eps=eps,
        lower_bound="cumulative" if bounds else "none",
        tied=bool(config.get("tie_word_embeddings", False)),
        scale_embedding=False,
    )


def causal_lm_from_fla(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> CausalLM:
    """A CausalLM from the config.json and state dict of an ``HGRNForCausalLM``."""
    ours = config_from_fla(config)
    source = _Source("causal_lm_from_fla", state_dict)
    tensors = {"embedding.weight": source.take("model.embeddings.weight")}
    if ours.tied:
        source.tensors.pop("lm_head.weight", None)
    else:
        tensors["head.weight"] = source.take("lm_head.weight")
    if ours.lower_bound != "none":
        tensors["lower_bounds.logits"] = widen(source.take("model.lower_bounds"))
    for k in range(ours.layers):
        theirs, block = f"model.layers.{k}.", f"blocks.{k}."
        mixer = _fla_mixer(source, f"{theirs}attn.")
        tensors.update({f"{block}mixer.{name}": t for name, t in mixer.items()})
        tensors[f"{block}mixer_norm.weight"] = source.take(f"{theirs}attn_norm.weight")
        tensors[f"{block}glu_norm.weight"] = source.take(f"{theirs}mlp_norm.weight")
        gate = [source.take(f"{theirs}mlp.gate_proj.weight")]
        if f"{theirs}mlp.up_proj.weight" in source:  # older versions hold both in gate_proj
            gate.append(source.take(f"{theirs}mlp.up_proj.weight"))
        tensors[f"{block}glu.in_proj.weight"] = torch.cat(gate)
        tensors[f"{block}glu.out_proj.weight"] = source.take(f"{theirs}mlp.down_proj.weight")
    tensors["norm.weight"] = source.take("model.norm.weight")
    source.finish()
    return _fill(CausalLM(ours, device="meta"), tensors, source.name)
