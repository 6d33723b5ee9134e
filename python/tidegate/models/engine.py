"""The library's decoding engine behind a Python model: which models it can run, and as what."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._library import load
from ..nn._common import Linear, is_hooked
from .config import LMConfig

load()

# A module of these types is the identity while a model generates.
_IDLE = (nn.Dropout, nn.Identity)
# What a module's __dict__ has that generation does not depend on: what nn.Module itself keeps, what
# gradients, training and parameters' first values depend on, and lists and dicts of sizes.
_IRRELEVANT = {
    *vars(nn.Module()),
    *("config", "_recompute", "residual_dtype", "padding_idx", "sparse", "scale_grad_by_freq"),
    *("gate_init", "gumbel_gate", "decay_init", "depth", "r_min", "r_max", "max_phase", "_init"),
    *("stacked_rows", "_rows", "_parts"),
}
_ABSENT = object()


@dataclass(frozen=True)
class _Blueprint:
    """What a configuration builds: by name, every module's type and the attributes that generation
    depends on, and every tensor's shape."""

    modules: dict[str, tuple[type, dict[str, Any]]]
    tensors: dict[str, torch.Size]


@dataclass
class _Made:
    """A model's engine, and what it was made of."""

    config: LMConfig
    blueprint: _Blueprint
    key: tuple[Any, ...] | None = None
    engine: Any = None


_made: weakref.WeakKeyDictionary[nn.Module, _Made] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def engine_of(model: nn.Module) -> Any | None:
    """`torch.classes.tidegate.CausalLM` over the model's own parameters, made once for as long as
    these stay where they are. None where only Python knows what the model computes: where it is no
    longer what its configuration builds (an adapter, a module or an attribute put in another's
    place, layers taken out), a hook is on it, or a tensor of another kind stands in it."""
    with _lock:
        made = _made.get(model)
        if made is None or made.config is not model.config:
            made = _made[model] = _Made(model.config, _blueprint(model))
        tensors = _tensors(model, made.blueprint)
        if tensors is None:
            return None
        key = tuple((t.data_ptr(), t.stride(), t.dtype, t.device) for t in tensors)
        if made.key != key:
            made.engine = torch.classes.tidegate.CausalLM(
                model.config.to_json(), list(made.blueprint.tensors), [t.detach() for t in tensors]
            )
            made.key = key
        follow(made.engine, model)
        return made.engine


def follow(engine: Any, model: nn.Module) -> None:
    """Gives the engine what is no parameter of the model and may change after it was made: its
    residual_dtype, which acts under autocast alone, so that no other step pays for it."""
    dtype = model.residual_dtype
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"CausalLM: residual_dtype: expected a floating-point dtype or None; got {dtype!r}"
        )
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        engine.set_residual_dtype(dtype)


def _blueprint(model: nn.Module) -> _Blueprint:
    """What the model's configuration builds, on the meta device."""
    from .causal_lm import CausalLM  # which imports this file

    built = CausalLM(model.config, device="meta")
    modules: dict[str, tuple[type, dict[str, Any]]] = {}
    shapes: dict[str, torch.Size] = {}
    for prefix, module in built.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                shapes[f"{prefix}.{name}" if prefix else name] = tensor.shape
        if not isinstance(module, _IDLE):
            attributes = {k: v for k, v in vars(module).items() if k not in _IRRELEVANT}
            modules[prefix] = (type(module), attributes)
    return _Blueprint(modules, shapes)


def _tensors(model: nn.Module, blueprint: _Blueprint) -> list[Tensor] | None:
    """The model's parameters and buffers in the blueprint's order; None where the model is not what
    that says."""
    if torch.nn.modules.module._has_any_global_hook():
        return None
    values: list[Tensor] = []
    shapes: list[tuple[str, torch.Size]] = []
    count = 0
    for prefix, module in model.named_modules():
        if is_hooked(module):
            return None
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference()
            if not is_plain or tensor.layout != torch.strided:
                return None
            shapes.append((f"{prefix}.{name}" if prefix else name, tensor.shape))
            values.append(tensor)
        if type(module) not in _IDLE:
            if not _is_as_built(module, blueprint.modules.get(prefix)):
                return None
            count += 1
    if count != len(blueprint.modules) or shapes != list(blueprint.tensors.items()):
        return None
    devices = {t.device for t in values}
    if len(devices) != 1 or devices.pop().type not in ("cpu", "cuda"):
        return None
    return values


def _is_as_built(module: nn.Module, expected: tuple[type, dict[str, Any]] | None) -> bool:
    """Whether the module has the type and attributes that it was built with, and no method of its
    own."""
    if expected is None:
        return False
    built, attributes = expected
    if type(module) is not built and (type(module), built) != (nn.Linear, Linear):
        return False
    given = vars(module)
    for name, value in attributes.items():
        other = given.get(name, _ABSENT)
        if other is not value and (type(other) is not type(value) or other != value):
            return False
    return not any(
        name not in attributes and name not in _IRRELEVANT and hasattr(type(module), name)
        for name in given
    )
