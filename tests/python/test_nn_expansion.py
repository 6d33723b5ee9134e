"""HGRU's state expansions against Table 2 of HGRN2's paper: equations by loops, and sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tidegate.nn import HGRU
from tidegate.nn.expansion import EXPANSIONS, StateExpansion

DIM, EXPAND, PARTS = 6, 3, 2

# Parameters of one quantity, by d, n and r; Table 3's counts show the d x d projection in krp.
SIZES = {
    "naive": lambda d, n, r: n * d * d,
    "lr": lambda d, n, r: d * r * (n + 1),
    "glt": lambda d, n, r: d * d,
    "glti": lambda d, n, r: d * d + n * n,
    "krp": lambda d, n, r: d * d + n * d,
    "kp": lambda d, n, r: d * d + n,
}


def make(kind: str, bias: bool) -> StateExpansion:
    torch.manual_seed(0)
    module = StateExpansion(kind, DIM, EXPAND, parts=PARTS, rank=2, bias=bias, dtype=torch.float64)
    module.reset_parameters()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


def by_hand(module: StateExpansion, p: int, x: Tensor) -> Tensor:
    """Quantity p of one vector x ``[d]``: ``[n, d]``, number by number."""
    get = {name: value.detach()[p] for name, value in module.named_parameters()}
    y = torch.zeros(EXPAND, DIM, dtype=torch.float64)
    width = DIM // EXPAND
    for i in range(EXPAND):
        for j in range(DIM):
            if module.kind == "naive":
                y[i, j] = get["weight"][i, j] @ x
            elif module.kind == "lr":
                y[i, j] = get["up"][i, j] @ (get["down"] @ x)
            elif module.kind in ("glt", "glti"):
                y[i, j] = get["weight"][i, j] @ x[i * width : (i + 1) * width]
            elif module.kind == "krp":
                y[i, j] = get["scale"][i, j] * (get["weight"][j] @ x)
            else:
                y[i, j] = get["scale"][i] * (get["weight"][j] @ x)
    if module.kind == "glti":
        y = get["mix"].T @ y
    return y + get.get("bias", 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", EXPANSIONS)
def test_equals_table_2(kind, bias):
    module = make(kind, bias)
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    y = module(x)
    assert y.shape == (PARTS, 2, 4, EXPAND * DIM)
    for p in range(PARTS):
        for b in range(2):
            for t in range(4):
                wanted = by_hand(module, p, x[b, t]).flatten()
                torch.testing.assert_close(y[p, b, t].detach(), wanted)
    torch.testing.assert_close(module(x[0, 0]), y[:, 0, 0])


@pytest.mark.parametrize("kind", EXPANSIONS)
def test_sizes_of_table_2(kind):
    d, n, r = 24, 4, 5
    module = StateExpansion(kind, d, n, parts=3, rank=r)
    assert sum(p.numel() for p in module.parameters()) == 3 * SIZES[kind](d, n, r)


def test_default_rank_is_about_one_dense_projection():
    for dim, expand in ((1024, 4), (1024, 8), (3, 7)):
        module = StateExpansion("lr", dim, expand, parts=1, device="meta")
        rank = module.down.size(1)
        assert rank == max(1, dim // (expand + 1))


@pytest.mark.parametrize("kind", EXPANSIONS)
def test_groups_differ_from_the_start(kind):
    """Groups that were alike would get the same gradients and stay alike."""
    torch.manual_seed(0)
    mixer = HGRU(12, expansion=kind, expand=2)
    h = mixer.in_proj(torch.randn(5, 12)).detach().unflatten(-1, (2, 12))
    assert (h[..., 0, :] - h[..., 1, :]).abs().amax() > 0.1


@pytest.mark.parametrize("kind", EXPANSIONS)
def test_trains(kind):
    """A few steps lower the loss of a task that needs memory: repeat the token before the last."""
    torch.manual_seed(0)
    mixer = HGRU(8, expansion=kind, expand=4)
    optimizer = torch.optim.Adam(mixer.parameters(), lr=2e-2)
    x = torch.randn(8, 12, 8)
    losses = []
    for _ in range(60):
        loss = (mixer(x)[0][:, 2:] - x[:, :-2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
