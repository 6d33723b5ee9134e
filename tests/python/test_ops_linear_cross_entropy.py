"""Linear cross-entropy, against the float64 logits of torch's own ops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import require_cuda
from torch import Tensor

from tidegate import ops

raw = torch.ops.tidegate
BOUND = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "reduction": "sum"},
    {"z_loss": 1e-2, "reduction": "none"},
    {"label_smoothing": 0.2, "z_loss": 1e-2},
]


def oracle(x: Tensor, w: Tensor, y: Tensor, b: Tensor, *, z_loss: float = 0.0, **kw) -> Tensor:
    """torch's cross-entropy of whole logits, and the z-loss beside it."""
    z = F.linear(x, w, b).flatten(0, -2)
    kept = y.flatten() != -100
    reduction = kw.pop("reduction", "mean")
    rows = F.cross_entropy(z, y.flatten(), reduction="none", **kw)
    rows = rows + z_loss * torch.where(kept, z.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return rows.view(y.shape)
    return rows.sum() / (kept.sum() if reduction == "mean" else 1)


def make(rows: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(rows + vocab)
    x, w, b = (torch.randn(s, generator=rng) for s in ((2, rows, 16), (vocab, 16), (vocab,)))
    y = torch.randint(vocab, (2, rows), generator=rng)
    y[0, ::3] = -100
    return *(t.to(device, dtype).requires_grad_() for t in (x, w, b)), y.to(device)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(7, 50), (1300, 257)])
def test_loss_and_gradients(rows, vocab, options, dtype, device):
    x, w, b, y = make(rows, vocab, dtype, device)
    loss = ops.linear_cross_entropy(x, w, y, b, **options)
    dloss = torch.linspace(0.5, 2, loss.numel()).view(loss.shape).to(loss)
    found = [loss, *torch.autograd.grad(loss, (x, w, b), dloss)]
    wide = [t.detach().cpu().double().requires_grad_() for t in (x, w, b)]
    exact = oracle(wide[0], wide[1], y.cpu(), wide[2], **options)
    wanted = [exact, *torch.autograd.grad(exact, wide, dloss.cpu().double())]
    for value, right in zip(found, wanted, strict=True):
        error = (value.detach().cpu().double() - right.detach()).norm() / right.detach().norm()
        assert error <= BOUND[dtype]
    alone = ops.linear_cross_entropy(x.detach(), w.detach(), y, b.detach(), **options)
    assert torch.equal(alone, loss)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck_and_opcheck(reduction, device):
    x, w, b, y = make(3, 7, torch.float64, device)
    assert torch.autograd.gradcheck(
        lambda x, w, b: ops.linear_cross_entropy(x, w, y, b, z_loss=0.1, reduction=reduction),
        (x, w, b),
    )
    torch.library.opcheck(
        raw.linear_cross_entropy.default, (x, w, y, b, -100, 0.1, 0.05, reduction)
    )


def test_not_a_number_stays_in_its_row(device):
    x, w, b, y = make(5, 11, torch.float32, device)
    with torch.no_grad():
        x[1, 2, 3] = math.nan
    loss = ops.linear_cross_entropy(x, w, y, b, reduction="none")
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isnan().nonzero().tolist() == [[1, 2]]
    assert dx.isnan().any(-1).nonzero().tolist() == [[1, 2]]


def test_no_label_is_a_loss_of_zero(device):
    x, w, b, y = make(5, 11, torch.float32, device)
    loss = ops.linear_cross_entropy(x, w, torch.full_like(y, -100), b)
    loss.backward()
    assert loss == 0
    assert not x.grad.any()
    assert not w.grad.any()


@pytest.mark.parametrize("of", ["x", "weight", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_is_refused(reduction, of, device):
    x, w, b, y = make(5, 11, torch.float32, device)
    loss = ops.linear_cross_entropy(x, w, y, b, reduction=reduction).sum()
    asked = {"x": x, "weight": w, "bias": b}[of]
    (gradient,) = torch.autograd.grad(loss, asked, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: double backward is not"):
        gradient.sum().backward()


def test_transforms_are_refused(device):
    x, w, b, y = make(5, 11, torch.float32, device)
    with pytest.raises(RuntimeError, match=r"linear_cross_entropy: torch.func transforms"):
        torch.func.grad(lambda x: ops.linear_cross_entropy(x, w, y, b))(x)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: .*vmap"):
        torch.vmap(lambda x, y: ops.linear_cross_entropy(x, w, y, b))(x, y)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_lowers_x_and_keeps_the_weight_s_gradient(reduction, device):
    x, w, b, y = make(70, 50, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        loss = ops.linear_cross_entropy(x, w, y, b, reduction=reduction)
    plain = ops.linear_cross_entropy(x.bfloat16(), w, y, b, reduction=reduction)
    assert torch.equal(loss, plain)
    assert loss.dtype == torch.float32
    dx, dw, db = torch.autograd.grad(loss.sum(), (x, w, b))
    assert (dx.dtype, dw.dtype, db.dtype) == (torch.float32,) * 3
    half = w.detach().bfloat16().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = ops.linear_cross_entropy(x, half, y, None, reduction=reduction)
    assert torch.autograd.grad(loss.sum(), half)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_whole(reduction, device):
    torch._dynamo.reset()

    def loss(x, w, y, b):
        return ops.linear_cross_entropy(x * 2, w, y, b, z_loss=0.1, reduction=reduction).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (7, 12):
        x, w, b, y = make(rows, 50, torch.float32, device)
        found = [compiled(x, w, y, b), loss(x, w, y, b)]
        grads = [torch.autograd.grad(value, (x, w, b)) for value in found]
        torch.testing.assert_close(*found)
        for one, two in zip(*grads, strict=True):
            torch.testing.assert_close(one, two)


def test_any_strides(device):
    """Results do not depend on how x, weight, bias and labels lie in memory."""
    x, w, b, y = make(9, 13, torch.float32, device)
    wanted = ops.linear_cross_entropy(x, w, y, b)
    grads = torch.autograd.grad(wanted, (x, w, b))
    strided = [
        lambda t: t.detach().mT.contiguous().mT,
        lambda t: torch.stack([t.detach()] * 2, -1)[..., 0],
        lambda t: torch.cat([t.detach()[..., :1], t.detach()], -1)[..., 1:],
    ]
    for lay in strided:
        xs, ws = lay(x).requires_grad_(), lay(w).requires_grad_()
        bs = torch.stack([b.detach()] * 2, -1)[:, 0].requires_grad_()
        found = ops.linear_cross_entropy(xs, ws, lay(y).int(), bs)
        torch.testing.assert_close(found, wanted)
        for one, two in zip(torch.autograd.grad(found, (xs, ws, bs)), grads, strict=True):
            torch.testing.assert_close(one, two)
    row = x.detach()[:, :1].expand_as(x).requires_grad_()
    same = ops.linear_cross_entropy(row, w, y, b)
    torch.testing.assert_close(same, ops.linear_cross_entropy(row.contiguous(), w, y, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_logits(dtype, device):
    """Logits of a thousand neither overflow nor lose the loss; rows and classes may be few."""
    w = torch.tensor([[1000.0], [-1000.0], [0.0]], device=device, dtype=dtype, requires_grad=True)
    x = torch.tensor([[1.0], [1.0], [-1.0]], device=device, dtype=dtype, requires_grad=True)
    y = torch.tensor([0, 1, 2], device=device)
    loss = ops.linear_cross_entropy(x, w, y, reduction="none")
    assert loss.tolist() == [0, 2000, 1000]
    dx, dw = torch.autograd.grad(loss.sum(), (x, w))
    assert dx.flatten().tolist() == [0, 2000, -1000]
    assert dw.flatten().tolist() == [1, -2, 1]
    one = ops.linear_cross_entropy(x, w[:1], torch.zeros_like(y))
    assert one == 0
    none = ops.linear_cross_entropy(x[:0], w, y[:0])
    assert none == 0
    assert torch.autograd.grad(none, w)[0].abs().sum() == 0


def test_gradients_of_rows_take_memory_once() -> None:
    """With few rows the weight's gradient is the one tensor as large as the weight."""
    x, weight = torch.randn(8, 64), torch.randn(4096, 64)
    labels, dloss = torch.randint(4096, (8,)), torch.ones(8)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        raw.linear_cross_entropy_backward(
            dloss, x, weight, labels, None, -100, 0.0, 0.0, True, True, False
        )
    sizes = [event.self_cpu_memory_usage for event in profile.events()]
    assert sum(size >= weight.nbytes for size in sizes) == 1


@pytest.mark.gpu
def test_a_cuda_graph_replays_it():
    require_cuda()
    x, w, b, y = make(300, 257, torch.bfloat16, "cuda")
    stream = torch.cuda.Stream()

    def step():
        loss = ops.linear_cross_entropy(x, w, y, b)
        return loss, *torch.autograd.grad(loss, (x, w, b))

    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    with torch.no_grad():
        x.neg_()
    graph.replay()
    for one, two in zip(found, step(), strict=True):
        assert torch.equal(one, two)
