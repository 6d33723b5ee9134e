"""Small configurations of models, for tests over all mixers and over all that a configuration may
ask for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tidegate.models import LMConfig, mixers

SMALL = LMConfig(mixer="hgrn", vocab_size=11, dim=4, layers=2, glu_hidden=6)
_MIXERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hgrn", {}),
    ("hgrn", {"complex": False, "expand": 2}),
    ("hgrn", {"preset": "official", "bias": False, "norm": "rms_no_weight"}),
    ("hgrn", {"preset": "fla", "norm_eps": 1e-6}),
    ("hgrn", {"theta": "data"}),
    ("hgrn", {"theta": "fixed"}),
    ("hgrn", {"forget_gate": "bound"}),
    ("hgrn", {"forget_gate": "none", "input_gate": "free"}),
    ("hgrn", {"bidirectional": True}),
    ("hgrn", {"expansion": "lr", "expand": 2, "rank": 3}),
    ("hgrn2", {"num_heads": 2}),
    ("hgrn2", {"expand_ratio": 4, "preset": "fla"}),
    ("hgrn2", {"num_heads": 1, "bidirectional": True, "preset": "official"}),
    ("gla", {"num_heads": 2}),
    ("transformer", {"num_heads": 2, "window": 3}),
    ("transformer-pro", {"num_heads": 2, "kv_shift": False}),
    ("fox", {"num_heads": 2, "gate": "fixed", "gate_init": "long:2:16"}),
    ("fox-pro", {"num_heads": 2, "num_kv_heads": 1}),
    (
        "gla",
        {
            "num_heads": 1,
            "gate": "scalar",
            "normalize": True,
            "feature_map": "exp",
            "norm": "none",
        },
    ),
    ("lru", {"state": 3, "skip": True}),
    ("lru", {"gate": "data", "r_min": 0}),
    ("slru", {}),
    ("rwkv4", {"time_shift": True}),
    ("gla", {"num_heads": 2, "lower_bound": True}),
    ("fox-pro", {"num_heads": 2, "lower_bound": True}),
    ("lru", {"gate": "data", "state": 3, "lower_bound": True}),
)


def configs(**changes: Any) -> Iterator[LMConfig]:
    """Small configurations: every mixer option set with every mode of the lower bound, the options
    of the frame taking turns."""
    modes = ("cumulative", "none", "independent", "decreasing")
    frames = itertools.cycle(
        itertools.product(
            (True, False), ("layer", "rms"), (None, "rms_no_weight"), ("none", "silu")
        )
    )
    for (mixer, options), mode in itertools.product(_MIXERS, modes):
        tied, norm, final_norm, activation = next(frames)
        yield SMALL.replace(
            mixer=mixer,
            mixer_options=dict(options),
            lower_bound=mode,
            tied=tied,
            norm=norm,
            final_norm=final_norm,
            glu_activation=activation,
            glu_bias=not tied,
            init_std=0.5 if norm == "rms" else None,
            **changes,
        )


def rnn_configs(**changes: Any) -> Iterator[LMConfig]:
    """Small models of the minimal gated RNNs, and of layers that differ; the last ones' bounds
    differ in width."""
    for options in ({}, {"lower_bound": True, "gate_init": "chrono:9"}, {"gate_init": "ugi"}):
        yield SMALL.replace(mixer="gated-linear-rnn", mixer_options=options, **changes)
    yield SMALL.replace(mixer="gated-rnn", **changes)
    first = {"layer_options": [{"gate_init": "gumbel-softmax", "gumbel_gate": 0.9}]}
    yield SMALL.replace(mixer=["hgrn", "gated-linear-rnn"], **first, **changes)
    yield SMALL.replace(mixer=["gated-linear-rnn", "hgrn"], **first, tied=False, **changes)
    yield from (SMALL.replace(**mixed, **changes) for mixed in _MIXED)
    both = [{"lower_bound": True}, {"complex": False}]
    yield SMALL.replace(mixer=["gated-linear-rnn", "hgrn"], layer_options=both, **changes)
    wide = [{"lower_bound": True}, {"expand": 2}]
    yield SMALL.replace(mixer=["gated-linear-rnn", "hgrn"], layer_options=wide, **changes)


# Attention beside recurrences, whose states have other shapes, layers that know their depth, and
# kinds of gates with bounds beside one that has none.
_MIXED: tuple[dict[str, Any], ...] = (
    {
        "mixer": ["hgrn2", "fox-pro", "gated-rnn"],
        "layers": 3,
        "layer_options": [{"num_heads": 2}, {"num_heads": 2, "window": 3}],
    },
    {
        "mixer": ["rwkv4", "transformer", "rwkv4"],
        "layers": 3,
        "layer_options": [{}, {"num_heads": 1}, {"time_shift": True}],
    },
    {
        "mixer": ["gla", "transformer", "fox", "lru"],
        "layers": 4,
        "layer_options": [
            {"num_heads": 2, "gate": "scalar", "lower_bound": True},
            {"num_heads": 2},
            {"num_heads": 2, "lower_bound": True},
            {"state": 2, "gate": "data", "lower_bound": True},
        ],
    },
)


def generating() -> dict[str, LMConfig]:
    """Language models to generate with, by what they are: every mixer, and layers that differ."""
    heads = {"num_heads": 2}
    options: dict[str, dict[str, Any]] = {
        "hgrn2": heads,
        "gla": {**heads, "normalize": True, "feature_map": "elu+1"},
        "lru": {"gate": "data"},
        "rwkv4": {"time_shift": True},
        "fox": heads,
        "fox-pro": {**heads, "window": 4},
        "transformer": heads,
        "transformer-pro": heads,
    }
    names = mixers()
    alone = {n: SMALL.replace(mixer=n, mixer_options=options.get(n, {})) for n in names}
    return alone | {"+".join(mixed["mixer"]): SMALL.replace(**mixed) for mixed in _MIXED}


# Options that say how something starts, which a model's init_std has to leave alone.
STARTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hgrn", {"gate_init": "chrono:512", "input_gate": "free"}),
    ("hgrn", {"gate_init": "ugi", "preset": "fla"}),
    ("hgrn", {"theta": "data"}),
    *(("hgrn", {"expansion": kind, "expand": 2}) for kind in ("naive", "lr", "glt", "glti", "krp")),
    ("hgrn", {"expansion": "kp", "expand": 2, "gate_init": "chrono:512", "bias": True}),
    ("hgrn2", {"num_heads": 2, "gate_init": "chrono:512"}),
    ("gla", {"num_heads": 2, "gate_init": "chrono:512"}),
    ("lru", {"gate": "data", "gate_init": "chrono:512"}),
    ("gated-linear-rnn", {"gate_init": "chrono:512"}),
    ("gated-rnn", {"gate_init": "ugi"}),
    ("fox", {"num_heads": 2, "gate_init": "long:2:16"}),
)


def model_arguments(**changes: Any) -> list[tuple[tuple[LMConfig], dict[str, Any]]]:
    """Arguments of a model's class: every small configuration, and two that it refuses."""
    plain = SMALL.replace(**changes)
    rejected = [plain.replace(vocab_size=None), plain.replace(num_classes=None, patch_size=None)]
    started = [
        plain.replace(mixer=mixer, mixer_options=dict(options), init_std=0.02)
        for mixer, options in STARTS
    ]
    every = (*configs(**changes), *rnn_configs(**changes), *started, *rejected)
    return [((config,), {}) for config in every]
