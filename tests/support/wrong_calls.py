"""Random wrong calls of ops and modules, and what must come of them.

A call that works is changed in one or two arguments: another type, dtype, shape, stride, device,
number or word. It must end in one of two ways: an error of one of a few types whose message names
the op or the module, or results that are those of the same call on contiguous copies and, where
`tidegate.reference` has the op, what that computes. Never with a crash, another kind of error, or
other numbers.
"""

from __future__ import annotations

import importlib.util
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.op_arguments import arguments, said_name

ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)
# Options of the ops, each with values that it takes.
OPTIONS: dict[str, tuple[object, ...]] = {
    "reverse": (True, False),
    "activation": ("silu", "none"),
    "q_activation": ("silu", "none", "sigmoid"),
    "v_activation": ("silu", "none", "sigmoid"),
    "scale": (0.5, 2),
    "window": (1, 3, None),
    "prune": (1e-6, None),
    "return_lse": (True, False),
    "inverse": (True, False),
    "kind": ("rms", "layer", "rms_no_weight"),
    "eps": (1e-5, 1e-3),
    "label_smoothing": (0.1, 0.0),
    "z_loss": (1e-4, 0.0),
    "ignore_index": (-100, 0),
    "reduction": ("mean", "sum", "none"),
}
NOT_VALUES = (None, True, -1, 0, 2**70, math.nan, math.inf, -0.5, "x", "", b"silu", [], {}, 1.5)
# torch's own words for tensors on different devices, which name both.
_WELL_SAID = re.compile("on the expected device|on the same device|different device")
MIXERS = (
    ("hgrn", {}),
    ("hgrn", {"complex": False}),
    ("hgrn2", {"num_heads": 2}),
    ("gla", {"num_heads": 2}),
    ("lru", {}),
    ("slru", {}),
    ("rwkv4", {"time_shift": True}),
    ("gated-rnn", {}),
    ("gated-linear-rnn", {}),
    ("fox", {"num_heads": 2}),
    ("fox-pro", {"num_heads": 2, "window": 3}),
    ("transformer", {"num_heads": 2}),
    ("transformer-pro", {"num_heads": 2}),
)


@dataclass
class Call:
    """A call by name and keyword arguments; `names`: any of them must be in an error's message."""

    function: Callable[..., Any]
    given: dict[str, Any]
    names: tuple[str, ...]
    is_op: bool = False
    is_typed: bool = False  # C++: a tensor stands where a tensor belongs, and a number is one
    reference: Callable[..., Any] | None = None


def random_call(draw: random.Random) -> Call:
    """A call that works."""
    torch.manual_seed(draw.getrandbits(30))
    return _module_call(draw) if draw.random() < 0.4 else _op_call(draw)


def _op_call(draw: random.Random) -> Call:
    import inspect

    import tidegate

    name, given = draw.choice(sorted(arguments().items()))
    function = getattr(tidegate.ops, name)
    given = {key: value for key, value in given.items() if value is not None}
    if name == "lru_scan" or name == "lru_scan_step":
        given["theta_log"] = None
    for option in inspect.signature(function).parameters:
        if option in OPTIONS and draw.random() < 0.4:
            given[option] = draw.choice(OPTIONS[option])
    reference = getattr(tidegate.reference, name, None)
    names = (f"{name}:", f"{said_name(name)}:", f"tidegate::{name}", f"{name}()")
    return Call(function, given, names, is_op=True, reference=reference)


def _module_call(draw: random.Random) -> Call:
    from tidegate.models import LMConfig

    mixer, options = draw.choice(MIXERS)
    config = LMConfig(mixer, dim=16, layers=1, vocab_size=11, mixer_options=options)
    is_typed = draw.random() < 0.3
    model, module = _twins(config) if is_typed else _models(config)
    ways = {
        "forward": (module, {"x": torch.randn(2, 5, 16)}),
        "from a state": (module, {"x": torch.randn(2, 5, 16), "state": module.init_state(2)}),
        "packed": (module, {"x": torch.randn(1, 5, 16), "cu_seqlens": torch.tensor([0, 2, 2, 5])}),
        "step": (module.step, {"x": torch.randn(2, 16), "state": module.init_state(2)}),
        "bounded": (module, {"x": torch.randn(2, 5, 16), "gamma": torch.rand(16)}),
        "model": (model, {"ids": torch.randint(11, (2, 5)), "labels": "next"}),
        "generate": (
            lambda **given: model.generate(**given, temperature=0.0),
            {"ids": torch.randint(11, (2, 5)), "max_new_tokens": 3},
        ),
    }
    if not module.takes_gamma:
        del ways["bounded"]
    function, given = ways[draw.choice(sorted(ways))]
    # A module leaves what only its op looks at to the op.
    inner = ("hgrn2_qfv", "linear", "glu_linear", "norm_linear")  # of modules
    ops = tuple(f"{name}:" for name in (*arguments(), *inner))
    names = (type(module).__name__, "CausalLM", *ops)
    return Call(function, given, names, is_typed=is_typed)


def _models(config: Any) -> tuple[Any, Any]:
    """A model and its mixer that require no gradients."""
    from tidegate.models import CausalLM

    model = CausalLM(config).requires_grad_(False)
    return model, model.blocks[0].mixer


def _twins(config: Any) -> tuple[Any, Any]:
    """The C++ ones, where they were built for this Python."""
    if importlib.util.find_spec("tidegate._cpp") is None:
        return _models(config)
    from tidegate import cpp

    native = _models(config)[1]
    options = {**config.mixer_options, **({"preset": "pro"} if "-pro" in config.mixer else {})}
    mixer = getattr(cpp, type(native).__name__)(config.dim, **options)
    return cpp.CausalLM(config).requires_grad_(False), mixer.requires_grad_(False)


def spoiled(
    value: Any, draw: random.Random, *, is_state: bool = False, is_typed: bool = False
) -> Any:
    """The value as somebody might give it who has it wrong; not what a state counts, which only
    its module writes."""
    if not isinstance(value, Tensor):
        if isinstance(value, tuple) and (is_typed or draw.random() < 0.8):  # several tensors
            parts = list(value)
            place = draw.randrange(len(parts))
            parts[place] = spoiled(parts[place], draw, is_state=True, is_typed=is_typed)
            return tuple(parts)
        if is_typed:
            return value
        return draw.choice(NOT_VALUES)
    ways = (_other_dtype, _other_shape, _other_layout, _other_values)
    ways = ways if is_typed else (_other_type, *ways)
    way = draw.choice(ways)
    if is_state and way is _other_values and not value.is_floating_point():
        way = _other_shape
    return way(value, draw)


def _other_type(t: Tensor, draw: random.Random) -> Any:
    made = (None, t.tolist(), np.zeros(tuple(t.shape), np.float32), 1.0, "x", (t,), t.to("meta"))
    return draw.choice(made)


def _other_dtype(t: Tensor, draw: random.Random) -> Tensor:
    return t.to(draw.choice(DTYPES))


def _other_shape(t: Tensor, draw: random.Random) -> Tensor:
    if t.dim() == 0:
        return t[None]
    axis = draw.randrange(t.dim())
    way = draw.choice(("more", "less", "none", "drop", "add", "swap"))
    if way == "more":
        return torch.cat([t, t.narrow(axis, 0, min(1, t.size(axis)))], axis)
    if way == "less":
        return t.narrow(axis, 0, max(t.size(axis) - 1, 0))
    if way == "none":
        return t.narrow(axis, 0, 0)
    if way == "drop":
        return t.select(axis, 0) if t.size(axis) else t.flatten()
    if way == "add":
        return t.unsqueeze(axis)
    return t.transpose(axis, draw.randrange(t.dim()))


def _other_layout(t: Tensor, draw: random.Random) -> Tensor:
    """Strides that an op must either read or refuse by name; mostly the same values."""
    way = draw.choice(("expanded", "sliced", "transposed", "misaligned", "negative"))
    if t.dim() == 0 or t.numel() == 0:
        return t
    if way == "expanded":
        return t.narrow(0, 0, 1).expand_as(t)
    if way == "sliced":
        return t.repeat_interleave(2, -1)[..., ::2]
    if way == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if way == "misaligned":
        wide = torch.cat([t[..., :1], t], -1)
        return wide[..., 1:]
    return torch._neg_view(t) if t.is_floating_point() or t.is_complex() else t


def _other_values(t: Tensor, draw: random.Random) -> Tensor:
    """Values that are refused: integers out of range, numbers that are not finite, or large."""
    if t.dtype in (torch.int32, torch.int64):
        return t + draw.choice((-1000, -1, 1, 1000))
    if not t.is_floating_point():
        return t
    return t.clone().fill_(draw.choice((0.0, 1e30, -1e30, math.nan, math.inf)))


def check(seed: int) -> str | None:
    """What is wrong with the call of this seed; None where it ends well."""
    draw = random.Random(seed)
    call = random_call(draw)
    given = dict(call.given)
    changed = draw.sample(sorted(given), min(len(given), draw.choice((1, 1, 1, 2))))
    for name in changed:
        given[name] = spoiled(given[name], draw, is_typed=call.is_typed)
    if given.get("max_new_tokens") == 2**70:  # which would be written, one after the other
        given["max_new_tokens"] = -(2**70)
    if draw.random() < 0.03:
        given[draw.choice(("x", "gama", "reversed", "mask"))] = None
    said = f"{call.names[0]} {', '.join(f'{k}={_shown(v)}' for k, v in given.items())}"
    before = _copied(given)
    same = _contiguous(given)
    with torch.set_grad_enabled(draw.random() < 0.3):
        try:
            found = call.function(**given)
        except ERRORS as error:
            text = str(error)
            named = any(name in text for name in call.names) or _WELL_SAID.search(text)
            # Python itself names the function of an argument that it does not have.
            if named or (isinstance(error, TypeError) and "argument" in text):
                return None
            return f"{said}: names no op: {type(error).__name__}: {text[:300]}"
        except Exception as error:
            return f"{said}: {type(error).__name__}: {str(error)[:300]}"
        # A matrix product rounds by the strides of what it multiplies; other ops do not.
        has_products = not call.is_op or call.names[0] == "linear_cross_entropy:"
        bound = _rounding(same, 1e-4) if has_products else 0.0
        if problem := _differs(found, call.function(**same), bound):
            return f"{said}: other than on contiguous copies: {problem}"
        if call.reference is not None and not _is_wild(before):
            return _against_reference(call, before, found, said)
    return None


def _against_reference(call: Call, given: dict[str, Any], found: Any, said: str) -> str | None:
    wide = any(isinstance(v, Tensor) and v.dtype == torch.float64 for v in given.values())
    tensors = [v for v in given.values() if isinstance(v, Tensor)]
    if any(t.is_meta for t in tensors):
        return None
    try:
        expected = call.reference(**_contiguous(given))
    except OverflowError:  # an integer that only Python has: as a number it is another
        return None
    except Exception as error:
        return f"{said}: taken, but the reference says {type(error).__name__}: {str(error)[:200]}"
    bound = _rounding(given, 1e-9 if wide else 2e-4)
    if call.names[0] == "wkv4:":  # whose states may have other scaling exponents
        found, expected = found[:1], expected[:1]
    if problem := _differs(found, expected, bound):
        return f"{said}: other than the reference: {problem}"
    return None


def _rounding(given: dict[str, Any], least: float) -> float:
    """How far apart results of the same mathematics may be."""
    small = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
    return max([small.get(v.dtype, 0.0) for v in given.values() if isinstance(v, Tensor)] + [least])


def _is_wild(given: dict[str, Any]) -> bool:
    """Whether numbers are so large, or none, that the reference rounds otherwise."""
    return any(
        isinstance(v, Tensor)
        and (v.is_floating_point() or v.is_complex())
        and not v.is_meta
        and v.numel()
        and not bool(v.abs().max() < 1e4)
        for v in given.values()
    )


def _differs(found: Any, expected: Any, bound: float = 0.0) -> str | None:
    if isinstance(found, (tuple, list)):
        pairs = zip(found, expected, strict=True)
        return next((p for a, b in pairs if (p := _differs(a, b, bound)) is not None), None)
    if not isinstance(found, Tensor):
        return None if found == expected else f"{found} and {expected}"
    if found.shape != expected.shape:
        return f"shapes {tuple(found.shape)} and {tuple(expected.shape)}"
    if found.is_meta or found.numel() == 0:
        return None
    a, b = (t.detach().resolve_neg().resolve_conj() for t in (found, expected))
    if bound == 0.0:
        return None if torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) else "other bits"
    a, b = a.to(torch.complex128), b.to(torch.complex128)
    if not torch.equal(a.real.isfinite(), b.real.isfinite()):
        return "not finite in other places"
    a, b = (torch.where(b.real.isfinite(), t, 0.0) for t in (a, b))
    error, size = float((a - b).abs().max()), float(b.abs().max())
    return None if error <= bound * max(size, 1.0) else f"wrong by {error:.3e} of {size:.3e}"


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return (
            type(value)(*(_map(v, change) for v in value))
            if hasattr(value, "_fields")
            else tuple(_map(v, change) for v in value)
        )
    return value


def _copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: _map(value, lambda t: t.clone()) for name, value in given.items()}


def _contiguous(given: dict[str, Any]) -> dict[str, Any]:
    def plain(t: Tensor) -> Tensor:
        return t.resolve_neg().resolve_conj().clone(memory_format=torch.contiguous_format)

    return {name: _map(value, plain) for name, value in given.items()}


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)} strides {list(value.stride())} on {value.device}"
    if isinstance(value, (list, tuple, np.ndarray)):
        return f"{type(value).__name__}({', '.join(map(_shown, list(value)[:8]))})"[:200]
    return repr(value)[:40]
