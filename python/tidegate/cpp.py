"""The C++ modules of libtidegate (``tidegate::nn``, ``tidegate::models``) as torch.nn.Modules.

The classes have the names, arguments, parameter names and results of those in `tidegate.nn` and
`tidegate.models`; every call runs in C++. They are there for programs whose models live in C++, and
for testing the two against each other. In Python, train with the native classes: torch.compile,
FSDP, hooks on children and subclassing work on those only.

To Python a C++ module is a leaf: `named_parameters()` and `state_dict()` give the dotted names of
its children's parameters, but there are no child modules to visit. state_dict, load_state_dict,
deepcopy, pickle, ``.to(...)`` and its kin work.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

try:
    from tidegate import _cpp
except ImportError as error:
    raise ImportError(
        "tidegate.cpp: the pybind11 module tidegate._cpp is not there, or not for this Python "
        f"({error}). It is built where Python.h is found (Debian: python3-dev) for the one Python "
        "that built it; tidegate.nn and tidegate.models do not need it."
    ) from error

from .models import LMConfig, Output
from .models.block import RECOMPUTE
from .nn._common import check_choice

__all__ = [
    "GLU",
    "GatedLinearRNN",
    "GatedRNN",
    "HGRU",
    "HGRU2",
    "LRU",
    "RWKV4",
    "SLRU",
    "Attention",
    "Block",
    "CausalLM",
    "ForgettingAttention",
    "GatedLinearAttention",
    "ImageClassifier",
    "LowerBounds",
    "SequenceClassifier",
    "load_safetensors",
    "mixers",
    "presets",
    "save_safetensors",
]


class _Tensors:
    """A live view of a C++ module's parameters or buffers, children's included: name -> tensor."""

    def __init__(self, named: Any) -> None:
        self._named = named

    def _dict(self) -> dict[str, Tensor]:
        return dict(self._named(True).items())

    def items(self):
        return self._dict().items()

    def keys(self):
        return self._dict().keys()

    def values(self):
        return self._dict().values()

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:
        return self._dict().get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._dict())

    def __len__(self) -> int:
        return len(self._dict())

    def __contains__(self, name: object) -> bool:
        return name in self._dict()

    def __getitem__(self, name: str) -> Tensor:
        return self._dict()[name]


class CppModule(nn.Module):
    """Base of the classes below: a torch.nn.Module whose parameters, buffers, mode and forward are
    those of a C++ module, `cpp_module`."""

    _native: Any = None  # the pybind11 class

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device(kwargs["device"])
        self._attach(self._construct(*args, **kwargs), args, kwargs)

    @classmethod
    def _construct(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._native(*args, **kwargs)

    def _attach(self, cpp_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes hold of a C++ module that was, or could have been, constructed from these."""
        object.__setattr__(self, "cpp_module", cpp_module)  # before nn.Module sets the mode
        super().__init__()
        self._arguments = (args, kwargs)
        self.__dict__["_parameters"] = _Tensors(cpp_module.named_parameters)
        self.__dict__["_buffers"] = _Tensors(cpp_module.named_buffers)

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self.cpp_module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.cpp_module.train(mode)

    def reset_parameters(self) -> None:
        """Draws every parameter anew; the order is that of the Python class."""
        self.cpp_module.reset_parameters()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the Python class of this name."""
        return self.cpp_module.forward(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> CppModule:
        """Does torch.nn.Module.to; parameters that stay fp32 in a half module stay so here, too."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and dtype is not None:
            self.cpp_module.to(device=device, dtype=dtype, non_blocking=non_blocking)
        elif device is not None or dtype is not None:
            self.cpp_module.to(dtype if device is None else device, non_blocking)
        return self

    def float(self) -> CppModule:
        return self.to(torch.float32)

    def double(self) -> CppModule:
        return self.to(torch.float64)

    def half(self) -> CppModule:
        return self.to(torch.float16)

    def bfloat16(self) -> CppModule:
        return self.to(torch.bfloat16)

    def cpu(self) -> CppModule:
        return self.to(torch.device("cpu"))

    def cuda(self, device: int | torch.device | None = None) -> CppModule:
        return self.to(torch.device("cuda") if device is None else torch.device("cuda", device))

    def _apply(self, fn: Any, recurse: bool = True) -> CppModule:
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data = fn(tensor.data)
            if tensor.grad is not None:
                tensor.grad.data = fn(tensor.grad.data)
        return self

    def _own_tensors(self) -> dict[str, Tensor]:
        return {**self._parameters._dict(), **self._buffers._dict()}

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        own = self._own_tensors()
        for name, tensor in own.items():
            given = state_dict.get(prefix + name)
            if given is None:
                missing_keys.append(prefix + name)
            elif given.shape != tensor.shape:
                error_msgs.append(
                    f"size mismatch for {prefix + name}: expected {tuple(tensor.shape)}; "
                    f"got {tuple(given.shape)}"
                )
            else:
                with torch.no_grad():
                    tensor.copy_(given)
        if strict:
            names = (key for key in state_dict if key.startswith(prefix))
            unexpected_keys.extend(key for key in names if key[len(prefix) :] not in own)

    def __deepcopy__(self, memo: dict[int, Any]) -> CppModule:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new._attach(self.cpp_module.clone(), *self._arguments)
        self._copy_flags(new)
        return new

    def _copy_flags(self, new: CppModule) -> None:
        new.train(self.training)
        for mine, other in zip(self.parameters(), new.parameters(), strict=True):
            other.requires_grad_(mine.requires_grad)

    def __reduce__(self) -> tuple[Any, ...]:
        flags = {name: p.requires_grad for name, p in self.named_parameters()}
        tensors = OrderedDict((name, t.detach()) for name, t in self._own_tensors().items())
        settings = self._settings()
        return _rebuild, (type(self), *self._arguments, tensors, flags, self.training, settings)

    def _settings(self) -> dict[str, Any]:
        """The attributes that may be set after construction and that pickling keeps, by name."""
        return {}

    def extra_repr(self) -> str:
        args, kwargs = self._arguments
        options = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
        return ", ".join(options)


def _rebuild(
    cls: type[CppModule],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: dict[str, Tensor],
    flags: dict[str, bool],
    training: bool,
    settings: dict[str, Any],
) -> CppModule:
    """Unpickles a module: the numbers that its constructor draws leave the generator as it was."""
    with torch.random.fork_rng(devices=[]):
        module = cls(*args, **kwargs)
    for name, tensor in module._own_tensors().items():
        tensor.data = tensors[name]
        tensor.requires_grad_(flags.get(name, False))
    for name, value in settings.items():
        setattr(module, name, value)
    return module.train(training)


def _to_cpp(state: Any) -> list[Tensor]:
    """A mixer's state as C++ holds it: its tensors; none for None."""
    if state is None:
        return []
    return [state] if isinstance(state, Tensor) else list(state)


def _to_python(state: list[Tensor]) -> Any:
    """The reverse of _to_cpp(): None, a tensor, or a tuple of tensors."""
    if len(state) < 2:
        return state[0] if state else None
    return tuple(state)


def _all_to_python(state: list[list[Tensor]]) -> tuple[Any, ...]:
    """What the function above does, for one state a layer."""
    return tuple(_to_python(s) for s in state)


class GLU(CppModule):
    """tidegate::nn::GLU; see `tidegate.nn.GLU`."""

    _native = _cpp.GLU


class LowerBounds(CppModule):
    """tidegate::nn::LowerBounds; see `tidegate.nn.LowerBounds`."""

    _native = _cpp.LowerBounds


class _Mixer(CppModule):
    """A token mixer; its state is a tensor, or a tuple of tensors."""

    @property
    def takes_gamma(self) -> bool:
        """Whether the forget gate has a lower bound."""
        return self.cpp_module.takes_gamma

    def init_state(self, batch: int, *, device=None, dtype=None, capacity=None) -> Any:
        """The empty state of `batch` sequences."""
        device = None if device is None else torch.device(device)
        return self.cpp_module.init_state(batch, device=device, dtype=dtype, capacity=capacity)

    def step(self, x: Tensor, state: Any, gamma: Tensor | None = None) -> Tensor:
        """One token; `state` is updated in place."""
        return self.cpp_module.step(x, state, gamma)


class _TupleStateMixer(_Mixer):
    """A token mixer whose state C++ holds as a list of tensors."""

    def init_state(self, batch: int, **keywords: Any) -> Any:
        return _to_python(super().init_state(batch, **keywords))

    def forward(self, x: Tensor, state: Any = None, **keywords: Any) -> tuple[Tensor, Any]:
        """See the Python class of this name."""
        y, state = self.cpp_module.forward(x, _to_cpp(state), **keywords)
        return y, _to_python(state)

    def step(self, x: Tensor, state: Any, gamma: Tensor | None = None) -> Tensor:
        return super().step(x, _to_cpp(state), gamma)


class GatedLinearRNN(_Mixer):
    """tidegate::nn::GatedLinearRNN; see `tidegate.nn.GatedLinearRNN`."""

    _native = _cpp.GatedLinearRNN


class GatedRNN(_Mixer):
    """tidegate::nn::GatedRNN; see `tidegate.nn.GatedRNN`."""

    _native = _cpp.GatedRNN


class RWKV4(_Mixer):
    """tidegate::nn::RWKV4; see `tidegate.nn.RWKV4`."""

    _native = _cpp.RWKV4


class HGRU(_Mixer):
    """tidegate::nn::HGRU; see `tidegate.nn.HGRU`."""

    _native = _cpp.HGRU

    @property
    def channels(self) -> int:
        """expand * dim."""
        return self.cpp_module.channels

    @property
    def state_size(self) -> int:
        """Width of the state, channels or twice that when complex."""
        return self.cpp_module.state_size


class HGRU2(_Mixer):
    """tidegate::nn::HGRU2; see `tidegate.nn.HGRU2`."""

    _native = _cpp.HGRU2


class LRU(_Mixer):
    """tidegate::nn::LRU; see `tidegate.nn.LRU`."""

    _native = _cpp.LRU


class SLRU(_Mixer):
    """tidegate::nn::SLRU; see `tidegate.nn.SLRU`."""

    _native = _cpp.SLRU


class Attention(_TupleStateMixer):
    """tidegate::nn::Attention; see `tidegate.nn.Attention`."""

    _native = _cpp.Attention


class ForgettingAttention(_TupleStateMixer):
    """tidegate::nn::ForgettingAttention; see `tidegate.nn.ForgettingAttention`."""

    _native = _cpp.ForgettingAttention


class GatedLinearAttention(_TupleStateMixer):
    """tidegate::nn::GatedLinearAttention; see `tidegate.nn.GatedLinearAttention`."""

    _native = _cpp.GatedLinearAttention


class _Configured(CppModule):
    """A module made from an LMConfig."""

    def __init__(self, config: LMConfig, *, device=None, dtype=None) -> None:
        super().__init__(config, device=device, dtype=dtype)

    @classmethod
    def _construct(cls, config: LMConfig, **where: Any) -> Any:
        return cls._native(config.to_json(), **where)

    def _attach(self, cpp_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._attach(cpp_module, args, kwargs)
        self.config = LMConfig.from_json(cpp_module.config_json())


class Block(_Configured):
    """tidegate::models::Block; see `tidegate.models.Block`."""

    _native = _cpp.Block

    def forward(self, x: Tensor, state: Any = None, **keywords: Any) -> tuple[Tensor, Any]:
        """x ``[B, T, dim]`` -> the same, and the mixer's state."""
        y, state = self.cpp_module.forward(x, _to_cpp(state), **keywords)
        return y, _to_python(state)

    def step(self, x: Tensor, state: Any, gamma: Tensor | None = None) -> Tensor:
        """One token; the mixer's state is updated in place."""
        return self.cpp_module.step(x, _to_cpp(state), gamma)


class _Model(_Configured):
    """What the models add: Output tuples, files, how they train."""

    @property
    def recompute(self) -> str:
        """What the backward pass computes again: "none", "norms" or "blocks"."""
        return self.cpp_module.recompute

    @recompute.setter
    def recompute(self, value: str) -> None:
        check_choice(type(self).__name__, "recompute", value, RECOMPUTE)
        self.cpp_module.recompute = value

    @property
    def residual_dtype(self) -> torch.dtype | None:
        """The dtype of the residual stream inside autocast; None is that of the embedding."""
        return self.cpp_module.residual_dtype

    @residual_dtype.setter
    def residual_dtype(self, value: torch.dtype | None) -> None:
        self.cpp_module.residual_dtype = value

    def _settings(self) -> dict[str, Any]:
        return {"recompute": self.recompute, "residual_dtype": self.residual_dtype}

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        """See the Python class of this name."""
        if kwargs.get("state") is not None:
            kwargs["state"] = [_to_cpp(s) for s in kwargs["state"]]
        logits, loss, state = self.cpp_module.forward(*args, **kwargs)
        return Output(logits, loss, _all_to_python(state) if state else None)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors into `directory`."""
        self.cpp_module.save(os.fspath(directory))

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, device: Any = None) -> Any:
        """The model that C++ or Python saved in `directory`, in evaluation mode."""
        device = torch.device("cpu" if device is None else device)
        cpp_module = cls._native._load(os.fspath(directory), device)
        model = cls.__new__(cls)
        model._attach(cpp_module, (LMConfig.from_json(cpp_module.config_json()),), {})
        return model.eval()


class CausalLM(_Model):
    """tidegate::models::CausalLM; see `tidegate.models.CausalLM`."""

    _native = _cpp.CausalLM

    def logits_at(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits at some positions only."""
        return self.cpp_module.logits_at(ids, positions)

    def init_state(self, batch: int, *, capacity: int | None = None) -> tuple[Any, ...]:
        """The empty state of `batch` sequences, one entry a layer."""
        return _all_to_python(self.cpp_module.init_state(batch, capacity=capacity))

    def step(self, ids: Tensor, state: Sequence[Any]) -> Tensor:
        """One token a sequence; the state is updated in place."""
        return self.cpp_module.step(ids, [_to_cpp(s) for s in state])

    def prefill(
        self, ids: Tensor, lengths: Tensor | None = None, *, capacity: int = 0
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Logits after each prompt's last token, and the state."""
        logits, state = self.cpp_module.prefill(ids, lengths, capacity=capacity)
        return logits, _all_to_python(state)

    def generate(self, ids: Tensor, max_new_tokens: int, *args: Any, **kwargs: Any) -> Tensor:
        """Continues the prompts; the arguments are those of `tidegate.models.CausalLM`."""
        return self.cpp_module.generate(ids, max_new_tokens, *args, **kwargs)


class SequenceClassifier(_Model):
    """tidegate::models::SequenceClassifier; see `tidegate.models.SequenceClassifier`."""

    _native = _cpp.SequenceClassifier


class ImageClassifier(_Model):
    """tidegate::models::ImageClassifier; see `tidegate.models.ImageClassifier`."""

    _native = _cpp.ImageClassifier


def mixers() -> list[str]:
    """Names of the mixers that C++ models can be made of."""
    return _cpp.mixers()


def presets() -> dict[str, LMConfig]:
    """The configurations that C++ knows; the same as `tidegate.models.presets`."""
    return {name: LMConfig.from_json(text) for name, text in _cpp.presets().items()}


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, read by the C++ reader; RuntimeError for a broken one."""
    return _cpp.load_safetensors(os.fspath(path))


def save_safetensors(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file by the C++ writer, atomically."""
    _cpp.save_safetensors(dict(tensors), os.fspath(path), dict(metadata or {}))
