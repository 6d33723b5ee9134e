"""More than 2^31 elements: indices that 32 bits do not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import require_cuda
from support import error_rule, scan_oracle, wkv4_oracle
from torch import Tensor

import tidegate

pytestmark = [pytest.mark.gpu, pytest.mark.large]
ops = tidegate.ops
LONG = 131072
DEVICE = "cuda"
BATCH, TIME, WIDTH = 4, 65537, 8224  # 4.3 GB of bfloat16; more tokens than 16 bits count
RNN_BATCH, RNN_TIME, RNN_WIDTH = 16400, 1024, 128  # many short rows: steps take their time


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    require_cuda()


def needs_memory(gibibytes: float) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes:g} GiB of free device memory, {free / 2**30:.0f} are there")


def close_in_parts(left: Tensor, right: Tensor, tolerance: float) -> None:
    """|left - right| <= tolerance * (|right| + 1), without large temporaries."""
    assert left.shape == right.shape
    left, right = (values.detach().flatten().split(1 << 28) for values in (left, right))
    for a, b in zip(left, right, strict=True):
        error = (a.float() - b.float()).abs_().div_(b.float().abs_().add_(1)).max()
        assert error <= tolerance


@pytest.mark.parametrize("theta", [False, True])
def test_hgru_of_more_than_two_to_the_31_elements(theta: bool) -> None:
    """Each batch row of a huge call equals the call of that row alone, gradients too."""
    needs_memory(60)
    batch, time, width = BATCH, TIME, WIDTH
    assert batch * time * width > 2**31
    channels = width // 2 if theta else width
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    phase = torch.rand(channels, device="cuda") if theta else None
    c, f = randn(batch, time, width).requires_grad_(), randn(batch, time, channels).requires_grad_()
    dh = randn(batch, time, width)
    h, final = ops.hgru(c, f, theta=phase)
    dc, df = torch.autograd.grad(h, (c, f), dh)
    for row in (0, batch - 1):
        part = slice(row, row + 1)
        leaves = [v.detach()[part].clone().requires_grad_() for v in (c, f)]
        alone, state = ops.hgru(*leaves, theta=phase)
        close_in_parts(h[part], alone, 2**-7)
        close_in_parts(final[part], state, 1e-4)
        for whole, grad in zip((dc, df), torch.autograd.grad(alone, leaves, dh[part]), strict=True):
            close_in_parts(whole[part], grad, 2**-6)
        channel = slice(channels - 3, channels)
        halves = [channel] if not theta else [channel, slice(width - 3, width)]
        corner = torch.cat([c.detach()[part, :, s] for s in halves], -1).cpu()
        gate = f.detach()[part, :, channel].cpu()
        turn = phase[channel].cpu() if theta else None
        found = torch.cat([h.detach()[part, :, s] for s in halves], -1)
        exact, _ = scan_oracle.hgru_forward(corner, gate, None, turn)
        same, _ = scan_oracle.hgru_forward(corner, gate, None, turn, exact=False)
        error_rule.assert_within_rule(f"row {row}", found, exact, same)


def check_rows_alone(
    op: Callable[..., tuple[Tensor, Tensor]],
    data: list[Tensor],
    parameters: list[Tensor],
    dh: Tensor,
) -> None:
    """Each batch row of a huge call equals the call of that row alone, whose tensors 32 bits do
    hold; gradients of parameters are the sums of the rows'."""
    assert dh.numel() > 2**31
    assert dh[0].numel() < 2**31
    leaves = [v.requires_grad_() for v in (*data, *parameters)]
    h, final = op(*leaves)
    grads = torch.autograd.grad(h, leaves, dh)
    totals = [torch.zeros_like(v) for v in parameters]
    for row in range(len(dh)):
        part = slice(row, row + 1)
        own = [v.detach()[part].clone().requires_grad_() for v in data]
        alone, state = op(*own, *parameters)
        close_in_parts(h[part], alone, 2**-7)
        close_in_parts(final[part], state, 1e-4)
        expected = torch.autograd.grad(alone, [*own, *parameters], dh[part])
        for i in range(len(data)):
            close_in_parts(grads[i][part], expected[i], 2**-6)
        for total, term in zip(totals, expected[len(data) :], strict=True):
            total += term
    for found, total in zip(grads[len(data) :], totals, strict=True):
        assert (found - total).norm() <= 1e-3 * total.norm()


def huge(count: int) -> tuple[torch.Generator, list[Tensor]]:
    """A generator, and tensors of more than 2^31 normal numbers."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape, options = (BATCH, TIME, WIDTH), {"device": DEVICE, "dtype": torch.bfloat16}
    return generator, [torch.randn(shape, generator=generator, **options) for _ in range(count)]


@pytest.mark.parametrize("theta", [False, True])
def test_lru_scan_of_more_than_two_to_the_31_elements(theta: bool) -> None:
    needs_memory(60)
    generator, (x, dh) = huge(2)
    channels = WIDTH // 2 if theta else WIDTH
    modulus, phase = torch.rand(2, channels, device=DEVICE, generator=generator).unbind(0)
    modulus = 0.9 + 0.099 * modulus
    # h is about as large as x
    rates = [(-modulus.log()).log(), (phase + 0.1).log(), 0.5 * torch.log1p(-(modulus**2))]
    if theta:
        check_rows_alone(ops.lru_scan, [x], rates, dh)
    else:

        def real(x: Tensor, nu_log: Tensor, gamma_log: Tensor) -> tuple[Tensor, Tensor]:
            return ops.lru_scan(x, nu_log, None, gamma_log)

        check_rows_alone(real, [x], rates[::2], dh)


def test_wkv4_of_more_than_two_to_the_31_elements() -> None:
    needs_memory(80)
    generator, (k, v, grad_o) = huge(3)
    w = torch.linspace(-5, 1, WIDTH, device=DEVICE).exp()
    u = torch.randn(WIDTH, device=DEVICE, generator=generator)

    def wkv4(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        o, final = ops.wkv4(w, u, k, v)
        return o, wkv4_oracle.mean_and_log(final)

    check_rows_alone(wkv4, [k, v], [w, u], grad_o)


def test_gated_rnn_of_more_than_two_to_the_31_elements() -> None:
    """First and last rows equal calls of these alone; the matrix's gradient is the product of what
    the op returns, taken in parts."""
    needs_memory(60)
    batch, time, width = RNN_BATCH, RNN_TIME, RNN_WIDTH
    assert (batch - 16) * time * width >= 2**31
    generator = torch.Generator(DEVICE).manual_seed(0)
    options = {"device": DEVICE, "dtype": torch.bfloat16, "generator": generator}
    z, x, dh = (torch.randn(batch, time, width, **options) for _ in range(3))
    w = torch.randn(width, width, **options) / width**0.5
    leaves = [v.requires_grad_() for v in (z, x, w)]
    h, final = ops.gated_rnn(*leaves)
    dz, dx, dw = torch.autograd.grad(h, leaves, dh)
    h = h.detach()
    for part in (slice(0, 16), slice(batch - 16, batch)):
        own = [v.detach()[part].clone().requires_grad_() for v in (z, x)]
        alone, state = ops.gated_rnn(*own, w)
        close_in_parts(h[part], alone, 2**-7)
        close_in_parts(final[part], state, 1e-4)
        for whole, grad in zip((dz, dx), torch.autograd.grad(alone, own, dh[part]), strict=True):
            close_in_parts(whole[part], grad, 2**-6)
    expected = torch.zeros(width, width, device=DEVICE)
    for after, left in zip(h.split(1640), dz.split(1640), strict=True):
        before = torch.nn.functional.pad(after[:, :-1], (0, 0, 1, 0))  # h0 is zero
        expected += left.flatten(0, 1).float().T @ before.flatten(0, 1).float()
    assert (dw.float() - expected).norm() <= 2**-6 * expected.norm()


def test_slices_of_one_projection_beyond_two_to_the_31() -> None:
    """Strided views whose last rows lie more than 2^31 elements into their storage."""
    needs_memory(30)
    time, channels = LONG, 5504
    projection = torch.randn(1, time, 3 * channels, device="cuda", dtype=torch.bfloat16)
    assert projection.numel() > 2**31
    _, f, c = projection.split(channels, -1)
    h, _ = ops.hgru(c, f)
    last = slice(channels - 5, channels)
    corner, gate = c[..., last].cpu(), f[..., last].cpu()
    exact, _ = scan_oracle.hgru_forward(corner, gate)
    same, _ = scan_oracle.hgru_forward(corner, gate, exact=False)
    error_rule.assert_within_rule("last channels", h[..., last], exact, same)
    copies, _ = ops.hgru(c.contiguous(), f.contiguous())
    close_in_parts(h, copies, 2**-7)


def test_rows_two_to_the_31_bytes_apart() -> None:
    """A view of time steps that lie further apart than a kernel's row stride can say."""
    needs_memory(20)
    far = torch.randn(3, (1 << 30) + 8, device="cuda", dtype=torch.bfloat16)
    x = far[:, :8].unsqueeze(0)
    assert x.stride(1) * x.element_size() > 2**31
    a = torch.rand(1, 3, 8, device="cuda", dtype=torch.bfloat16)
    leaf = x.detach().requires_grad_()
    h, _ = ops.linear_scan(leaf, a)
    assert torch.equal(h, ops.linear_scan(x.contiguous(), a)[0])
    (dx,) = torch.autograd.grad(h.sum(), leaf)
    assert dx.shape == x.shape
    assert dx.isfinite().all()
