"""The library's decoding engine behind a Python model: which models it can run, and as what."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .._library import load

load()

# By model: what its engine was made of, and the engine.
_engines: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Any]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()
_OURS = ("tidegate.nn.", "tidegate.models.", "torch.nn.modules.")


def engine_of(model: nn.Module) -> Any | None:
    """`torch.classes.tidegate.CausalLM` over the model's own parameters, made once for as long as
    these stay where they are. None where only Python knows what the model computes: an adapter, a
    hook, another class or a tensor of another kind stands in it."""
    tensors = _tensors(model)
    if tensors is None:
        return None
    names, values = tensors
    key = tuple((t.data_ptr(), t.dtype, t.device) for t in values)
    with _lock:
        made = _engines.get(model)
        if made is not None and made[0] == key:
            return made[1]
        engine = torch.classes.tidegate.CausalLM(
            model.config.to_json(), names, [t.detach() for t in values]
        )
        _engines[model] = (key, engine)
        return engine


def _tensors(model: nn.Module) -> tuple[list[str], list[Tensor]] | None:
    """Names and tensors of the parameters and buffers; None where the engine cannot stand for the
    model."""
    if torch.nn.modules.module._has_any_global_hook():
        return None
    names: list[str] = []
    values: list[Tensor] = []
    for prefix, module in model.named_modules():
        is_ours = type(module).__module__.startswith(_OURS)
        if not is_ours or _is_hooked(module):
            return None
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference()
            if not is_plain or tensor.layout != torch.strided:
                return None
            names.append(f"{prefix}.{name}" if prefix else name)
            values.append(tensor)
    devices = {t.device for t in values}
    if len(devices) != 1 or devices.pop().type not in ("cpu", "cuda"):
        return None
    return names, values


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
