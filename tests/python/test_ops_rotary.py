"""Rotary positions, against the naive float64 rotation by complex numbers."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from tidegate import ops

raw = torch.ops.tidegate

# Shapes with a vector's width of channels in each half, and without.
SHAPES = [(2, 5, 3, 16), (1, 1, 1, 2), (3, 17, 5, 64), (2, 4, 9, 14), (1, 0, 2, 8), (0, 3, 2, 8)]
# A unit in the last place of each dtype's results, of numbers up to sqrt(2) times the largest.
ROUNDING = {
    torch.float64: 1e-15,
    torch.float32: 5e-7,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}
by_dtype = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def make(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, *, shared: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x, cos, sin."""
    generator = torch.Generator().manual_seed(sum(shape))
    batch, time, _, channels = shape
    x = torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype)
    table = (1 if shared else batch, time, channels // 2)
    angles = 100 * torch.randn(table, dtype=torch.float64, generator=generator)
    return x, *(t.to(device, wide(dtype)) for t in (angles.cos(), angles.sin()))


def turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """In float64 on the CPU, written with complex numbers."""
    x, cos, sin = (t.cpu().double() for t in (x, cos, sin))
    a, b = x.chunk(2, dim=-1)
    turn = torch.complex(cos, -sin if inverse else sin)[:, :, None]
    y = torch.complex(a.contiguous(), b.contiguous()) * turn
    return torch.cat([y.real, y.imag], dim=-1)


def check(found: Tensor, expected: Tensor) -> None:
    if not expected.numel():
        assert found.shape == expected.shape
        return
    error = (found.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error <= ROUNDING[found.dtype]


@by_dtype
@pytest.mark.parametrize("shared", [False, True], ids=["own angles", "shared angles"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradient(shape, shared, dtype, device):
    x, cos, sin = make(shape, dtype, device, shared=shared)
    x.requires_grad_()
    for inverse in (False, True):
        y = ops.rotary(x, cos, sin, inverse=inverse)
        assert y.dtype == dtype
        assert y.is_contiguous()
        check(y, turned(x.detach(), cos, sin, inverse))
        dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        check(dx, turned(dy, cos, sin, not inverse))


@by_dtype
def test_any_strides(dtype, device):
    _, cos, sin = make((2, 6, 4, 16), dtype, device)
    # As one of three in a projection; misaligned; heads first; no unit stride; angles not either.
    projected = torch.randn(2, 6, 3 * 64, device=device).to(dtype)
    views = [
        projected.chunk(3, -1)[1].unflatten(-1, (4, 16)),
        projected[..., 3:67].unflatten(-1, (4, 16)),
        torch.randn(2, 4, 6, 16, device=device).to(dtype).transpose(1, 2),
        torch.randn(2, 6, 16, 4, device=device).to(dtype).transpose(2, 3),
        torch.randn(2, 6, 1, 16, device=device).to(dtype).expand(2, 6, 4, 16),
    ]
    for view in views:
        y = ops.rotary(view, cos, sin)
        assert torch.equal(y, ops.rotary(view.contiguous(), cos, sin))
        other = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (cos, sin)]
        assert torch.equal(y, ops.rotary(view, *other))


def test_turning_back_gives_the_input(device):
    x, cos, sin = make((2, 7, 3, 8), torch.float64, device)
    back = ops.rotary(ops.rotary(x, cos, sin), cos, sin, inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-14, atol=1e-14)


def test_derivatives_of_any_order(device):
    x, cos, sin = make((2, 3, 2, 4), torch.float64, device)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: ops.rotary(t, cos, sin), (x,))
    assert torch.autograd.gradgradcheck(lambda t: ops.rotary(t, cos, sin).sin(), (x,))


def test_what_is_not_finite_stays_in_its_channel_pair(device):
    x, cos, sin = make((1, 3, 2, 8), torch.float32, device)
    x[0, 1, 0, 2] = math.nan
    bad = ops.rotary(x, cos, sin).isnan().nonzero().tolist()
    assert bad == [[0, 1, 0, 2], [0, 1, 0, 6]]


def test_opcheck(device):
    x, cos, sin = make((2, 5, 3, 8), torch.float32, device)
    torch.library.opcheck(raw.rotary.default, (x, cos, sin, False))
    torch.library.opcheck(raw.rotary.default, (x.requires_grad_(), cos, sin, True))


def test_compiles_whole_with_dynamic_shapes(device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, cos, sin: ops.rotary(x, cos, sin).square(),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for time in (5, 9):
        x, cos, sin = make((2, time, 3, 8), torch.float32, device)
        x.requires_grad_()
        y = compiled(x, cos, sin)
        torch.testing.assert_close(y, ops.rotary(x, cos, sin).square())
        (dx,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(dx, 2 * x)  # a rotation keeps lengths


def test_captured_in_a_cuda_graph(device):
    if device == "cpu":
        pytest.skip("a CUDA graph needs CUDA")
    x, cos, sin = make((2, 64, 4, 64), torch.bfloat16, device)
    ops.rotary(x, cos, sin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.rotary(x, cos, sin)
    x.normal_()
    graph.replay()
    assert torch.equal(y, ops.rotary(x, cos, sin))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": (2, 5, 8)}, "rotary: x must have shape [B, T, H, D], got [2, 5, 8]"),
        ({"x": (2, 5, 3, 7)}, "rotary: x must have an even number of channels, got 7"),
        ({"cos": (2, 5, 3)}, "rotary: cos must have shape [1 or B, T, D / 2] = [2, 5, 4], got"),
        ({"sin": (3, 5, 4)}, "rotary: sin must have shape [1 or B, T, D / 2] = [2, 5, 4], got"),
        ({"sin": (1, 5, 4)}, "rotary: sin must have shape cos's shape = [2, 5, 4], got [1, 5, 4]"),
    ],
)
def test_wrong_shapes_are_named(changes, message, device):
    shapes = {"x": (2, 5, 3, 8), "cos": (2, 5, 4), "sin": (2, 5, 4)} | changes
    tensors = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ops.rotary(**tensors)


def test_wrong_dtypes_are_named(device):
    x, cos, sin = make((2, 5, 3, 8), torch.bfloat16, device)
    with pytest.raises(RuntimeError, match="cos must be float32 .x is bfloat16., got bfloat16"):
        ops.rotary(x, cos.bfloat16(), sin)
    with pytest.raises(RuntimeError, match="sin must be float64 .x is float64., got float32"):
        ops.rotary(x.double(), cos.double(), sin)
    with pytest.raises(RuntimeError, match="rotary: x must be"):
        ops.rotary(x.long(), cos, sin)


@by_dtype
def test_nothing_is_held_beside_input_and_result(dtype):
    """On a CPU; 16-bit data was copied to float32 and back, three to five times its size."""
    x, cos, sin = make((2, 64, 8, 64), dtype, "cpu", shared=True)
    ops.rotary(x, cos, sin)
    with torch.profiler.profile(profile_memory=True) as profile:
        y = ops.rotary(x, cos, sin)
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert y.nbytes <= peak < 1.25 * y.nbytes
