"""Linear cross-entropy, against the float64 logits of torch's own ops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
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


def test_double_backward_is_refused(device):
    x, w, b, y = make(5, 11, torch.float32, device)
    loss = ops.linear_cross_entropy(x, w, y, b)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: double backward is not"):
        dx.sum().backward()
