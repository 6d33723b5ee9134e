"""`tidegate.nn.GLU` and `LowerBounds`, and what is said of wrong options of any module."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tidegate.models import mixers
from tidegate.nn import GLU, LowerBounds


@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_glu_equals_its_equation(activation, bias):
    glu = GLU(5, hidden=7, activation=activation, bias=bias, dtype=torch.float64)
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    rows = F.linear(x, glu.in_proj.weight, glu.in_proj.bias)
    gate, value = rows[..., :7], rows[..., 7:]
    gate = gate / (1 + torch.exp(-gate)) if activation == "silu" else gate
    wanted = F.linear(gate * value, glu.out_proj.weight, glu.out_proj.bias)
    torch.testing.assert_close(glu(x), wanted)
    assert sum(p.numel() for p in glu.parameters()) == 3 * 5 * 7 + (2 * 7 + 5) * bias


def test_glu_defaults():
    glu = GLU(4)
    assert (glu.hidden, glu.activation, glu.in_proj.bias) == (8, "silu", None)
    torch.manual_seed(5)
    glu.reset_parameters()
    torch.manual_seed(5)
    assert torch.equal(GLU(4).in_proj.weight, glu.in_proj.weight)
    bound = 4**-0.5
    assert glu.in_proj.weight.abs().max() <= bound


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GLU(4, activation="relu"), "GLU: activation: expected one of 'silu', 'none'"),
        (lambda: GLU(4, hidden=0), "GLU: hidden: expected a positive integer; got 0"),
        (lambda: GLU(0), "GLU: dim: expected a positive integer; got 0"),
        (lambda: GLU(4)(torch.zeros(2, 3)), r"GLU: x: expected \[..., dim=4\]; got \(2, 3\)"),
        (lambda: LowerBounds(0, 4), "LowerBounds: layers: expected a positive integer; got 0"),
        (lambda: LowerBounds(2, 4, mode="up"), "LowerBounds: mode: expected one of 'cumulative'"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def filled(mode: str, layers: int = 5, dim: int = 3) -> LowerBounds:
    bounds = LowerBounds(layers, dim, mode=mode, dtype=torch.float64)
    torch.manual_seed(1)
    torch.nn.init.normal_(bounds.logits)
    return bounds


def test_cumulative_equals_the_paper():
    bounds = filled("cumulative")
    p = torch.softmax(bounds.logits, 0)
    wanted = torch.cumsum(p, 0) - p[0]
    torch.testing.assert_close(bounds(), wanted)
    assert not bounds()[0].any()
    assert (bounds().diff(dim=0) > 0).all()


def test_decreasing_is_cumulative_reversed():
    down, up = filled("decreasing"), filled("cumulative")
    torch.testing.assert_close(down(), up().flip(0))
    assert not down()[-1].any()


def test_independent_and_none():
    bounds = filled("independent")
    torch.testing.assert_close(bounds(), torch.sigmoid(bounds.logits))
    none = LowerBounds(5, 3, mode="none")
    assert none() is None
    assert not list(none.parameters())


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_start(layers):
    gamma = LowerBounds(layers, 4)()
    wanted = torch.arange(layers)[:, None].expand(layers, 4) / layers
    torch.testing.assert_close(gamma, wanted.float())


@pytest.mark.parametrize("mode", ["cumulative", "independent", "decreasing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_never_one(mode, dtype):
    bounds = LowerBounds(3, 2, mode=mode, dtype=dtype)
    with torch.no_grad():
        bounds.logits[:] = torch.tensor([-200.0, 100.0, 100.0])[:, None]
    gamma = bounds()
    assert gamma.min() >= 0
    assert gamma.max() < 1
    assert gamma.max() > 0.9999
    gamma.sum().backward()
    assert bounds.logits.grad.isfinite().all()


def test_half_keeps_logits():
    bounds = filled("cumulative").float()
    bounds().sum().backward()
    before = bounds.logits.detach().clone()
    half = bounds.bfloat16()
    assert torch.equal(half.logits, before)
    assert half.logits.dtype == half.logits.grad.dtype == half().dtype == torch.float32
    wide = half.double().half()
    assert wide.logits.dtype == wide.logits.grad.dtype == wide().dtype == torch.float32
    assert LowerBounds(2, 2, dtype=torch.bfloat16)().dtype == torch.float32


def numbers_of_modules() -> list[tuple[type, str, str]]:
    """Each module with each of its options that is a number, and the kind of number."""
    return [
        (cls, option, kind)
        for cls in dict.fromkeys((*mixers().values(), GLU, LowerBounds))
        for option, parameter in inspect.signature(cls).parameters.items()
        if (kind := str(parameter.annotation).split(" | ")[0]) in ("int", "float")
    ]


@pytest.mark.parametrize(("cls", "option", "kind"), numbers_of_modules())
def test_what_is_no_number_is_refused_by_name(cls, option, kind):
    """In the module's words, not by a comparison that fails somewhere in it."""
    others: dict[str, Any] = {"dim": 8} | ({"layers": 2} if cls is LowerBounds else {})
    if option == "rank":
        others |= {"expansion": "lr", "expand": 2}
    if (cls.__name__, option) == ("LRU", "gumbel_gate"):
        others["gate"] = "data"
    for wrong in ("0.5", [1], {}, True, math.nan, -1, *([0.5] if kind == "int" else [])):
        with pytest.raises(ValueError, match=rf"^{cls.__name__}: (r_min, )?{option}\b.*: expected"):
            cls(**{**others, option: wrong})
