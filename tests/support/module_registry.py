"""Every public module class, with its C++ twin and how to drive both: what test_parity*.py run.

A class in `tidegate.nn` or `tidegate.models` that is not in `REGISTRY` fails that test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tidegate.models
import tidegate.nn
from support.model_configs import STARTS, model_arguments

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Entry:
    """One class.

    Attributes:
        native: the Python class; its C++ twin is the class of the same name in `tidegate.cpp`.
        arguments: constructor arguments, all combinations to be tried, allowed or not.
        inputs: arguments of forward() for a module: floating-point tensors among them are
            differentiated.
        allowed: how many of `arguments` are accepted.
        variants: how many inputs() there are to try: inputs(..., variant) with 0 <= variant.
    """

    native: type[nn.Module]
    arguments: list[Arguments]
    inputs: Callable[..., tuple[list[Any], dict[str, Any]]]
    allowed: int
    variants: int = 1


def public_modules() -> dict[str, type[nn.Module]]:
    """Every torch.nn.Module that tidegate.nn and tidegate.models export."""
    found = {}
    for package in (tidegate.nn, tidegate.models):
        for name in package.__all__:
            value = getattr(package, name)
            if isinstance(value, type) and issubclass(value, nn.Module):
                found[name] = value
    return found


def randn(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal numbers that are the same on every device."""
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


# GLU and LowerBounds


def _glu_arguments() -> list[Arguments]:
    options = itertools.product((None, 1, 7), ("silu", "none", "gelu"), (False, True))
    allowed = [((4,), {"hidden": h, "activation": a, "bias": b}) for h, a, b in options]
    return [*allowed, ((0,), {}), ((4,), {"hidden": 0}), ((4,), {})]


def _glu_inputs(module, device, dtype, variant):
    shape = ((2, 3, 4), (4,))[variant]
    return [randn(*shape, device=device, dtype=dtype)], {}


def _lower_bounds_arguments() -> list[Arguments]:
    modes = ("cumulative", "none", "independent", "decreasing", "rising")
    shapes = ((1, 1), (3, 5), (0, 2), (2, -1))
    return [(shape, {"mode": m}) for shape, m in itertools.product(shapes, modes)]


# HGRU


def _hgru_arguments() -> list[Arguments]:
    """Every combination of the options that choose a path through the code; those that only add a
    width, a bias or a norm take turns."""
    paths = itertools.product(
        (None, True, False),
        (None, "learned", "fixed", "data"),
        ("tied", "free", "none"),
        ("data", "bound", "none"),
        (False, True),
        ("paper", "official", "fla"),
    )
    widths = itertools.cycle(
        itertools.product(
            (1, 2), (True, False), (None, True, False), (None, "layer", "rms", "rms_no_weight")
        )
    )
    cases: list[Arguments] = []
    for path, width in zip(paths, widths, strict=False):
        names = ("complex", "theta", "input_gate", "forget_gate", "bidirectional", "preset")
        options = dict(zip(names, path, strict=True))
        options |= dict(zip(("expand", "output_gate", "bias", "norm"), width, strict=True))
        cases.append(((3,), options))
    return cases + _hgru_expansions() + _hgru_gates() + _hgru_mistakes()


def _gate_starts() -> list[dict[str, Any]]:
    """Every way that a forget gate starts, and Gumbel-Gate, alone and with each."""
    noise = itertools.cycle((None, 0.9))
    starts = [{"gate_init": kind, "gumbel_gate": next(noise)} for kind in GATE_INITS]
    return [*starts, {"gumbel_gate": 0.5}, {"gate_init": "ugi", "gumbel_gate": 0.9}]


def _bounded(options: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """These options with a lower bound, alone and outside Gumbel-Gate's noise."""
    noise = ({}, {"gumbel_gate": 0.9})
    return [{**given, "lower_bound": True, **more} for given in options for more in noise]


GATE_INITS = ("standard", "ugi", "chrono:30", "gumbel-softmax", "gumbel-softmax:-1.5:0.25")


def _hgru_gates() -> list[Arguments]:
    """Every way that a forget gate starts with every place that its bias has, and Gumbel-Gate."""
    places = itertools.product(
        (
            {"complex": False},
            {"theta": "data", "output_gate": False},
            {"expand": 2, "bidirectional": True},
            {"expansion": "kp", "expand": 2},
        ),
        (True, False),
        ("tied", "free"),
    )
    cases: list[Arguments] = []
    for kind, (place, bias, entering) in zip(itertools.cycle(GATE_INITS), places, strict=False):
        options = {"gate_init": kind, "bias": bias, "input_gate": entering, **place}
        cases += [((4,), options), ((4,), {**options, "gumbel_gate": 0.9})]
    return [*cases, ((1,), {"gate_init": "ugi"}), ((1,), {"gate_init": "chrono:9"})]


def _hgru_expansions() -> list[Arguments]:
    """Every expansion with every value of the options that meet it."""
    others = itertools.cycle(
        [
            {},
            {"output_gate": False, "norm": "rms"},
            {"preset": "official", "bias": False},
            {"input_gate": "free", "bidirectional": True},
            {"forget_gate": "bound", "preset": "fla", "bias": True},
        ]
    )
    kinds = ("naive", "lr", "glt", "glti", "krp", "kp")
    cases = [((4,), {"expansion": k, "expand": n}) for k in kinds for n in (1, 2, 4)]
    cases += [((4,), {"expansion": "lr", "expand": 3, "rank": 2})]
    return [(args, options | next(others)) for args, options in cases]


def _hgru_mistakes() -> list[Arguments]:
    wrong = [
        {"theta": "rope"},
        {"input_gate": "open"},
        {"forget_gate": "closed"},
        {"preset": "mine"},
        {"norm": "batch"},
        {"expand": 0},
        {"expansion": "cp"},
        {"expansion": "glt", "expand": 2},
        {"expansion": "glti", "expand": 4},
        {"expansion": "lr", "rank": 0},
        {"expansion": "kp", "rank": 2},
        {"rank": 2},
        {"expansion": "krp", "complex": True},
        {"expansion": "naive", "theta": "learned"},
        {"gate_init": "UGI"},
        {"gate_init": "chrono:1"},
        {"gate_init": "gumbel-softmax:1"},
        {"gate_init": "ugi", "forget_gate": "bound"},
        {"gumbel_gate": -0.5},
        {"gumbel_gate": 0.5, "forget_gate": "bound"},
        {"complex": False, "theta": "learned"},
        {"preset": "fla", "theta": "fixed"},
        {"forget_gate": "none"},
    ]
    return [((0,), {}), ((-2,), {}), *(((3,), options) for options in wrong)]


def _gamma(module, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    if not module.takes_gamma:
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.linspace(0.0, 0.95, module.gamma_size, device=device, dtype=wide)


def _mixer_inputs(module, device, dtype, variant):
    """0: from nothing; 1: from a state; 2: packed sequences, one of them empty."""
    x = randn(*((2, 5), (2, 4), (1, 6))[variant], module.dim, device=device, dtype=dtype)
    keywords = {"gamma": _gamma(module, device, dtype)}
    if variant == 1 and not module.bidirectional:
        state = module.init_state(2)
        for part in (state,) if isinstance(state, Tensor) else state:
            # Positive: a normaliser is the divisor.
            part.copy_(torch.rand(part.shape, dtype=torch.float64))
        return [x, state], keywords
    if variant == 2:
        keywords["cu_seqlens"] = torch.tensor([0, 2, 2, 6], device=device)
    return [x], keywords


# HGRU2 and GatedLinearAttention


def _hgru2_arguments() -> list[Arguments]:
    heads = ({}, {"num_heads": 2}, {"expand_ratio": 2}, {"num_heads": 4, "expand_ratio": 1})
    paths = itertools.product(heads, ("paper", "official", "fla"), (False, True))
    widths = itertools.cycle(
        [
            {},
            {"bias": True, "norm": "rms"},
            {"bias": False, "q_activation": "none"},
            {"v_activation": "sigmoid"},
            {"norm": "layer", "q_activation": "silu", "norm_eps": 1e-3},
        ]
    )
    cases: list[Arguments] = [
        ((4,), {**given, "preset": preset, "bidirectional": both, **next(widths)})
        for given, preset, both in paths
    ]
    wrong = [
        {"num_heads": 3},
        {"num_heads": 0},
        {"expand_ratio": 3},
        {"expand_ratio": -1},
        {"num_heads": 2, "expand_ratio": 1},
        {"preset": "mine"},
        {"q_activation": "relu"},
        {"v_activation": "tanh"},
        {"norm": "batch"},
    ]
    wrong += [{"gate_init": "zero"}, {"gumbel_gate": -0.5}]
    presets = itertools.cycle(("paper", "fla", "official"))
    cases += [((4, 2), {**options, "preset": next(presets)}) for options in _gate_starts()]
    cases += [((4, 2), {"gate_init": "ugi", "bidirectional": True, "gumbel_gate": 0.9})]
    sizes: list[Arguments] = [((4, 2), {}), ((192,), {}), ((131,), {}), ((0,), {}), ((1024, 1), {})]
    return [*cases, *sizes, *(((4,), o) for o in wrong)]


def _gla_arguments() -> list[Arguments]:
    maps = (None, "elu+1", "relu", "exp", "cos")
    paths = itertools.product(("vector", "scalar"), (False, True), maps)
    widths = itertools.cycle(
        [
            {},
            {"key_dim": 6, "gate_rank": 2},
            {"value_dim": 2, "output_gate": False, "norm": "layer"},
            {"gate_temperature": 0.5, "norm": "rms_no_weight"},
            {"norm_eps": 1e-3},
        ]
    )
    cases: list[Arguments] = [
        ((4, 2), {"gate": gate, "normalize": n, "feature_map": m, **next(widths)})
        for gate, n, m in paths
    ]
    wrong = [
        {},
        {"num_heads": 0},
        {"num_heads": 1, "key_dim": 0},
        {"num_heads": 2, "value_dim": 3},
        {"num_heads": 1, "gate": "none"},
        {"num_heads": 1, "gate_rank": 0},
        {"num_heads": 1, "gate_temperature": -1},
        {"num_heads": 1, "norm": "batch"},
        {"num_heads": 1, "gate_init": "zero"},
        {"num_heads": 1, "gumbel_gate": -1.5},
        {"num_heads": 1, "gate": "scalar", "gate_init": "ugi"},
        {"num_heads": 1, "norm_eps": -1},
        {"num_heads": 1, "value_dim": 1024},
    ]
    gates = itertools.cycle(({}, {"gate": "scalar"}, {"normalize": True, "feature_map": "relu"}))
    cases += [((4, 2), {**options, **next(gates)}) for options in _gate_starts()]
    cases += [((4, 2), options) for options in _bounded(next(gates) for _ in range(3))]
    return [*cases, ((4, 1), {}), ((0,), {}), *(((4,), o) for o in wrong)]


# Attention and ForgettingAttention


def _switches() -> list[dict[str, Any]]:
    """Every component of the presets switched on or off, the other options taking turns."""
    others = itertools.cycle(
        [
            {"num_heads": 2},
            {"num_heads": 2, "num_kv_heads": 1, "window": 2},
            {"num_heads": 4, "num_kv_heads": 2, "qk_norm_shared": False, "rope": None},
            {"num_heads": 1, "output_activation": "silu", "norm_eps": 1e-3},
            {"num_heads": 2, "rope": 100.0, "qk_norm_eps": 1e-2},
        ]
    )
    names = ("preset", "qk_norm", "output_gate", "output_norm", "kv_shift")
    values = itertools.product(("llama", "pro"), *[(None, True, False)] * 4)
    paths = [dict(zip(names, v, strict=True)) for v in values]
    return [{**path, **next(others)} for path in paths[::5]]


ATTENTION_MISTAKES: list[dict[str, Any]] = [
    {"num_heads": 3},
    {"num_heads": 0},
    {"num_heads": 2, "num_kv_heads": 0},
    {"num_heads": 4, "num_kv_heads": 3},
    {"num_heads": 8, "rope": 10.0},
    {"num_heads": 2, "rope": -1},
    {"num_heads": 2, "window": 0},
    {"num_heads": 2, "preset": "mine"},
    {"num_heads": 2, "output_activation": "tanh"},
]


def _attention_arguments() -> list[Arguments]:
    options = itertools.product((None, 1, 2), (None, 100.0), (None, 1, 3))
    cases: list[Arguments] = [
        ((8,), {"num_heads": h, "rope": rope, "window": w}) for h, rope, w in options
    ]
    cases += [((8,), switches) for switches in _switches()]
    mistakes = [((8,), o) for o in ATTENTION_MISTAKES]
    return [*cases, ((4, 2), {}), ((4, 4), {"rope": None}), ((0,), {}), *mistakes]


def _forgetting_attention_arguments() -> list[Arguments]:
    gates = itertools.cycle(
        [
            {},
            {"gate": "independent", "gate_init": ("long", 2, 256)},
            {"gate": "fixed", "gate_init": "long:2:31.5"},
            {"gate": "none"},
            {"gate": "data", "gate_init": "long:4:4"},
            {"gate": "independent"},
            {"gate": "fixed"},
        ]
    )
    cases: list[Arguments] = [((8,), {**switches, **next(gates)}) for switches in _switches()]
    pro = {"num_heads": 2, "preset": "pro"}
    cases += [((8,), {**pro, "prune": 1e-5}), ((8,), {**pro, "prune": 1e-5, "drop_pruned": True})]
    wrong = [
        {"gate": "open"},
        {"gate_init": "long"},
        {"gate_init": "long:0:3"},
        {"gate_init": ("long", 2)},
        {"gate": "none", "gate_init": "long:2:3"},
        {"prune": 0.0},
        {"prune": 1.5},
        {"drop_pruned": True},
        {"prune": 0.1, "drop_pruned": True},
        {"gate_init": "UGI"},
        {"gate": "none", "gate_init": "ugi"},
        {"num_heads": 1, "gate_init": "ugi"},
        {"gate": "fixed", "gumbel_gate": 0.9},
        {"gumbel_gate": -0.5},
        {"gate": "none", "lower_bound": True},
    ]
    kinds = itertools.cycle(({}, {"preset": "pro"}))
    cases += [((8, 2), {**options, **next(kinds)}) for options in _gate_starts()]
    cases += [((8, 2), {"gate": "fixed", "gate_init": "chrono:9"})]
    cases += [((8, 2), options) for options in _bounded(({}, {"preset": "pro", "window": 3}))]
    cases += [((8, 2), {"gate": g, "lower_bound": True}) for g in ("independent", "fixed")]
    mistakes = [((8,), o) for o in [*ATTENTION_MISTAKES, *wrong]]
    return [*cases, ((4, 2), {}), ((128,), {}), ((0,), {}), *mistakes]


def _attention_inputs(module, device, dtype, variant):
    """0, 2: as the other mixers; 1: a state with room, after three tokens."""
    if variant != 1:
        return _mixer_inputs(module, device, dtype, variant)
    x = randn(2, 7, module.dim, device=device, dtype=dtype)
    keywords = {"gamma": _gamma(module, device, dtype)}
    with torch.no_grad():
        _, state = module(x[:, :3], module.init_state(2, dtype=dtype, capacity=9), **keywords)
    return [x[:, 3:], state], keywords


# GatedLinearRNN and GatedRNN


def _minimal_rnn_arguments() -> list[Arguments]:
    options = itertools.product(GATE_INITS, (None, 0.9), (False, True))
    names = ("gate_init", "gumbel_gate", "lower_bound")
    cases = [((3,), dict(zip(names, values, strict=True))) for values in options]
    wrong = [{"gate_init": "zero"}, {"gumbel_gate": -1.5}]
    return [*cases, ((0,), {}), ((1,), {"gate_init": "ugi"}), *(((3,), o) for o in wrong)]


# LRU and SLRU


def _lru_arguments(is_complex: bool) -> list[Arguments]:
    rings = itertools.cycle(
        [{}, {"r_min": 0.0, "r_max": 1.0}, {"r_min": 0.5, "r_max": 0.5}, {"r_min": 0.99}]
    )
    phases = itertools.cycle([{}, {"max_phase": 0.5}] if is_complex else [{}])
    gates = ({"gate": None}, {"gate": "data"}) if is_complex else ({},)
    cases: list[Arguments] = [
        ((3,), {"state": state, "skip": skip, **gate, **next(rings), **next(phases)})
        for state, skip, gate in itertools.product((None, 1, 5), (False, True), gates)
    ]
    wrong: list[dict[str, Any]] = [
        {"state": 0},
        {"r_min": -0.25},
        {"r_min": 0.9995},
        {"r_max": 1.5},
        {"r_min": 0.0, "r_max": 0.0},
        {"r_min": 1.0, "r_max": 1.0},
    ]
    if is_complex:
        wrong += [{"max_phase": 0.0}, {"gate": "fixed"}, {"gate_init": "ugi"}, {"gumbel_gate": 0.9}]
        wrong += [{"gate": "data", "gate_init": "zero"}, {"gate": "data", "gumbel_gate": -0.5}]
        wrong += [{"lower_bound": True}]
        cases += [((3,), {"gate": "data", **options}) for options in _gate_starts()]
        gates: tuple[dict[str, Any], ...] = ({"gate": "data"}, {"gate": "data", "state": 5})
        cases += [((3,), options) for options in _bounded(gates)]
    return [*cases, ((3,), {}), ((0,), {}), *(((3,), options) for options in wrong)]


# RWKV4


def _rwkv4_arguments() -> list[Arguments]:
    options = itertools.product((False, True), ("speed", "uniform"), (0.0, 0.37, 1.0))
    names = ("time_shift", "decay_init", "depth")
    cases = [((5,), dict(zip(names, values, strict=True))) for values in options]
    wrong = [{"decay_init": "slow"}, {"depth": -0.5}, {"depth": 2}]
    return [*cases, ((1,), {}), ((0,), {}), *(((3,), o) for o in wrong)]


# Models


def _block_inputs(module, device, dtype, variant):
    return [randn(2, 5, 4, device=device, dtype=dtype)], {
        "gamma": _gamma(module.mixer, device, dtype)
    }


def _ids(device: torch.device, rows: int = 3, time: int = 5) -> Tensor:
    return torch.randint(0, 11, (rows, time)).to(device)


def _lm_inputs(module, device, dtype, variant):
    """0: loss of the next id; 1: given labels; 2: packed; 3: int32 ids, no labels, from a state."""
    ids = _ids(device)
    if variant == 0:
        return [ids, "next"], {}
    if variant == 1:
        return [ids, ids.roll(1, dims=1).masked_fill(ids == 3, -100)], {}
    if variant == 2:
        bounds = torch.tensor([0, 0, 2, 5], device=device)
        return [ids[:1], "next"], {"cu_seqlens": bounds}
    with torch.no_grad():
        state = module(ids).state
    return [ids.int()], {"state": state}


def _sequence_inputs(module, device, dtype, variant):
    """0: whole rows; 1: padded rows, one of them empty; 2: packed."""
    ids, labels = _ids(device), torch.tensor([0, 4, 2], device=device)
    if variant == 0:
        return [ids, labels], {}
    if variant == 1:
        return [ids, labels], {"lengths": torch.tensor([5, 0, 2])}
    return [ids[:1], labels], {"cu_seqlens": torch.tensor([0, 1, 3, 5], device=device)}


def _image_inputs(module, device, dtype, variant):
    images = randn(2, 3, 4, 6, device=device, dtype=dtype)
    return [images, torch.tensor([1, 3], device=device)], {}


REGISTRY: dict[str, Entry] = {
    "GLU": Entry(tidegate.nn.GLU, _glu_arguments(), _glu_inputs, allowed=13, variants=2),
    "LowerBounds": Entry(
        tidegate.nn.LowerBounds, _lower_bounds_arguments(), lambda *_: ([], {}), allowed=8
    ),
    "HGRU": Entry(tidegate.nn.HGRU, _hgru_arguments(), _mixer_inputs, allowed=436, variants=3),
    "HGRU2": Entry(tidegate.nn.HGRU2, _hgru2_arguments(), _mixer_inputs, allowed=34, variants=3),
    "GatedLinearAttention": Entry(
        tidegate.nn.GatedLinearAttention, _gla_arguments(), _mixer_inputs, allowed=28, variants=3
    ),
    "Attention": Entry(
        tidegate.nn.Attention, _attention_arguments(), _attention_inputs, allowed=53, variants=3
    ),
    "ForgettingAttention": Entry(
        tidegate.nn.ForgettingAttention,
        _forgetting_attention_arguments(),
        _attention_inputs,
        allowed=51,
        variants=3,
    ),
    "GatedLinearRNN": Entry(
        tidegate.nn.GatedLinearRNN,
        _minimal_rnn_arguments(),
        _mixer_inputs,
        allowed=20,
        variants=3,
    ),
    "LRU": Entry(tidegate.nn.LRU, _lru_arguments(True), _mixer_inputs, allowed=24, variants=3),
    "SLRU": Entry(tidegate.nn.SLRU, _lru_arguments(False), _mixer_inputs, allowed=7, variants=3),
    "GatedRNN": Entry(
        tidegate.nn.GatedRNN, _minimal_rnn_arguments(), _mixer_inputs, allowed=20, variants=3
    ),
    "RWKV4": Entry(tidegate.nn.RWKV4, _rwkv4_arguments(), _mixer_inputs, allowed=13, variants=3),
    "Block": Entry(
        tidegate.models.Block, model_arguments(), _block_inputs, allowed=110 + len(STARTS)
    ),
    "CausalLM": Entry(
        tidegate.models.CausalLM,
        model_arguments(),
        _lm_inputs,
        allowed=106 + len(STARTS),
        variants=4,
    ),
    "SequenceClassifier": Entry(
        tidegate.models.SequenceClassifier,
        model_arguments(num_classes=5),
        _sequence_inputs,
        allowed=113 + len(STARTS),
        variants=3,
    ),
    "ImageClassifier": Entry(
        tidegate.models.ImageClassifier,
        model_arguments(num_classes=5, patch_size=2),
        _image_inputs,
        allowed=114 + len(STARTS),
    ),
}
