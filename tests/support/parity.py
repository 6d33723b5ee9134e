"""The C++ modules beside the Python ones: pairs of them, and how two of a pair are compared. What
test_parity*.py share; who imports it is skipped where tidegate._cpp was not built."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.module_registry import REGISTRY

# Skipped where it was not built for this Python; one that is there and does not load is a failure.
if importlib.util.find_spec("tidegate._cpp") is None:
    pytest.skip("tidegate._cpp was not built for this Python", allow_module_level=True)

from tidegate import cpp

MIXERS = (
    "HGRU",
    "HGRU2",
    "GatedLinearAttention",
    "Attention",
    "ForgettingAttention",
    "GatedLinearRNN",
    "GatedRNN",
    "LRU",
    "SLRU",
    "RWKV4",
)
MODELS = ("CausalLM", "SequenceClassifier", "ImageClassifier")
CLOSE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def construct(cls: type, args: tuple, options: dict, **where: Any) -> tuple[Any, str]:
    """The module drawn from seed 0 and "", or None and the ValueError's text."""
    torch.manual_seed(0)
    try:
        return cls(*args, **options, **where), ""
    except ValueError as error:
        return None, str(error)


def pairs(name: str, **where: Any) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """Every allowed combination of an entry's options: Python's module, C++'s, what they are."""
    entry = REGISTRY[name]
    for args, options in entry.arguments:
        native, _ = construct(entry.native, args, options, **where)
        if native is not None:
            twin, message = construct(getattr(cpp, name), args, options, **where)
            assert twin is not None, message
            yield native, twin, f"{name} {args} {options}"


def shake(native: nn.Module, twin: nn.Module) -> None:
    """Gives both the same parameters, none of which has its starting value."""
    generator = torch.Generator().manual_seed(7)
    for mine, other in zip(native.parameters(), twin.parameters(), strict=True):
        noise = torch.randn(mine.shape, generator=generator, dtype=torch.float64)
        mine.data += 0.2 * noise.to(mine.device, mine.dtype)
        other.data.copy_(mine.data)


def leaves(value: Any) -> list[Tensor]:
    """The floating-point tensors in a nest of tuples."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [t for v in value for t in leaves(v)] if isinstance(value, (tuple, list)) else []


def differentiable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.is_floating_point())
    if isinstance(value, tuple):
        return tuple(differentiable(v) for v in value)
    return value


def run(module: nn.Module, inputs: list, keywords: dict) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of a fixed function of them to inputs and parameters."""
    inputs = [differentiable(v) for v in inputs]
    keywords = {k: differentiable(v) for k, v in keywords.items()}
    torch.manual_seed(5)  # of the noise that Gumbel-Gate draws
    outputs = leaves(module(*inputs, **keywords))
    if not outputs:
        return [], []
    total = sum((y * torch.linspace(-1, 1, y.numel()).to(y).view_as(y)).sum() for y in outputs)
    targets = leaves([*inputs, *keywords.values()]) + list(module.parameters())
    grads = torch.autograd.grad(total, targets, allow_unused=True)
    return outputs, [torch.zeros(()) if g is None else g for g in grads]


def assert_same(mine: list[Tensor], other: list[Tensor], what: str) -> None:
    assert len(mine) == len(other), what
    for a, b in zip(mine, other, strict=True):
        assert a.dtype == b.dtype, what
        torch.testing.assert_close(b, a, **CLOSE[a.dtype], msg=lambda m: f"{what}: {m}")


def refusal(use: Callable[[], Any]) -> str:
    """The text of the error that `use` raises: a ValueError, or, of checks that ops share with
    modules, a RuntimeError."""
    with pytest.raises(
        (ValueError, RuntimeError), match="expected|lengths|LMConfig|must"
    ) as caught:
        use()
    text = str(caught.value).splitlines()[0].replace("torch.int64", "Long")
    return re.sub(r"(\d)\.0\b", r"\1", text)  # C++ prints 1.0 as 1


def assert_identical(native: nn.Module, twin: nn.Module, what: str) -> None:
    """Names in the same order, shapes, dtypes, and values bit for bit."""
    for kind in ("named_parameters", "named_buffers"):
        mine, other = dict(getattr(native, kind)()), dict(getattr(twin, kind)())
        assert list(mine) == list(other), what
        for key, value in mine.items():
            assert value.dtype == other[key].dtype, (what, key)
            assert value.requires_grad == other[key].requires_grad, (what, key)
            assert torch.equal(value, other[key]), (what, key)
