"""The benchmarks' float64 loops, by which results are checked before they are timed."""

from __future__ import annotations

import importlib

import pytest
import torch
from benchmarks_cases import BENCHMARKS


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize("turned", [False, True], ids=["real", "complex"])
def test_float64_loops_agree_with_autograd(scripts, turned):
    float64 = scripts("float64")
    torch.manual_seed(0)
    time, channels = 9, 4
    kind = torch.complex128 if turned else torch.float64
    f = torch.randn(time, channels, dtype=torch.float64, requires_grad=True)
    c = torch.randn(time, channels, dtype=kind, requires_grad=True)
    gamma = torch.rand(channels, dtype=torch.float64)
    theta = torch.rand(channels, dtype=torch.float64)
    dh = torch.randn(time, channels, dtype=kind)

    def silu(x):
        return x * torch.sigmoid(x)

    decay = gamma + (1 - gamma) * torch.sigmoid(f)
    value = torch.complex(silu(c.real), silu(c.imag)) if turned else silu(c)
    turn = torch.polar(torch.ones_like(theta), theta) if turned else 1
    state, rows = torch.zeros(channels, dtype=kind), []
    for t in range(time):
        state = decay[t] * turn * state + (1 - decay[t]) * value[t]
        rows.append(state)
    h = torch.stack(rows)
    dc, df = torch.autograd.grad(h, (c, f), dh)

    arrays = [tensor.detach().numpy() for tensor in (c, f, gamma, theta, dh)]
    found = float64.hgru(*arrays[:3], arrays[3] if turned else None, arrays[4])
    for ours, reference in zip(found, (h.detach(), dc, df), strict=True):
        assert float64.relative_error(ours, reference.numpy()) < 1e-13


def test_float64_attention_is_the_recurrence(scripts):
    torch.manual_seed(0)
    q, k, v, logit = (torch.randn(70, 5, dtype=torch.float64) for _ in range(4))
    log_f, h0 = torch.nn.functional.logsigmoid(logit - 5), torch.randn(5, 5, dtype=torch.float64)
    state, rows = h0, []
    for t in range(len(q)):
        state = log_f[t].exp()[:, None] * state + k[t][:, None] * v[t]
        rows.append(q[t] @ state)
    o, final = scripts("float64").gated_linear_attention(q, k, v, log_f, h0)
    torch.testing.assert_close(o, torch.stack(rows), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, state, rtol=1e-12, atol=1e-12)


def test_float64_wkv4_is_the_recurrence(scripts):
    torch.manual_seed(0)
    w, u = torch.rand(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    k, v, grad_o = torch.randn(3, 7, 3, dtype=torch.float64).requires_grad_()
    y, z, rows = torch.zeros(3), torch.zeros(3), []
    for t in range(len(k)):
        bonus = (u + k[t]).exp()
        rows.append((y + bonus * v[t]) / (z + bonus))
        y, z = (-w).exp() * y + k[t].exp() * v[t], (-w).exp() * z + k[t].exp()
    o = torch.stack(rows)
    expected = (o, *torch.autograd.grad(o, (k, v), grad_o.detach()))
    arrays = [tensor.detach().numpy() for tensor in (w, u, k, v, grad_o)]
    float64 = scripts("float64")
    for found, exact in zip(float64.wkv4(*arrays), expected, strict=True):
        assert float64.relative_error(found, exact.detach().numpy()) < 1e-13


def test_relative_error_never_passes_nan(scripts):
    float64 = scripts("float64")
    values = torch.ones(3, dtype=torch.float64).numpy()
    assert not float64.relative_error(values * float("nan"), values) < 1
    assert not float64.distance(torch.full((3,), float("nan")), torch.ones(3)) < 1
    assert float64.distance(torch.tensor([1.0, 1.1]), torch.tensor([1.0, 1.0])) > 0.05


def test_float64_attention_has_the_gradients_that_autograd_finds(scripts):
    float64 = scripts("float64")
    rng = torch.Generator().manual_seed(0)
    q, d_o = (torch.randn(50, 8, dtype=torch.float64, generator=rng) for _ in range(2))
    k, v = (torch.randn(70, 8, dtype=torch.float64, generator=rng) for _ in range(2))
    gates = torch.randn(70, dtype=torch.float64, generator=rng)
    leaves = [q, k, v, torch.nn.functional.logsigmoid(gates)]
    found = float64.forgetting_attention(*leaves, d_o, rows=16)
    leaves = [t.requires_grad_() for t in leaves]
    c = leaves[3].cumsum(0)
    scores = leaves[0] @ leaves[1].T * 8**-0.5 + c[20:, None] - c
    later = torch.ones(50, 70, dtype=torch.bool).triu(21)
    o = scores.masked_fill(later, -torch.inf).softmax(-1) @ leaves[2]
    expected = (o, *torch.autograd.grad(o, leaves, d_o))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
