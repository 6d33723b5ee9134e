"""Weights published for attention with and without a forget gate; `loaders` says what holds.

flash-linear-attention's ``ForgettingAttention`` and ``Attention``, and the Forgetting Transformer's
own release, whose keys and values are in ``ShiftLinear`` modules where they are shifted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..nn import Attention, ForgettingAttention
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

# Neither library hands an epsilon to the norms of queries and keys, whose default this is.
_QK_NORM_EPS = 1e-5
_GATE_TYPES = {"full": "data", "bias_only": "independent", "fixed": "fixed", "none": "none"}


def fla_attention_mixer(source: Source, prefix: str) -> dict[str, Tensor]:
    """One ``ForgettingAttention``'s or ``Attention``'s tensors under ours' names."""
    names = ["q_proj", "k_proj", "v_proj", "g_proj"]
    if f"{prefix}g_proj.weight" not in source:
        names.remove("g_proj")
    tensors = {
        "in_proj.weight": torch.cat([source.take(f"{prefix}{name}.weight") for name in names]),
        "out_proj.weight": source.take(f"{prefix}o_proj.weight"),
    }
    if f"{prefix}f_proj.weight" in source:
        tensors["gate_proj.weight"] = source.take(f"{prefix}f_proj.weight")
        tensors["gate_bias"] = widen(source.take(f"{prefix}f_proj.bias"))
    _take_qk_norms(source, prefix, tensors)
    return tensors


def _take_qk_norms(source: Source, prefix: str, tensors: dict[str, Tensor]) -> None:
    for name in ("q_norm", "k_norm"):
        if f"{prefix}{name}.weight" in source:
            tensors[f"{name}.weight"] = source.take(f"{prefix}{name}.weight")


def fla_attention_options(config: Mapping[str, Any], mixer: str) -> dict[str, Any]:
    """The options of `mixer`, "fox" or "transformer", that equal a config.json."""
    options = {
        "num_heads": config.get("num_heads", 32),
        "num_kv_heads": config.get("num_kv_heads"),
        "qk_norm": config.get("qk_norm", False),
        "qk_norm_eps": _QK_NORM_EPS,
    }
    if mixer == "fox":
        gated = config.get("use_output_gate", False)
        return {**options, "qk_norm_shared": False, "output_gate": gated}
    theta = config.get("rope_theta", 10000.0)
    return {**options, "rope": theta, "window": config.get("window_size")}


def _layer(
    cls: type[torch.nn.Module], source: Source, tensors: dict[str, Tensor], heads: int, **more: Any
) -> Any:
    """A mixer of class `cls` that holds `tensors`."""
    source.finish()
    dim = tensors["out_proj.weight"].size(0)
    if heads < 1 or dim % heads:
        raise ValueError(f"{source.name}: num_heads: expected a divisor of {dim}; got {heads}")
    gated = more.get("output_gate", False)
    kv_heads = (tensors["in_proj.weight"].size(0) - (1 + gated) * dim) * heads // (2 * dim)
    has_norm = "q_norm.weight" in tensors
    shared = not has_norm or tensors["q_norm.weight"].numel() == dim // heads
    more |= {"num_kv_heads": kv_heads, "qk_norm": has_norm, "qk_norm_shared": shared}
    module = cls(dim, heads, qk_norm_eps=_QK_NORM_EPS, device="meta", **more)
    return fill(module, tensors, source.name)


def forgetting_attention_from_fla(
    state_dict: Mapping[str, Tensor], num_heads: int
) -> ForgettingAttention:
    """`ForgettingAttention` from the state dict of flash-linear-attention's layer of that name
    (without biases of q, k and v)."""
    source = Source("forgetting_attention_from_fla", state_dict)
    gated = "g_proj.weight" in source
    tensors = fla_attention_mixer(source, "")
    return _layer(ForgettingAttention, source, tensors, num_heads, output_gate=gated)


def attention_from_fla(
    state_dict: Mapping[str, Tensor],
    num_heads: int,
    *,
    rope: float | None = 10000.0,
    window: int | None = None,
) -> Attention:
    """`Attention` from the state dict of flash-linear-attention's layer of that name (without
    biases). rope, window: its rope_theta and window_size, which a state dict does not show."""
    source = Source("attention_from_fla", state_dict)
    tensors = fla_attention_mixer(source, "")
    return _layer(Attention, source, tensors, num_heads, rope=rope, window=window)


# The Forgetting Transformer's release


def _released_mixer(source: Source, prefix: str) -> dict[str, Tensor]:
    """One ``ForgettingAttentionLayer``'s tensors under ours' names."""
    shifts = f"{prefix}k_proj.shift_proj.weight" in source
    linear = ".linear" if shifts else ""
    names = ["q_proj", f"k_proj{linear}", f"v_proj{linear}"]
    if f"{prefix}ogate_proj.weight" in source:
        names.append("ogate_proj")
    tensors = {
        "in_proj.weight": torch.cat([source.take(f"{prefix}{name}.weight") for name in names]),
        "out_proj.weight": source.take(f"{prefix}o_proj.weight"),
    }
    if shifts:
        shift = [source.take(f"{prefix}{name}_proj.shift_proj.weight") for name in "kv"]
        tensors["shift_proj.weight"] = torch.cat(shift)
    if f"{prefix}fgate_proj.weight" in source:
        tensors["gate_proj.weight"] = source.take(f"{prefix}fgate_proj.weight")
        tensors["gate_bias"] = widen(source.take(f"{prefix}fgate_proj.bias"))
    elif f"{prefix}fgate_bias" in source:
        tensors["gate_bias"] = widen(source.take(f"{prefix}fgate_bias"))
    if f"{prefix}output_norm.weight" in source:
        tensors["output_norm.weight"] = source.take(f"{prefix}output_norm.weight")
    _take_qk_norms(source, prefix, tensors)
    return tensors


def forgetting_attention_from_forgetting_transformer(
    state_dict: Mapping[str, Tensor],
    num_heads: int,
    *,
    gate: str = "data",
    rope: float | None = None,
    norm_eps: float = 1e-6,
) -> ForgettingAttention:
    """`ForgettingAttention` from the state dict of the release's ``ForgettingAttentionLayer``.

    A state dict does not show the rotation, nor a gate without weights: rope is theta where it has
    ``use_rope``, gate says whether an ``fgate_bias`` is "independent" or "fixed", and "none" where
    there is none.
    """
    source = Source("forgetting_attention_from_forgetting_transformer", state_dict)
    tensors = _released_mixer(source, "")
    switches = {
        "gate": gate,
        "output_gate": "ogate_proj.weight" in state_dict,
        "output_norm": "output_norm.weight" in tensors,
        "kv_shift": "shift_proj.weight" in tensors,
    }
    return _layer(
        ForgettingAttention, source, tensors, num_heads, rope=rope, norm_eps=norm_eps, **switches
    )


def config_from_forgetting_transformer(config: Config) -> LMConfig:
    """The LMConfig that equals a config.json of the release, of its
    ``ForgettingTransformerForCausalLM`` or ``TransformerForCausalLM``.

    Models without a forget gate become "transformer". ValueError for what has no equal here: fewer
    key heads than query heads, a shift of keys alone or of values alone, another activation of the
    channel mixer than "swish", a window of forgetting attention.
    """
    config = config_of("config_from_forgetting_transformer", config)
    is_fox = config.get("model_type", "forgetting_transformer").startswith("forgetting")
    gate = _GATE_TYPES.get(config.get("fgate_type", "full")) if is_fox else "none"
    heads = config.get("num_heads", 32)
    shifts = config.get("use_k_shift", False)
    fits = {
        "fgate_type": gate is not None,
        "num_kv_heads": config.get("num_kv_heads") in (None, heads) or not is_fox,
        "use_v_shift": config.get("use_v_shift", False) == shifts,
        "hidden_act": config.get("hidden_act", "swish") in ("swish", "silu"),
        "window_size": config.get("window_size") is None or not is_fox,
    }
    for key, fit in fits.items():
        if not fit:
            raise ValueError(
                f"config_from_forgetting_transformer: {key}: {config.get(key)!r} has no equal here"
            )
    options: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": config.get("num_kv_heads"),
        "qk_norm": config.get("qk_norm", False),
        "qk_norm_shared": config.get("qk_norm_share_param_across_head", False),
        "qk_norm_eps": _QK_NORM_EPS,
        "output_gate": config.get("use_output_gate", False),
        "output_activation": config.get("ogate_act", "sigmoid"),
        "output_norm": config.get("use_output_norm", False),
        "kv_shift": shifts,
    }
    turns = config.get("use_rope", not is_fox)
    options["rope"] = float(config.get("rope_base", 500000.0)) if turns else None
    if gate == "none":
        options["window"] = config.get("window_size")
    else:
        options["gate"] = gate
        if config.get("fgate_bias_init"):
            options["gate_init"] = ("long", config["decay_time_min"], config["decay_time_max"])
        if config.get("log_pruning_tolerance") is not None:
            options["prune"] = math.exp(config["log_pruning_tolerance"])
    dim = config.get("hidden_size", 2048)
    return LMConfig(
        mixer="transformer" if gate == "none" else "fox",
        mixer_options=options,
        vocab_size=config.get("vocab_size", 32000),
        dim=dim,
        layers=config.get("num_hidden_layers", 24),
        glu_hidden=fla_hidden(config, dim),
        glu_activation="silu",
        norm="rms",
        norm_eps=config.get("norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        scale_embedding=False,
        init_std=config.get("initializer_range", 0.02),
    )


def causal_lm_from_forgetting_transformer(
    config: Config, state_dict: Mapping[str, Tensor] | None = None
) -> CausalLM:
    """A CausalLM from the config.json and state dict of the release's
    ``ForgettingTransformerForCausalLM`` or ``TransformerForCausalLM``, or from a folder or a model
    that has both."""
    owner = "causal_lm_from_forgetting_transformer"
    config, state_dict = checkpoint_of(owner, config, state_dict)
    ours = config_from_forgetting_transformer(config)
    source = Source(owner, state_dict)
    tensors = take_frame(source, ours.layers)
    take_head(source, ours, tensors)
    for k in range(ours.layers):
        mixer = _released_mixer(source, f"model.layers.{k}.attn.")
        tensors.update({f"blocks.{k}.mixer.{name}": t for name, t in mixer.items()})
    source.finish()
    return fill(CausalLM(ours, device="meta"), tensors, source.name)
