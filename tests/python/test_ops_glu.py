"""glu, against the float64 equation."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from support.error_rule import assert_within_rule
from torch import Tensor

from tidegate import ops

raw = torch.ops.tidegate
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = {"none": lambda x: x, "silu": F.silu, "sigmoid": torch.sigmoid}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def exact(x: Tensor, dy: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """y and dx in float64, by the derivatives as they are written down."""
    x, dy = x.detach().cpu().double(), dy.detach().cpu().double()
    gate, value = x.chunk(2, -1)
    s, rest = 1 / (1 + torch.exp(-gate)), 1 / (1 + torch.exp(gate))
    if activation == "none":
        act, slope = gate, torch.ones_like(gate)
    elif activation == "sigmoid":
        act, slope = s, s * rest
    else:
        act, slope = gate * s, s * (1 + gate * rest)
    return act * value, torch.cat([dy * value * slope, dy * act], -1)


def by_torch(x: Tensor, dy: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    leaf = x.detach().cpu().requires_grad_()
    gate, value = leaf.chunk(2, -1)
    y = ACTIVATIONS[activation](gate) * value
    (dx,) = torch.autograd.grad(y, leaf, dy.cpu())
    return y.detach(), dx


def check(x: Tensor, activation: str) -> None:
    dy = torch.randn(*x.shape[:-1], x.shape[-1] // 2, generator=torch.Generator().manual_seed(1))
    dy = dy.to(x)
    leaf = x.detach().requires_grad_()
    y = ops.glu(leaf, activation)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    pairs = zip((y, dx), exact(x, dy, activation), by_torch(x, dy, activation), strict=True)
    for found, oracle, yardstick in pairs:
        assert found.dtype == x.dtype
        assert found.is_contiguous()
        assert_within_rule("glu", found, oracle, yardstick)


def draw(*shape: int, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@by_dtype
@by_activation
@pytest.mark.parametrize(
    "shape", [(2, 5, 48), (3, 14), (2,), (1, 2, 3, 4, 32), (4, 0), (0, 6), (1000, 26)], ids=str
)
def test_forward_and_gradient(shape, activation, dtype, device) -> None:
    check(draw(*shape).to(device, dtype), activation)


@by_dtype
@by_activation
def test_gates_far_out(activation, dtype, device) -> None:
    check(draw(4, 64, spread=60.0).to(device, dtype), activation)


def test_any_strides(device) -> None:
    wide = draw(2, 5, 3, 100).to(device, torch.bfloat16)
    views = [
        wide[..., 16:64],
        wide[..., 3:51],
        wide.transpose(0, 1),
        wide.transpose(-1, -2)[..., :2],
    ]
    views.append(wide[:1, :, :, :8].expand(4, 5, 3, 8))
    for view in views:
        assert torch.equal(ops.glu(view), ops.glu(view.contiguous()))
        check(view, "silu")


def test_gradcheck(device) -> None:
    x = draw(3, 10).to(device, torch.float64).requires_grad_()
    for activation in ACTIVATIONS:
        assert torch.autograd.gradcheck(lambda t, a=activation: ops.glu(t, a), (x,))


def test_what_is_not_finite_stays_in_its_channel(device) -> None:
    x = draw(3, 32).to(device)
    x[1, 5] = math.nan
    assert ops.glu(x).isnan().nonzero().tolist() == [[1, 5]]


def test_only_x_is_kept(device) -> None:
    x = draw(3, 32).to(device).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.glu(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


@by_activation
def test_opcheck(activation, device) -> None:
    x = draw(2, 5, 24).to(device)
    torch.library.opcheck(raw.glu.default, (x, activation))
    torch.library.opcheck(raw.glu.default, (x.requires_grad_(), activation))


def test_compiles_whole_with_dynamic_shapes(device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: ops.glu(x).square(), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (5, 9):
        x = draw(rows, 24).to(device).requires_grad_()
        pair = (compiled(x), ops.glu(x).square())
        torch.testing.assert_close(*pair)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in pair))


def test_autocast_leaves_it(device) -> None:
    x = draw(3, 8).to(device)
    with torch.autocast(device, torch.bfloat16):
        assert ops.glu(x).dtype == torch.float32
        assert ops.glu(x.bfloat16()).dtype == torch.bfloat16


def test_double_backward_is_refused(device) -> None:
    x = draw(3, 8).to(device).requires_grad_()
    (dx,) = torch.autograd.grad(ops.glu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()


@pytest.mark.sanitize
def test_sanitize(device) -> None:
    for width in (48, 14):
        check(draw(3, width).to(device, torch.bfloat16), "silu")


@pytest.mark.parametrize(
    ("x", "activation", "message"),
    [
        (torch.zeros(()), "silu", "glu: x must have shape [..., 2F], got []"),
        (
            torch.zeros(2, 7),
            "silu",
            "glu: x must have an even number of channels, gates and values, got 7",
        ),
        (
            torch.zeros(2, 8),
            "gelu",
            'glu: activation must be "silu", "sigmoid" or "none", got "gelu"',
        ),
        (
            torch.zeros(2, 8).long(),
            "silu",
            "glu: x must be float32, float64, bfloat16 or float16, got int64",
        ),
    ],
)
def test_errors(x, activation, message) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        ops.glu(x, activation)
