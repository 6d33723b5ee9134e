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

import functools
import inspect
import math
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
from ..nn._common import MAX_OPTION
from ._json import fits_64_bits, shown

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
    raise ValueError(f"LMConfig: mixer: {shown(name)} is unknown; available: {', '.join(_MIXERS)}")


@functools.cache
def _option_types(name: str) -> dict[str, tuple[str, bool]]:
    """The type of each option of mixer `name`, "bool", "int", "float" or "str", and whether None
    fits, as the annotations of its class say."""
    types = {}
    for option, parameter in inspect.signature(mixer_class(name)).parameters.items():
        if option not in _NOT_OPTIONS:
            kinds = str(parameter.annotation).split(" | ")
            types[option] = (kinds[0], "None" in kinds)
    return types


def option_names(name: str) -> list[str]:
    """The options of mixer `name` that a configuration can set."""
    return list(_option_types(name))


def check_mixer_options(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for an option that the mixer's class does not have, and for a value of
    another type than the option's."""
    types = _option_types(name)
    for key, value in options.items():
        if key not in types:
            raise ValueError(
                f"LMConfig: mixer_options: mixer {name!r} has no option {shown(key)}; "
                f"it has {', '.join(types)}"
            )
        kind, can_be_none = types[key]
        if value is None and can_be_none:
            continue
        expected = type_problem(kind, value)
        if not expected and kind == "int" and value > MAX_OPTION:
            expected = f"at most {MAX_OPTION}"
        if expected:
            raise ValueError(
                f"LMConfig: mixer_options: {key}: expected {expected}; got {shown(value)}"
            )


def type_problem(kind: str, value: object) -> str:
    """What was expected, where `value` is none of `kind`: "bool", "int", "float" or "str"; else "".

    Types are those of C++ and JSON: True is no number, 1 is no switch, and integers are numbers.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if kind == "bool":
        return "" if isinstance(value, bool) else "True or False"
    if kind == "int":
        return "" if is_integer else "an integer"
    if kind == "str":
        return "" if isinstance(value, str) else "a string"
    if is_integer:
        return "" if fits_64_bits(value) else "a number of at most 64 bits"
    if not isinstance(value, float):
        return "a number"
    return "" if math.isfinite(value) else "a finite number"


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
