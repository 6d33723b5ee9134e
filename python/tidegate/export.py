"""Language models as programs that need no Python: torch.export and AOTInductor.

A :class:`~tidegate.models.CausalLM` becomes up to four programs, whose arguments and results are
tensors alone (batch size B and length T are free):

========== ============================= ======================================================
program    arguments                     results
========== ============================= ======================================================
"forward"  ids ``[B, T]``                logits ``[B, T, vocab]``
"prefill"  ids ``[B, T]``                logits ``[B, vocab]`` after the last token, the state
"extend"   ids ``[B, T]``, the state     logits ``[B, vocab]`` after the last token
"step"     ids ``[B]``, the state        logits ``[B, vocab]``
========== ============================= ======================================================

The state is the tensors that "prefill" returns, in `state_names`' order; "extend" and "step" update
them in place, so that the caller hands the same tensors in again. ids are int64. "extend" reads a
long text piece by piece; models with attention have none, and of these the state has room for
`capacity` tokens. A compiled program reads tensors as contiguous ones, whatever their strides are.

:func:`package` writes programs into one file, compiled by AOTInductor, that C++ loads with libtorch
and libtidegate (examples/cpp/serve_exported.cpp). Whatever loads or runs them must have loaded the
library: in Python by ``import tidegate``, in C++ by linking ``tidegate::tidegate``.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from .models import CausalLM
from .models.sampling import evaluating
from .nn._attention_state import GROWS, AttentionState

PROGRAMS = ("forward", "prefill", "extend", "step")
CAPACITY = 2048  # tokens that the state of attention has room for unless it is said
_EXAMPLE = (3, 5)  # a batch and a length that nothing in a model has by itself


class _Program(nn.Module):
    """A model's call with its state as a list of tensors."""

    def __init__(self, model: CausalLM, capacity: int) -> None:
        super().__init__()
        self.model = model
        self.capacity = capacity

    def _state(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The state, an entry a layer, that these are the tensors of."""
        rest, state = list(tensors), []
        for kind, count in _kinds(self.model):
            parts, rest = rest[:count], rest[count:]
            if kind is AttentionState:
                parts.append(torch.tensor([0, GROWS]))  # room, which nobody looks at here
            state.append(parts[0] if kind is Tensor else kind(*parts))
        return tuple(state)


class _Forward(_Program):
    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits


class _Prefill(_Program):
    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        logits, state = self.model.prefill(ids, capacity=self.capacity - ids.size(1))
        return logits, *_tensors(state)


class _Extend(_Program):
    def forward(self, ids: Tensor, *state: Tensor) -> Tensor:
        x, after = self.model._run(self.model._embed(ids), self._state(state), None)
        for mine, new in zip(state, _tensors(after), strict=True):
            mine.copy_(new)
        return self.model._logits(x[:, -1])


class _Step(_Program):
    def forward(self, ids: Tensor, *state: Tensor) -> Tensor:
        return self.model.step(ids, self._state(state))


_CLASSES = {"forward": _Forward, "prefill": _Prefill, "extend": _Extend, "step": _Step}


def programs(
    model: CausalLM,
    names: Sequence[str] = ("prefill", "step"),
    *,
    capacity: int = CAPACITY,
) -> dict[str, ExportedProgram]:
    """The programs called `names` (of `PROGRAMS`), exported by torch.export, for the model's device
    and dtype, in evaluation mode; without gradients: call them under ``torch.no_grad()``.

    capacity: how many tokens a sequence may have, prompt included, where a mixer keeps them; others
    take any number. Raises ValueError for an unknown name, and for "extend" of such a model.
    """
    if not isinstance(model, CausalLM):
        raise ValueError(f"export: model: expected a CausalLM; got a {type(model).__name__}")
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"export: capacity: expected a positive integer; got {capacity!r}")
    for name in names:
        if name not in PROGRAMS:
            raise ValueError(f"export: names: expected of {', '.join(PROGRAMS)}; got {name!r}")
        if name == "extend" and any(kind is AttentionState for kind, _ in _kinds(model)):
            raise ValueError(
                "export: names: expected no 'extend', since attention reads a prompt at once; "
                "got it of a model with attention"
            )
    with evaluating(model), torch.no_grad():
        return {name: _export(model, name, capacity) for name in names}


def state_names(model: CausalLM) -> list[str]:
    """What the tensors of the state are called, in their order: ``blocks.0``, or, where a layer has
    several, ``blocks.0.k``."""
    names = []
    for layer, (kind, count) in enumerate(_kinds(model)):
        fields = [""] if kind is Tensor else [f".{field}" for field in kind._fields[:count]]
        names += [f"blocks.{layer}{field}" for field in fields]
    return names


def package(
    model: CausalLM,
    path: str | os.PathLike[str],
    names: Sequence[str] = ("prefill", "step"),
    *,
    capacity: int = CAPACITY,
    options: dict[str, Any] | None = None,
) -> Path:
    """Compiles the programs for the model's device and writes them into the file `path`, which must
    end in .pt2; each is in there under its name, with its own copy of the weights.

    In C++ ``torch::inductor::AOTIModelPackageLoader(path, "step").run(tensors)`` runs one, in
    Python what load() returns. capacity: as of programs(). options: AOTInductor's. Needs g++, some
    twenty seconds a program. One for a GPU runs on that kind of GPU alone.
    """
    from torch._inductor import aot_compile
    from torch._inductor.package import package_aoti

    path = Path(path)
    if path.suffix != ".pt2":
        raise ValueError(f"export: path: expected a name that ends in .pt2; got {path}")
    files = {}
    chosen = {"aot_inductor.package": True, **(options or {})}
    libraries = chosen.get("aot_inductor.custom_op_libs") or []
    chosen["aot_inductor.custom_op_libs"] = [*libraries, _shared_libstdcxx(chosen)]
    for name, program in programs(model, names, capacity=capacity).items():
        arguments, keywords = program.example_inputs
        with torch.no_grad():
            files[name] = aot_compile(program.module(), arguments, keywords, options=chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.stem + ".part.pt2")  # the whole file or none
    package_aoti(str(part), files)
    part.replace(path)
    return path


def _shared_libstdcxx(options: dict[str, Any]) -> str:
    """What -l takes for the shared libstdc++, which torch's libraries use. It comes before what the
    compiler adds, which may be a static one: two in one process crash (TidegateTorch.cmake)."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    with config.patch(options):
        compiler = get_cpp_compiler()
    asked = [compiler, "-print-file-name=libstdc++.so.6"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return ":libstdc++.so.6" if os.path.isabs(found) and os.path.isfile(found) else "stdc++"


def load(path: str | os.PathLike[str]) -> dict[str, Callable[..., Any]]:
    """The programs of a package by their names, in Python; each takes contiguous tensors and
    returns what the table above says, in a list where it is more than one tensor."""
    from torch.export.pt2_archive._package import load_pt2

    return dict(load_pt2(str(path)).aoti_runners)


def _export(model: CausalLM, name: str, capacity: int) -> ExportedProgram:
    batch, time = _EXAMPLE
    device = model.embedding.weight.device
    of_batch = {0: Dim("batch", min=1)}
    shape = (batch,) if name == "step" else (batch, time)
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    of_ids = of_batch if name == "step" else {**of_batch, 1: _time(model, capacity)}
    shapes: dict[str, Any] = {"ids": of_ids}
    arguments: tuple[Tensor, ...] = (ids,)
    if name in ("step", "extend"):
        state = _tensors(model.init_state(batch, capacity=capacity))
        shapes["state"] = tuple(of_batch for _ in state)
        arguments += tuple(state)
    program = _CLASSES[name](model, capacity)
    return torch.export.export(program, arguments, dynamic_shapes=shapes, strict=False)


def _time(model: CausalLM, capacity: int) -> Any:
    if any(kind is AttentionState for kind, _ in _kinds(model)):
        return Dim("time", min=1, max=capacity)
    return Dim("time", min=1)


def _kinds(model: CausalLM) -> list[tuple[type, int]]:
    """Every layer's class of state, and how many tensors of it programs hand on: all but the note
    on the host of how much room attention's has."""
    kinds = []
    for block in model.blocks:
        state = block.mixer.init_state(1, capacity=1, device="meta")
        if isinstance(state, Tensor):
            kinds.append((Tensor, 1))
        else:
            kinds.append((type(state), len(state) - isinstance(state, AttentionState)))
    return kinds


def _tensors(state: Sequence[Any]) -> list[Tensor]:
    """The tensors that programs hand on."""
    tensors: list[Tensor] = []
    for entry in state:
        if isinstance(entry, Tensor):
            tensors.append(entry)
        else:
            tensors += entry[:-1] if isinstance(entry, AttentionState) else entry
    return tensors
