"""Weights published for other implementations of these models, under our parameters' names.

Sources: the authors' modules in hgru-pytorch and hgru2-pytorch (`hgru_from_hgru_pytorch`,
`hgru2_from_hgru2_pytorch`, `causal_lm_from_hgru2_pytorch`), flash-linear-attention's layers and
language models (`hgru_from_fla`, `hgru2_from_fla`, `gla_from_fla`, `forgetting_attention_from_fla`,
`attention_from_fla`, `causal_lm_from_fla`), and the Forgetting Transformer's own release
(`forgetting_attention_from_forgetting_transformer`, `causal_lm_from_forgetting_transformer`). Each
takes a state dict, or the module that has it, and returns a module that computes the same function;
those of language models take their configuration first (plain values, or an object of
transformers), or alone a folder or a model that has both. Tensors are copied, in their dtype, but
for phases, bounds and gates' biases, which are at least fp32. Whatever a state dict holds beyond
what the mapping knows raises ValueError, as does anything it lacks: a model loaded in part is
another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..nn import HGRU, HGRU2, GatedLinearAttention
from ..nn._common import widen
from ._state_dicts import (
    Config,
    Source,
    checkpoint_of,
    config_of,
    fill,
    fla_hidden,
    take_frame,
    take_head,
)
from .causal_lm import CausalLM
from .config import LMConfig
from .loaders_attention import (
    attention_from_fla,
    causal_lm_from_forgetting_transformer,
    config_from_forgetting_transformer,
    fla_attention_mixer,
    fla_attention_options,
    forgetting_attention_from_fla,
    forgetting_attention_from_forgetting_transformer,
)

__all__ = [
    "attention_from_fla",
    "causal_lm_from_fla",
    "causal_lm_from_forgetting_transformer",
    "causal_lm_from_hgru2_pytorch",
    "config_from_fla",
    "config_from_forgetting_transformer",
    "config_from_hgru2_pytorch",
    "forgetting_attention_from_fla",
    "forgetting_attention_from_forgetting_transformer",
    "gla_from_fla",
    "hgru2_from_fla",
    "hgru2_from_hgru2_pytorch",
    "hgru_from_fla",
    "hgru_from_hgru_pytorch",
]


def hgru_from_hgru_pytorch(
    state_dict: Mapping[str, Tensor], *, bidirectional: bool = False, norm_eps: float = 1e-5
) -> HGRU:
    """`HGRU(preset="official")` from the state dict of ``Hgru1d``, ``BiHgru1d`` or ``HgruRealV6``.

    bidirectional: for an ``Hgru1d`` or ``HgruRealV6`` made with causal=False, which nothing in a
    state dict shows; its one theta then serves both directions. Their tensors are [T, B, dim],
    ours [B, T, dim]; their rows for real and imaginary part alternate, ours come in two blocks.
    """
    source = Source("hgru_from_hgru_pytorch", state_dict)
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
    return fill(module, tensors, source.name)


def _vqf_to_qfv(rows: Tensor) -> Tensor:
    """The rows of the authors' in_proj, which are v, q, f, in our order."""
    v, q, f = rows.chunk(3)
    return torch.cat([q, f, v])


def _hgru2_pytorch_mixer(source: Source, prefix: str) -> dict[str, Tensor]:
    """One ``Hgru2``'s, ``Hgru2_1d``'s or ``BiHgru2_1d``'s tensors under HGRU2's names."""
    tensors = {}
    for kind in ("weight", "bias"):
        if kind == "bias" and f"{prefix}in_proj.bias" not in source:
            continue
        tensors[f"in_proj.{kind}"] = _vqf_to_qfv(source.take(f"{prefix}in_proj.{kind}"))
        tensors[f"out_proj.{kind}"] = source.take(f"{prefix}out_proj.{kind}")
    if f"{prefix}norm.weight" in source:
        for kind in ("weight", "bias"):
            tensors[f"norm.{kind}"] = source.take(f"{prefix}norm.{kind}")
    return tensors


def hgru2_from_hgru2_pytorch(
    state_dict: Mapping[str, Tensor],
    expand_ratio: int,
    *,
    bidirectional: bool = False,
    q_activation: str = "sigmoid",
    v_activation: str = "silu",
) -> HGRU2:
    """`HGRU2` from the state dict of hgru2-pytorch's ``Hgru2_1d`` or ``BiHgru2_1d``.

    A state dict shows neither the head width, nor the direction, nor the activations: expand_ratio,
    bidirectional (for ``BiHgru2_1d``), q_activation (its ``uv_act_fun``) and v_activation (its
    ``act_fun``) are those it was made with; the defaults are theirs. Their tensors are
    [T, B, dim], ours [B, T, dim]; their rows are v, q, f, ours q, f, v. Modules with use_norm=False
    have no equal here.
    """
    source = Source("hgru2_from_hgru2_pytorch", state_dict)
    tensors = _hgru2_pytorch_mixer(source, "")
    source.finish()
    has_weight = "norm.weight" in tensors
    module = HGRU2(
        tensors["out_proj.weight"].size(0),
        expand_ratio=expand_ratio,
        bidirectional=bidirectional,
        q_activation=q_activation,
        v_activation=v_activation,
        bias="in_proj.bias" in tensors,
        norm="layer" if has_weight else "rms_no_weight",
        norm_eps=1e-5 if has_weight else 1e-6,
        device="meta",
    )
    return fill(module, tensors, source.name)


def config_from_hgru2_pytorch(config: Config) -> LMConfig:
    """The LMConfig that equals the config.json of hgru2-pytorch's ``Hgrn2ForCausalLM``; ValueError
    for activations that have no equal here."""
    config = config_of("config_from_hgru2_pytorch", config)
    names = {"q_activation": "out_act", "v_activation": "in_act", "glu": "glu_act"}
    defaults = {"out_act": "silu", "in_act": "none", "glu_act": "none"}
    activations = {ours: config.get(key, defaults[key]) for ours, key in names.items()}
    for ours, value in activations.items():
        if value not in (("none", "silu") if ours == "glu" else ("none", "silu", "sigmoid")):
            raise ValueError(
                f"config_from_hgru2_pytorch: {names[ours]}: {value!r} has no equal here"
            )
    is_rms = config.get("norm_type", "simplermsnorm") == "simplermsnorm"
    bias = bool(config.get("bias", False))
    return LMConfig(
        mixer="hgrn2",
        mixer_options={
            "expand_ratio": config.get("expand_ratio", 2),
            "preset": "official",
            "q_activation": activations["q_activation"],
            "v_activation": activations["v_activation"],
            "bias": bias,
            "norm": "rms_no_weight" if is_rms else "layer",
        },
        vocab_size=config.get("vocab_size", 50272),
        dim=config.get("decoder_embed_dim", 1024),
        layers=config.get("decoder_layers", 24),
        glu_hidden=config.get("glu_dim", 2816),
        glu_activation=activations["glu"],
        glu_bias=bias,
        norm="rms_no_weight" if is_rms else "layer",
        norm_eps=1e-6 if is_rms else 1e-5,
        tied=bool(config.get("tie_word_embeddings", True)),
        scale_embedding=not config.get("no_scale_embedding", True),
    )


def causal_lm_from_hgru2_pytorch(
    config: Config, state_dict: Mapping[str, Tensor] | None = None
) -> CausalLM:
    """A CausalLM from the config.json and state dict of hgru2-pytorch's ``Hgrn2ForCausalLM``, or
    from a folder or a model that has both."""
    config, state_dict = checkpoint_of("causal_lm_from_hgru2_pytorch", config, state_dict)
    ours = config_from_hgru2_pytorch(config)
    source = Source("causal_lm_from_hgru2_pytorch", state_dict)
    kinds = ("weight", "bias") if ours.glu_bias else ("weight",)
    tensors = {
        "embedding.weight": source.take("model.embed_tokens.weight"),
        "lower_bounds.logits": widen(source.take("model.lower_bounds")),
    }
    take_head(source, ours, tensors)

    def take_norm(mine: str, theirs: str) -> None:
        for kind in ("weight", "bias") if ours.norm == "layer" else ():
            tensors[f"{mine}.{kind}"] = source.take(f"{theirs}.{kind}")

    for k in range(ours.layers):
        theirs, block = f"model.layers.{k}.", f"blocks.{k}."
        mixer = _hgru2_pytorch_mixer(source, f"{theirs}token_mixer.")
        tensors.update({f"{block}mixer.{name}": t for name, t in mixer.items()})
        take_norm(f"{block}mixer_norm", f"{theirs}token_norm")
        take_norm(f"{block}glu_norm", f"{theirs}channel_norm")
        for kind in kinds:
            halves = [source.take(f"{theirs}channel_mixer.{name}.{kind}") for name in ("l1", "l2")]
            tensors[f"{block}glu.in_proj.{kind}"] = torch.cat(halves)
            tensors[f"{block}glu.out_proj.{kind}"] = source.take(f"{theirs}channel_mixer.l3.{kind}")
    take_norm("norm", "model.final_norm")
    source.finish()
    return fill(CausalLM(ours, device="meta"), tensors, source.name)


def _fla_mixer(source: Source, prefix: str) -> dict[str, Tensor]:
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
    source = Source("hgru_from_fla", state_dict)
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
    return fill(module, tensors, source.name)


def _fla_hgrn2_mixer(source: Source, prefix: str) -> dict[str, Tensor]:
    """One ``HGRN2Attention``'s tensors under HGRU2's names."""
    parts = [source.take(f"{prefix}{name}_proj.weight") for name in ("q", "f", "i")]
    tensors = {
        "in_proj.weight": torch.cat(parts),
        "out_proj.weight": source.take(f"{prefix}o_proj.weight"),
    }
    if f"{prefix}g_norm.weight" in source:
        tensors["norm.weight"] = source.take(f"{prefix}g_norm.weight")
    return tensors


def _fla_gla_mixer(source: Source, prefix: str) -> dict[str, Tensor]:
    """One ``GatedLinearAttention``'s tensors under ours' names."""
    names = ["q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0"]
    if f"{prefix}g_proj.weight" not in source:
        names.remove("g_proj")
    tensors = {
        "in_proj.weight": torch.cat([source.take(f"{prefix}{name}.weight") for name in names]),
        "gate_proj.weight": source.take(f"{prefix}gk_proj.1.weight"),
        "gate_proj.bias": source.take(f"{prefix}gk_proj.1.bias"),
        "out_proj.weight": source.take(f"{prefix}o_proj.weight"),
    }
    for name in ("g_norm_swish_gate", "g_norm"):  # fused with the gate, or not
        if f"{prefix}{name}.weight" in source:
            tensors["norm.weight"] = source.take(f"{prefix}{name}.weight")
    return tensors


def hgru2_from_fla(state_dict: Mapping[str, Tensor], num_heads: int) -> HGRU2:
    """`HGRU2(preset="fla")` from the state dict of flash-linear-attention's ``HGRN2Attention``
    (without short convolutions). It norms with an epsilon of 1e-5, whatever it was made with."""
    source = Source("hgru2_from_fla", state_dict)
    tensors = _fla_hgrn2_mixer(source, "")
    source.finish()
    module = HGRU2(
        tensors["out_proj.weight"].size(0),
        num_heads,
        preset="fla",
        norm="rms" if "norm.weight" in tensors else "rms_no_weight",
        device="meta",
    )
    return fill(module, tensors, source.name)


def gla_from_fla(
    state_dict: Mapping[str, Tensor], num_heads: int, *, norm_eps: float = 1e-5
) -> GatedLinearAttention:
    """`GatedLinearAttention` from the state dict of flash-linear-attention's layer of that name
    (without short convolutions, with as many key and value heads as query heads, and with its
    default gate_logit_normalizer)."""
    source = Source("gla_from_fla", state_dict)
    has_gate = "g_proj.weight" in source
    tensors = _fla_gla_mixer(source, "")
    source.finish()
    key_dim, rank = tensors["gate_proj.weight"].shape
    dim, value_dim = tensors["out_proj.weight"].shape
    module = GatedLinearAttention(
        dim,
        num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        gate_rank=rank,
        output_gate=has_gate,
        norm="rms" if "norm.weight" in tensors else "rms_no_weight",
        norm_eps=norm_eps,
        device="meta",
    )
    return fill(module, tensors, source.name)


_FLA_MIXERS = {
    "hgrn": _fla_mixer,
    "hgrn2": _fla_hgrn2_mixer,
    "gla": _fla_gla_mixer,
    "fox": fla_attention_mixer,
    "transformer": fla_attention_mixer,
}
# Our mixers by their model_type.
_FLA_KINDS = {
    "hgrn": "hgrn",
    "hgrn2": "hgrn2",
    "gla": "gla",
    "forgetting_transformer": "fox",
    "transformer": "transformer",
}


def _refuse_fla(config: Mapping[str, Any], fits: dict[str, bool]) -> None:
    """ValueError for the first key whose value has no equal here."""
    fits = {
        "model_type": config.get("model_type", "hgrn") in _FLA_KINDS,
        "use_short_conv": config.get("use_short_conv", False) is False,
        "attn": config.get("attn") is None,
        "attnres_block_size": config.get("attnres_block_size") is None,
        "hidden_act": config.get("hidden_act", "swish") in ("swish", "silu"),
        **fits,
    }
    for key, fit in fits.items():
        if not fit:
            raise ValueError(f"config_from_fla: {key}: {config[key]!r} has no equal here")


def _fla_hgrn_options(config: Mapping[str, Any], dim: int, norm: str) -> dict[str, Any]:
    expand = config.get("expand_ratio", 1)
    expand = 1 if expand is None else expand
    # Its bounds are as wide as the model, which only fits a state of that width.
    bounds = config.get("use_lower_bound", True)
    fits = expand == 1 or (expand == int(expand) and not bounds)
    _refuse_fla(config, {"expand_ratio": fits})
    return {"preset": "fla", "expand": int(expand), "norm": norm}


def _fla_hgrn2_options(config: Mapping[str, Any], dim: int, norm: str) -> dict[str, Any]:
    ratio, heads = config.get("expand_ratio", 128), config.get("num_heads")
    ratio = dim // heads if ratio is None and heads else ratio
    _refuse_fla(config, {"expand_ratio": bool(ratio) and dim % ratio == 0})
    # Its layer hands no epsilon to the fused norm, whose default is 1e-5.
    return {"preset": "fla", "num_heads": dim // ratio, "norm": norm, "norm_eps": 1e-5}


def _fla_gla_options(config: Mapping[str, Any], dim: int, norm: str) -> dict[str, Any]:
    heads = config.get("num_heads", 4)
    _refuse_fla(
        config,
        {
            "num_kv_heads": config.get("num_kv_heads") in (None, heads),
            "feature_map": config.get("feature_map") in (None, "relu"),
            "clamp_min": config.get("clamp_min") is None,
        },
    )
    return {
        "num_heads": heads,
        "feature_map": config.get("feature_map"),
        "key_dim": int(dim * config.get("expand_k", 0.5)),
        "value_dim": int(dim * config.get("expand_v", 1.0)),
        "output_gate": config.get("use_output_gate", True),
        "norm": norm,
    }


def config_from_fla(config: Config) -> LMConfig:
    """The LMConfig that equals the config.json of an ``HGRNForCausalLM``, ``HGRN2ForCausalLM``,
    ``GLAForCausalLM``, ``ForgettingTransformerForCausalLM`` or ``TransformerForCausalLM``, as its
    model_type says.

    ValueError for what has no equal here: short convolutions, attention layers in between,
    another activation than "swish", a fractional state, GLA with fewer key heads than query heads,
    biases of q, k and v, a window of forgetting attention (theirs cuts decoding alone).
    """
    config = config_of("config_from_fla", config)
    _refuse_fla(config, {})
    kind = _FLA_KINDS[config.get("model_type", "hgrn")]
    dim = config.get("hidden_size", 2048)
    norm = "rms" if config.get("elementwise_affine", True) is not False else "rms_no_weight"
    options = {"hgrn": _fla_hgrn_options, "hgrn2": _fla_hgrn2_options, "gla": _fla_gla_options}
    if kind in options:
        mixer_options = options[kind](config, dim, norm)
    else:
        _refuse_fla(
            config,
            {
                "qkv_bias": config.get("qkv_bias", False) is False,
                "window_size": kind != "fox" or config.get("window_size") is None,
            },
        )
        mixer_options = fla_attention_options(config, kind)
    return LMConfig(
        mixer=kind,
        mixer_options=mixer_options,
        vocab_size=config.get("vocab_size", 32000),
        dim=dim,
        layers=config.get("num_hidden_layers", 24),
        glu_hidden=fla_hidden(config, dim),
        glu_activation="silu",
        norm="rms",
        norm_eps=config.get("norm_eps", 1e-6),
        lower_bound="cumulative" if config.get("use_lower_bound", True) else "none",
        tied=bool(config.get("tie_word_embeddings", False)),
        scale_embedding=False,
    )


def causal_lm_from_fla(config: Config, state_dict: Mapping[str, Tensor] | None = None) -> CausalLM:
    """A CausalLM from the config.json and state dict of one of the models that `config_from_fla`
    knows, or from a folder or a model that has both."""
    config, state_dict = checkpoint_of("causal_lm_from_fla", config, state_dict)
    ours = config_from_fla(config)
    source = Source("causal_lm_from_fla", state_dict)
    tensors = take_frame(source, ours.layers)
    take_head(source, ours, tensors)
    if ours.lower_bound != "none" and ours.mixer in ("hgrn", "hgrn2"):
        tensors["lower_bounds.logits"] = widen(source.take("model.lower_bounds"))
    for k in range(ours.layers):
        mixer = _FLA_MIXERS[ours.mixer](source, f"model.layers.{k}.attn.")
        tensors.update({f"blocks.{k}.mixer.{name}": t for name, t in mixer.items()})
    source.finish()
    return fill(CausalLM(ours, device="meta"), tensors, source.name)
