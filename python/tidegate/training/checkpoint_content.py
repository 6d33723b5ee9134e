"""What a checkpoint must hold, looked at before anything is built from it.

An optimiser steps over its states in one fused kernel, which takes their shapes for granted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..nn._common import dtype_name
from .masters import MasterWeights
from .muon import Combined, Muon

_COUNTS = ("step", "tokens")
_SECONDS = ("seconds", "last_eval_seconds", "last_checkpoint_seconds")


def content_problem(content: dict[str, Any]) -> str | None:
    """What is wrong with the first field, in one line that names it; None where nothing is."""
    return next(_problems(content), None)


def run_problem(content: dict[str, Any]) -> str | None:
    """content_problem() of what is no tensor."""
    return next(_run_problems(content), None)


def _run_problems(content: dict[str, Any]) -> Iterator[str]:
    position = content.get("position")
    if not isinstance(position, dict):
        yield f"position: expected a dictionary, got {_kind(position)}"
        return
    for name in _COUNTS:
        if not _is_count(position.get(name)):
            yield f"position: {name}: expected an integer >= 0, got {_kind(position.get(name))}"
    for name in _SECONDS:
        value = position.get(name, 0.0 if name != "seconds" else None)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            yield f"position: {name}: expected seconds >= 0, got {_kind(value)}"
    for name in ("samples", "metrics_size"):
        if not _is_count(content.get(name)):
            yield f"{name}: expected an integer >= 0, got {_kind(content.get(name))}"
    if not isinstance(content.get("fingerprint"), str):
        yield f"fingerprint: expected a string, got {_kind(content.get('fingerprint'))}"


def _problems(content: dict[str, Any]) -> Iterator[str]:
    for problem in _run_problems(content):
        yield problem
        if problem.startswith("position: expected"):
            return
    for name in ("model", "optimizer", "rng"):
        if not isinstance(content.get(name), dict):
            yield f"{name}: expected a dictionary, got {_kind(content.get(name))}"
            return
    for name, value in content["model"].items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            yield f"model: {name!r}: expected a tensor, got {_kind(value)}"
    if not isinstance(content["rng"].get("cpu"), Tensor):
        yield f"rng: cpu: expected a tensor, got {_kind(content['rng'].get('cpu'))}"


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _kind(value: object) -> str:
    """A value in a message: numbers as they are, of the rest the type."""
    if value is None:
        return "nothing"
    return repr(value)[:40] if type(value) in (int, float, bool) else f"a {type(value).__name__}"


def weights_problem(model: nn.Module, given: dict[str, Tensor]) -> str | None:
    """What does not fit the model, in one line that names the first such tensor; else None."""
    own = model.state_dict()
    if lacking := [name for name in own if name not in given]:
        return f"no tensor {lacking[0]!r}"
    for name, value in given.items():
        if name not in own:
            return f"tensor {name!r} has no place"
        if problem := _differs(value, own[name]):
            return f"{name!r}: {problem}"
    return None


def optimizer_states(
    optimizer: torch.optim.Optimizer | Combined | MasterWeights,
    given: dict[str, Any],
    stepped: bool,
) -> dict[str, Any]:
    """A state_dict() for `optimizer`: the given one's states under its own settings, which are
    those that the run was started with. stepped: whether it made a step, and so has states.

    Raises:
        ValueError: one line that names what is missing or does not fit.
    """
    if isinstance(optimizer, MasterWeights):
        masters = given.get("masters")
        if not isinstance(masters, list) or len(masters) != len(optimizer.masters):
            raise ValueError(f"optimizer: masters: expected {len(optimizer.masters)} tensors")
        for number, (value, wanted) in enumerate(zip(masters, optimizer.masters, strict=True)):
            if problem := _differs(value, wanted.detach()):
                raise ValueError(f"optimizer: master {number}: {problem}")
        states = optimizer_states(optimizer.optimizer, _dictionary(given, "optimizer"), stepped)
        return {"optimizer": states, "masters": masters}
    if isinstance(optimizer, Combined):
        parts = {"muon": optimizer.muon, "adamw": optimizer.adamw}
        return {
            name: optimizer_states(part, _dictionary(given, name), stepped)
            for name, part in parts.items()
        }
    own, states = optimizer.state_dict()["param_groups"], _dictionary(given, "state")
    groups = given.get("param_groups")
    numbers = [group.get("params") if isinstance(group, dict) else None for group in groups or ()]
    if numbers != [group["params"] for group in own]:
        raise ValueError("optimizer: its parameters are grouped in another way")
    if stepped and not states:
        raise ValueError("optimizer: it holds no states")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    like = {"momentum"} if isinstance(optimizer, Muon) else {"exp_avg", "exp_avg_sq"}
    for number, state in states.items():
        if type(number) is not int or not 0 <= number < len(parameters):
            raise ValueError(f"optimizer: a state of parameter {number!r}, which is not there")
        wanted = dict.fromkeys(like, parameters[number].detach())
        if not isinstance(optimizer, Muon):
            wanted["step"] = torch.zeros((), dtype=torch.float32)
        if not isinstance(state, dict) or set(state) != set(wanted):
            names = ", ".join(sorted(wanted))
            raise ValueError(f"optimizer: state {number}: expected {names}")
        for name, tensor in wanted.items():
            problem = _differs(state[name], tensor)
            if problem is None and state[name].stride() != tensor.stride():
                problem = "expected it to be laid out as the parameter is"
            if problem:
                raise ValueError(f"optimizer: state {number}: {name}: {problem}")
    return {"state": states, "param_groups": own}


def _dictionary(given: dict[str, Any], name: str) -> dict[Any, Any]:
    if not isinstance(given.get(name), dict):
        raise ValueError(f"optimizer: {name}: expected a dictionary, got {_kind(given.get(name))}")
    return given[name]


def _differs(value: object, wanted: Tensor) -> str | None:
    """How `value` is not a tensor like `wanted`; None where it is."""
    if not isinstance(value, Tensor):
        return f"expected a tensor, got {_kind(value)}"
    if value.shape != wanted.shape:
        return f"expected {list(wanted.shape)}, got {list(value.shape)}"
    if value.dtype != wanted.dtype:
        expected, given = (dtype_name(t.dtype) for t in (wanted, value))
        return f"expected {expected}, got {given}"
    return None if value.layout == wanted.layout else "expected a dense tensor"
