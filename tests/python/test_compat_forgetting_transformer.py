"""tidegate.compat.forgetting_transformer: the release's signature, conventions and definition."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from support import compat_oracle as naive
from torch import Tensor

from tidegate.compat.forgetting_transformer import forgetting_attention

# The signature in src/forgetting_transformer/ops/forgetting_attention.py, version 0.0.1.
RELEASED = [
    ("q", "POSITIONAL_OR_KEYWORD", None),
    ("k", "POSITIONAL_OR_KEYWORD", None),
    ("v", "POSITIONAL_OR_KEYWORD", None),
    ("log_fgate", "POSITIONAL_OR_KEYWORD", None),
    ("head_first", "KEYWORD_ONLY", False),
    ("seq_start", "KEYWORD_ONLY", None),
    ("sm_scale", "KEYWORD_ONLY", None),
    ("adaptive_threshold", "KEYWORD_ONLY", None),
]


def test_signature_is_the_released_one() -> None:
    parameters = inspect.signature(forgetting_attention).parameters.values()
    mine = [(p.name, p.kind.name, None if p.default is p.empty else p.default) for p in parameters]
    assert mine == RELEASED


def inputs(batch: int, queries: int, keys: int, dtype=torch.float64) -> dict[str, Tensor]:
    heads, dim = 2, 8
    found = {
        "q": torch.randn(batch, queries, heads, dim),
        "k": torch.randn(batch, keys, heads, dim),
        "v": torch.randn(batch, keys, heads, dim),
        "log_fgate": F.logsigmoid(3 * torch.randn(batch, keys, heads)),
    }
    return {name: t.to(dtype).requires_grad_() for name, t in found.items()}


def exact(q, k, v, log_fgate, scale=None, start=None) -> Tensor:
    return naive.forgetting(q, k, v, log_fgate, scale, start=start)


def compare(mine: Tensor, reference: Tensor, given: dict[str, Tensor], atol: float) -> None:
    assert mine.shape == reference.shape
    torch.testing.assert_close(mine.double(), reference, rtol=1e-9, atol=atol)
    weight = torch.randn(reference.shape, dtype=torch.float64)
    grads = [
        torch.autograd.grad((out.double() * weight).sum(), list(given.values()))
        for out in (mine, reference)
    ]
    for name, a, b in zip(given, *grads, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=10 * atol, msg=lambda m, n=name: f"{n} {m}"
        )


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("queries", [1, 6, 11])
@pytest.mark.parametrize("padded", [False, True])
def test_definition(queries: int, scale: float | None, head_first: bool, padded: bool) -> None:
    torch.manual_seed(0)
    given = inputs(3, queries, 11)
    start = torch.tensor([0, 4, 9]) if padded else None  # of the last, some queries see no key
    turn = (lambda t: t.transpose(1, 2)) if head_first else (lambda t: t)
    mine = forgetting_attention(
        *(turn(t) for t in given.values()),
        head_first=head_first,
        sm_scale=scale,
        seq_start=start,
    )
    compare(turn(mine), exact(**given, scale=scale, start=start), given, 1e-10)


def test_what_precedes_the_start_counts_for_nothing() -> None:
    torch.manual_seed(1)
    given = {name: t.detach() for name, t in inputs(2, 7, 7).items()}
    start = torch.tensor([3, 5])
    o = forgetting_attention(**given, seq_start=start)
    for row, first in enumerate(start.tolist()):
        assert (o[row, :first] == 0).all()
        alone = forgetting_attention(*(t[row : row + 1, first:] for t in given.values()))
        torch.testing.assert_close(o[row : row + 1, first:], alone)
        for t in given.values():
            t[row, :first] = 1e4  # as large as fp16 has it, nearly
    given["log_fgate"].clamp_(max=0)
    torch.testing.assert_close(forgetting_attention(**given, seq_start=start), o)


@pytest.mark.parametrize("threshold", ["auto", -10.0, torch.tensor([-1000.0, -100.0])])
@pytest.mark.parametrize("padded", [False, True])
def test_pruning_stays_within_its_bound(threshold, padded: bool) -> None:
    torch.manual_seed(2)
    given = {name: t.detach() for name, t in inputs(2, 300, 300).items()}
    start = torch.tensor([0, 100]) if padded else None
    o = forgetting_attention(**given, seq_start=start, adaptive_threshold=threshold)
    largest = 2 * math.exp(-10) * given["v"].abs().max()
    assert (o - exact(**given, start=start)).abs().max() <= largest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_beside_float32_gates(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    given = {name: t.detach() for name, t in inputs(2, 9, 9, torch.float32).items()}
    given |= {name: given[name].to(dtype) for name in "qkv"}
    start = torch.tensor([0, 4])
    o = forgetting_attention(**given, seq_start=start, adaptive_threshold="auto")
    assert o.dtype == dtype
    error = (o.double() - exact(**given, start=start)).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps


def test_an_unknown_threshold_raises() -> None:
    given = inputs(1, 4, 4)
    with pytest.raises(ValueError, match="adaptive_threshold: expected 'auto'"):
        forgetting_attention(**given, adaptive_threshold="fast")
