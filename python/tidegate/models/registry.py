"""Which token mixers a configuration can name, and what it may tell them.

Beside the calls that every token mixer has (`tidegate.nn`), models read four things of it:
`bidirectional`, `takes_gamma`, `needs_gamma`, and, where it takes one, `gamma_size`; and, where its
state grows with the tokens, `keeps_tokens`.

What looks into a model (`tidegate.training.probes`) reads more, where there is any: of a forget
gate that depends on the data `has_data_gate`, True, and ``forget_gate(x, gamma=None,
cu_seqlens=None)``, its values, bounded, without noise, fp32 or fp64; where that gate reads the
state, ``gate_parts(x, gamma=None, cu_seqlens=None)``; ``token_mixing(x, gamma=None)``.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from ..nn import (
    HGRU,
    HGRU2,
    LRU,
    RWKV4,
    SLRU,
    Attention,
    ForgettingAttention,
    GatedLinearAttention,
    GatedLinearRNN,
    GatedRNN,
)

if TYPE_CHECKING:
    from .config import LMConfig

_MIXERS: dict[str, type[nn.Module]] = {
    "hgrn": HGRU,
    "hgrn2": HGRU2,
    "gla": GatedLinearAttention,
    "lru": LRU,
    "slru": SLRU,
    "rwkv4": RWKV4,
    "gated-linear-rnn": GatedLinearRNN,
    "gated-rnn": GatedRNN,
    "fox": ForgettingAttention,
    "fox-pro": ForgettingAttention,
    "transformer": Attention,
    "transformer-pro": Attention,
}
# What a name says beyond its class; a configuration's options go before it.
_MEANT: dict[str, dict[str, Any]] = {
    "fox-pro": {"preset": "pro"},
    "transformer-pro": {"preset": "pro"},
}
_NOT_OPTIONS = ("self", "dim", "device", "dtype")


def mixers() -> dict[str, type[nn.Module]]:
    """The available mixers by name."""
    return dict(_MIXERS)


def mixer_class(name: str) -> type[nn.Module]:
    """The class of mixer `name`; ValueError when there is none."""
    if name in _MIXERS:
        return _MIXERS[name]
    raise ValueError(f"LMConfig: mixer: {name!r} is unknown; available: {', '.join(_MIXERS)}")


def option_names(name: str) -> list[str]:
    """The options of mixer `name` that a configuration can set."""
    return [p for p in inspect.signature(mixer_class(name)).parameters if p not in _NOT_OPTIONS]


def check_mixer_options(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for an option that the mixer's class does not have."""
    known = option_names(name)
    for key in options:
        if key not in known:
            raise ValueError(
                f"LMConfig: mixer_options: mixer {name!r} has no option {key!r}; "
                f"it has {', '.join(known)}"
            )


def make_mixer(config: LMConfig, **where: Any) -> nn.Module:
    """The mixer that the configuration of one layer names, of its width, with its options."""
    if not isinstance(config.mixer, str) or config.layer_options:
        raise ValueError(
            "Block: config: expected one layer's, as LMConfig.of_layer() gives it; got a list of "
            f"{'layer_options' if config.layer_options else 'mixers'}"
        )
    options = {**_MEANT.get(config.mixer, {}), **config.mixer_options}
    if "norm_eps" in option_names(config.mixer):
        options.setdefault("norm_eps", config.norm_eps)
    return mixer_class(config.mixer)(config.dim, **options, **where)
