"""Other implementations' language models: one table of names each, read both ways.

A table says of every tensor of a `CausalLM` which rows of which of their tensors it is made of;
since that is all there is to it, what goes one way and back is the same, bit for bit.
`tidegate.convert` reads and writes the files; `loaders` says what each configuration means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..nn import Attention, ForgettingAttention
from ..nn._common import dtype_name, stacked_rows, widen
from . import loaders
from .block import load_exactly
from .causal_lm import CausalLM
from .config import LMConfig


class Rows(NamedTuple):
    """Rows ``[start, start + count)`` of their tensor `name`."""

    name: str
    start: int
    count: int


class Layout(NamedTuple):
    """An implementation: its table for a model (given the names that a source has, where there is
    one), the configuration that a config.json means, and the config.json that a model has."""

    table: Callable[[CausalLM, Iterable[str] | None], dict[str, list[Rows]]]
    read_config: Callable[[Mapping[str, Any]], LMConfig]
    write_config: Callable[[CausalLM], dict[str, Any]]


def import_tensors(
    layout: Layout, config: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str
) -> CausalLM:
    """The CausalLM that their config.json and state dict are; ValueError, with all names, for
    tensors that are missing or have no place."""
    lm = CausalLM(layout.read_config(config), device="meta")
    table = layout.table(lm, tensors)
    _check_names(table, tensors, lm, source)
    ours = {}
    for name, parts in table.items():
        pieces = [tensors[p.name][p.start : p.start + p.count] for p in parts]
        ours[name] = _in_ours_dtype(
            name, pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)
        )
    _check_whole(table, tensors, source)
    load_exactly(lm, ours, source)
    return lm


def export_tensors(
    layout: Layout, lm: CausalLM, names: Iterable[str] | None, dtypes: Mapping[str, str]
) -> dict[str, Tensor]:
    """Their state dict of a CausalLM. names: of a source that this goes back to; dtypes: its, which
    tensors are given where that loses nothing."""
    state = lm.state_dict()
    theirs: dict[str, list[tuple[int, Tensor]]] = {}
    for ours, parts in layout.table(lm, names).items():
        counts = [p.count for p in parts]
        for part, piece in zip(parts, state[ours].split(counts), strict=True):
            theirs.setdefault(part.name, []).append((part.start, piece))
    found = {}
    for name, pieces in theirs.items():
        ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
        found[name] = _in_theirs_dtype(torch.cat(ordered).contiguous(), dtypes.get(name))
    if names is not None and lm.head is None and "lm_head.weight" in set(names):
        embedding = next(p.name for p in layout.table(lm, names)["embedding.weight"])
        found["lm_head.weight"] = found[embedding].clone()
    return found


def export_config(layout: Layout, lm: CausalLM, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """Their config.json of a CausalLM: the source's own, where it means this model; ValueError,
    naming the first difference, where none can."""
    if source is not None and not _difference(layout.read_config(source), lm):
        return dict(source)
    config = layout.write_config(lm)
    if difference := _difference(layout.read_config(config), lm):
        raise ValueError(f"export_config: {difference}: has no equal there")
    return config


# Options that say how parameters start, and ones that change nothing after that.
_AT_THE_START = ("preset", "gate_init", "_init", "depth", "training", "decay_init", "_parts")


def _difference(config: LMConfig, lm: CausalLM) -> str:
    """The first thing in which a configuration's model is not this one, "" where there is none."""
    theirs = _facts(CausalLM(config, device="meta"))
    ours = _facts(lm)
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            return f"{name} = {ours.get(name)!r} (there: {theirs.get(name)!r})"
    return ""


def _facts(lm: CausalLM) -> dict[str, Any]:
    """What a model computes: its tensors' shapes, and the numbers and words of its modules."""
    facts: dict[str, Any] = {n: tuple(t.shape) for n, t in lm.state_dict().items()}
    for owner, module in lm.named_modules():
        for name, value in vars(module).items():
            plain = isinstance(value, (bool, int, float, str)) or value is None
            if plain and name not in _AT_THE_START and not name.startswith("_"):
                facts[f"{owner}.{name}".lstrip(".")] = value
        facts[f"{owner}: class"] = type(module).__name__
    return facts


def _in_ours_dtype(name: str, t: Tensor) -> Tensor:
    """Bounds and gates' biases are fp32 at least."""
    return widen(t) if name.endswith((".gate_bias", "lower_bounds.logits")) else t


def _in_theirs_dtype(t: Tensor, dtype: str | None) -> Tensor:
    if dtype is None or dtype == dtype_name(t.dtype):
        return t
    cast = t.to(getattr(torch, dtype))
    return cast if torch.equal(cast.to(t.dtype), t) else t


def _check_names(
    table: dict[str, list[Rows]], tensors: Mapping[str, Tensor], lm: CausalLM, source: str
) -> None:
    wanted = {part.name for parts in table.values() for part in parts}
    spare = {"lm_head.weight"} if lm.head is None else set()
    missing, unknown = sorted(wanted - set(tensors)), sorted(set(tensors) - wanted - spare)
    said = [f"no tensor {', '.join(missing)}"] if missing else []
    said += [f"no place for {', '.join(unknown)}"] if unknown else []
    if said:
        raise ValueError(f"{source}: {'; '.join(said)}")


def _check_whole(table: dict[str, list[Rows]], tensors: Mapping[str, Tensor], source: str) -> None:
    """Every row of theirs has its place: a wider tensor is another model's."""
    rows: dict[str, int] = {}
    for parts in table.values():
        for part in parts:
            rows[part.name] = rows.get(part.name, 0) + part.count
    for name, count in rows.items():
        given = tensors[name].size(0)
        if given != count:
            raise ValueError(f"{source}: {name!r}: expected {count} rows; got {given}")


# Tables


def _whole(state: Mapping[str, Tensor], ours: str, theirs: str) -> dict[str, list[Rows]]:
    return {ours: [Rows(theirs, 0, state[ours].size(0))]}


def _stacked(linear: nn.Module, ours: str, names: Iterable[str]) -> dict[str, list[Rows]]:
    """The rows of a projection that stacks matrices: each matrix is one of theirs."""
    pairs = zip(names, stacked_rows(linear), strict=True)
    return {f"{ours}.weight": [Rows(f"{name}.weight", 0, count) for name, count in pairs]}


def _frame(lm: CausalLM, merged: bool) -> dict[str, list[Rows]]:
    """flash-linear-attention's embedding, norms, channel mixers and head, which the Forgetting
    Transformer's release shares; merged: one matrix for the channel mixer's gate and values."""
    state = lm.state_dict()
    table = _whole(state, "embedding.weight", "model.embeddings.weight")
    table |= _whole(state, "norm.weight", "model.norm.weight")
    if lm.head is not None:
        table |= _whole(state, "head.weight", "lm_head.weight")
    for k, block in enumerate(lm.blocks):
        theirs, ours = f"model.layers.{k}.", f"blocks.{k}."
        table |= _whole(state, f"{ours}mixer_norm.weight", f"{theirs}attn_norm.weight")
        table |= _whole(state, f"{ours}glu_norm.weight", f"{theirs}mlp_norm.weight")
        names = [f"{theirs}mlp.gate_proj", f"{theirs}mlp.up_proj"]
        if merged:
            table |= _whole(state, f"{ours}glu.in_proj.weight", f"{names[0]}.weight")
        else:
            table |= _stacked(block.glu.in_proj, f"{ours}glu.in_proj", names)
        table |= _whole(state, f"{ours}glu.out_proj.weight", f"{theirs}mlp.down_proj.weight")
    return table


def _is_merged(names: Iterable[str] | None, otherwise: bool) -> bool:
    if names is None:
        return otherwise
    return not any(name.endswith("mlp.up_proj.weight") for name in names)


# What fla calls the matrices that our projections stack.
_FLA_STACKS = {"hgrn": ("i", "f", "g"), "hgrn2": ("q", "f", "i")}


def _fla_table(lm: CausalLM, names: Iterable[str] | None) -> dict[str, list[Rows]]:
    names = None if names is None else set(names)
    state = lm.state_dict()
    table = _frame(lm, _is_merged(names, False))
    if "lower_bounds.logits" in state:
        table |= _whole(state, "lower_bounds.logits", "model.lower_bounds")
    for k, block in enumerate(lm.blocks):
        theirs, ours = f"model.layers.{k}.attn.", f"blocks.{k}.mixer."
        mixer = block.mixer
        if isinstance(mixer, (ForgettingAttention, Attention)):
            parts = "qkvg"[: len(stacked_rows(mixer.in_proj))]
            single = {"gate_proj.weight": "f_proj.weight", "gate_bias": "f_proj.bias"}
        elif lm.config.mixer == "gla":
            parts = _gla_parts(mixer)
            single = {"gate_proj.weight": "gk_proj.1.weight", "gate_proj.bias": "gk_proj.1.bias"}
            single["norm.weight"] = _gla_norm(mixer, names, theirs)
        else:
            parts = _FLA_STACKS[lm.config.mixer]
            single = {"norm.weight": "g_norm.weight"}
        stack = [f"{theirs}{p if '.' in p else p + '_proj'}" for p in parts]
        table |= _stacked(mixer.in_proj, f"{ours}in_proj", stack)
        single |= {"q_norm.weight": "q_norm.weight", "k_norm.weight": "k_norm.weight"}
        single["out_proj.weight"] = "o_proj.weight"
        for mine, name in single.items():
            if f"{ours}{mine}" in state:
                table |= _whole(state, f"{ours}{mine}", f"{theirs}{name}")
    return table


def _gla_parts(mixer: nn.Module) -> list[str]:
    return ["q", "k", "v"] + ["g"] * mixer.output_gate + ["gk_proj.0"]


def _gla_norm(mixer: nn.Module, names: set[str] | None, theirs: str) -> str:
    fused = mixer.output_gate if names is None else f"{theirs}g_norm_swish_gate.weight" in names
    return "g_norm_swish_gate.weight" if fused else "g_norm.weight"


def _release_table(lm: CausalLM, names: Iterable[str] | None) -> dict[str, list[Rows]]:
    state = lm.state_dict()
    table = _frame(lm, _is_merged(names, True))
    for k, block in enumerate(lm.blocks):
        theirs, ours = f"model.layers.{k}.attn.", f"blocks.{k}.mixer."
        mixer = block.mixer
        linear = ".linear" if mixer.kv_shift else ""
        stack = ["q_proj", f"k_proj{linear}", f"v_proj{linear}"]
        stack += ["ogate_proj"] * mixer.output_gate
        table |= _stacked(mixer.in_proj, f"{ours}in_proj", [f"{theirs}{name}" for name in stack])
        if mixer.kv_shift:
            shifts = [f"{theirs}{name}_proj.shift_proj" for name in "kv"]
            table |= _stacked(mixer.shift_proj, f"{ours}shift_proj", shifts)
        has_data = getattr(mixer, "gate", "none") == "data"
        single = {
            "gate_proj.weight": "fgate_proj.weight",
            "gate_bias": "fgate_proj.bias" if has_data else "fgate_bias",
            "output_norm.weight": "output_norm.weight",
            "q_norm.weight": "q_norm.weight",
            "k_norm.weight": "k_norm.weight",
            "out_proj.weight": "o_proj.weight",
        }
        for mine, name in single.items():
            if f"{ours}{mine}" in state:
                table |= _whole(state, f"{ours}{mine}", f"{theirs}{name}")
    return table


def _hgru2_table(lm: CausalLM, names: Iterable[str] | None) -> dict[str, list[Rows]]:
    state = lm.state_dict()
    table = _whole(state, "embedding.weight", "model.embed_tokens.weight")
    table |= _whole(state, "lower_bounds.logits", "model.lower_bounds")
    if lm.head is not None:
        table |= _whole(state, "head.weight", "lm_head.weight")
    single = {"norm.": "model.final_norm."}
    for k in range(len(lm.blocks)):
        theirs, ours = f"model.layers.{k}.", f"blocks.{k}."
        single |= {
            f"{ours}mixer_norm.": f"{theirs}token_norm.",
            f"{ours}glu_norm.": f"{theirs}channel_norm.",
            f"{ours}mixer.norm.": f"{theirs}token_mixer.norm.",
            f"{ours}mixer.out_proj.": f"{theirs}token_mixer.out_proj.",
            f"{ours}glu.out_proj.": f"{theirs}channel_mixer.l3.",
        }
        for kind in ("weight", "bias"):
            stack = f"{ours}mixer.in_proj.{kind}"
            if stack in state:  # theirs are v, q, f; ours q, f, v
                dim, name = state[stack].size(0) // 3, f"{theirs}token_mixer.in_proj.{kind}"
                table[stack] = [Rows(name, start * dim, dim) for start in (1, 2, 0)]
            stack = f"{ours}glu.in_proj.{kind}"
            if stack in state:
                half = state[stack].size(0) // 2
                pair = (f"{theirs}channel_mixer.l{n}.{kind}" for n in (1, 2))
                table[stack] = [Rows(name, 0, half) for name in pair]
    for mine, name in single.items():
        for kind in ("weight", "bias"):
            if f"{mine}{kind}" in state:
                table |= _whole(state, f"{mine}{kind}", f"{name}{kind}")
    return table


# Configurations


def _one_mixer(lm: CausalLM, known: Iterable[str], where: str) -> nn.Module:
    """The mixer of all layers."""
    name = lm.config.mixer
    if not isinstance(name, str) or lm.config.layer_options:
        raise ValueError(f"{where}: expected one mixer in all layers; got several")
    if name not in known:
        raise ValueError(f"{where}: mixer: expected one of {', '.join(known)}; got {name!r}")
    return lm.blocks[0].mixer


def _frame_config(lm: CausalLM, architecture: str, model_type: str) -> dict[str, Any]:
    config = lm.config
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "intermediate_size": lm.blocks[0].glu.hidden,
        "hidden_act": "swish",
        "vocab_size": config.vocab_size,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "dtype": dtype_name(lm.embedding.weight.dtype),
    }


_FLA_CLASSES = {
    "hgrn": ("HGRNForCausalLM", "hgrn"),
    "hgrn2": ("HGRN2ForCausalLM", "hgrn2"),
    "gla": ("GLAForCausalLM", "gla"),
    "fox": ("ForgettingTransformerForCausalLM", "forgetting_transformer"),
    "transformer": ("TransformerForCausalLM", "transformer"),
}


def _fla_config(lm: CausalLM) -> dict[str, Any]:
    mixer = _one_mixer(lm, _FLA_CLASSES, "fla")
    kind = lm.config.mixer
    config = _frame_config(lm, *_FLA_CLASSES[kind])
    affine = getattr(getattr(mixer, "norm", None), "weight", None) is not None
    if kind in ("hgrn", "hgrn2"):
        config |= {"use_lower_bound": lm.lower_bounds is not None, "elementwise_affine": affine}
        config |= {"expand_ratio": mixer.expand if kind == "hgrn" else mixer.expand_ratio}
    elif kind == "gla":
        config |= {
            "num_heads": mixer.num_heads,
            "expand_k": mixer.key_dim / mixer.dim,
            "expand_v": mixer.value_dim / mixer.dim,
            "feature_map": mixer.feature_map,
            "use_output_gate": mixer.output_gate,
            "elementwise_affine": affine,
        }
    else:
        config |= {"num_heads": mixer.num_heads, "num_kv_heads": mixer.num_kv_heads}
        config |= {"qk_norm": mixer.qk_norm}
        if kind == "fox":
            config["use_output_gate"] = mixer.output_gate
        else:
            config |= {"rope_theta": mixer.rope, "window_size": mixer.window}
    return config


def _release_config(lm: CausalLM) -> dict[str, Any]:
    mixer = _one_mixer(lm, ("fox", "fox-pro", "transformer", "transformer-pro"), "fox")
    is_fox = isinstance(mixer, ForgettingAttention)
    name = "ForgettingTransformer" if is_fox else "Transformer"
    kind = "forgetting_transformer" if is_fox else "transformer"
    config = _frame_config(lm, f"{name}ForCausalLM", f"{kind}-project_fox")
    config |= {
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "qk_norm": mixer.qk_norm,
        "qk_norm_share_param_across_head": mixer.qk_norm_shared,
        "use_output_gate": mixer.output_gate,
        "ogate_act": mixer.output_activation,
        "use_output_norm": mixer.output_norm_on,
        "use_k_shift": mixer.kv_shift,
        "use_v_shift": mixer.kv_shift,
        "use_rope": mixer.rope is not None,
        "initializer_range": lm.config.init_std or 0.02,
    }
    if mixer.rope is not None:
        config["rope_base"] = mixer.rope
    if not is_fox:
        return config | {"window_size": mixer.window}
    types = {"data": "full", "independent": "bias_only", "fixed": "fixed", "none": "none"}
    config["fgate_type"] = types[mixer.gate]
    if mixer.prune is not None:
        config["log_pruning_tolerance"] = math.log(mixer.prune)
    return config


def _hgru2_config(lm: CausalLM) -> dict[str, Any]:
    mixer = _one_mixer(lm, ("hgrn2",), "hgru2")
    config = lm.config
    return {
        "architectures": ["Hgrn2ForCausalLM"],
        "model_type": "hgrn2",
        "vocab_size": config.vocab_size,
        "decoder_embed_dim": config.dim,
        "decoder_layers": config.layers,
        "glu_dim": lm.blocks[0].glu.hidden,
        "glu_act": config.glu_activation,
        "expand_ratio": mixer.expand_ratio,
        "out_act": mixer.q_activation,
        "in_act": mixer.v_activation,
        "bias": config.glu_bias,
        "norm_type": "layernorm" if config.norm == "layer" else "simplermsnorm",
        "tie_word_embeddings": config.tied,
        "no_scale_embedding": lm.scale == 1.0,
    }


LAYOUTS = {
    "fla": Layout(_fla_table, loaders.config_from_fla, _fla_config),
    "fox": Layout(_release_table, loaders.config_from_forgetting_transformer, _release_config),
    "hgru2-pytorch": Layout(_hgru2_table, loaders.config_from_hgru2_pytorch, _hgru2_config),
}
