"""`tidegate.nn.Attention` against its equations, and its state."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate.nn import Attention
from tidegate.nn.attention import rotate

DIM = 12
CASES = {
    "default": {"num_heads": 3},
    "one-head": {},
    "no-positions": {"num_heads": 2, "rope": None},
    "window": {"num_heads": 3, "window": 3, "rope": 100.0},
}
by_options = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


def make(options: dict, dtype: torch.dtype = torch.float64) -> Attention:
    torch.manual_seed(0)
    mixer = Attention(DIM, **options, dtype=dtype)
    with torch.no_grad():
        for p in mixer.parameters():
            p.mul_(2.0)
    return mixer


def turned(x: Tensor, position: int, theta: float | None) -> Tensor:
    """A vector's pairs (i, i + D/2) as complex numbers, multiplied by exp(i angle)."""
    if theta is None:
        return x
    half = x.numel() // 2
    angle = position * theta ** (-2 * torch.arange(half, dtype=x.dtype) / x.numel())
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag])


def by_hand(mixer: Attention, x: Tensor) -> Tensor:
    """x [T, dim], one query and head after another."""
    q, k, v = F.linear(x, mixer.in_proj.weight).chunk(3, -1)
    d, rows = DIM // mixer.num_heads, []
    for t in range(x.size(0)):
        parts = []
        for h in range(mixer.num_heads):
            mine = slice(h * d, (h + 1) * d)
            first = 0 if mixer.window is None else max(0, t - mixer.window + 1)
            query = turned(q[t, mine], t, mixer.rope)
            keys = [turned(k[s, mine], s, mixer.rope) for s in range(first, t + 1)]
            weights = torch.softmax(torch.stack([query @ key for key in keys]) / d**0.5, 0)
            parts.append(weights @ v[first : t + 1, mine])
        rows.append(torch.cat(parts))
    return F.linear(torch.stack(rows), mixer.out_proj.weight)


@by_options
def test_equals_its_equations(options):
    mixer = make(options)
    x = torch.randn(2, 7, DIM, dtype=torch.float64, requires_grad=True)
    y, state = mixer(x)
    assert state is None
    wanted = torch.stack([by_hand(mixer, row) for row in x])
    torch.testing.assert_close(y, wanted)
    weight = torch.randn_like(y)
    leaves = [x, *mixer.parameters()]
    grads = torch.autograd.grad((y * weight).sum(), leaves)
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), leaves)
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, wanted_grad)


def test_scores_depend_on_distances():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind(0)
    at = [
        (rotate(q, torch.tensor([[i]]), 1e4) * rotate(k, torch.tensor([[i - 3]]), 1e4)).sum()
        for i in (3, 10, 1000)
    ]
    torch.testing.assert_close(at[0], at[1])
    torch.testing.assert_close(at[0], at[2])


@by_options
def test_split_anywhere(options):
    mixer = make(options)
    x = torch.randn(3, 9, DIM, dtype=torch.float64)
    with torch.no_grad():
        whole, _ = mixer(x)
        for cut in (0, 1, 4, 8):
            head, state = mixer(x[:, :cut], mixer.init_state(3, capacity=9))
            middle, state = mixer(x[:, cut : cut + 1], state)
            tail = [mixer.step(x[:, t], state)[:, None] for t in range(cut + 1, 9)]
            torch.testing.assert_close(torch.cat([head, middle, *tail], dim=1), whole)
            assert state.lengths.tolist() == [9] * 3


@by_options
def test_packed_equals_separate_with_and_without_a_state(options):
    mixer = make(options)
    x = torch.randn(1, 12, DIM, dtype=torch.float64)
    bounds = [0, 5, 5, 6, 12]
    cu_seqlens = torch.tensor(bounds)
    with torch.no_grad():
        y, none = mixer(x, cu_seqlens=cu_seqlens)
        z, state = mixer(x, mixer.init_state(4, capacity=8), cu_seqlens=cu_seqlens)
        assert none is None
        assert state.lengths.tolist() == [5, 0, 1, 6]
        torch.testing.assert_close(z, y)
        token = torch.randn(4, DIM, dtype=torch.float64)
        after = mixer.step(token, state)
        for n in range(4):
            part = x[:, bounds[n] : bounds[n + 1]]
            if part.size(1):
                torch.testing.assert_close(y[:, bounds[n] : bounds[n + 1]], mixer(part)[0])
            longer = torch.cat([part, token[n][None, None]], dim=1)
            torch.testing.assert_close(after[n], mixer(longer)[0][0, -1])


def test_bad_options_and_arguments():
    mixer = Attention(DIM, 3)
    x, state = torch.zeros(2, 3, DIM), mixer.init_state(2, capacity=2)
    calls = {
        r"Attention: num_heads: expected a divisor of dim=12; got 5": lambda: Attention(DIM, 5),
        r"Attention: rope: expected a positive number; got 0": lambda: Attention(DIM, 3, rope=0),
        r"Attention: num_heads: expected an even number of channels": lambda: Attention(DIM, 4),
        r"Attention: window: expected a positive integer; got 0": lambda: Attention(
            DIM, 3, window=0
        ),
        r"Attention: preset: expected one of 'llama'; got 'gpt'": lambda: Attention(
            DIM, 3, preset="gpt"
        ),
        r"Attention: capacity: expected the number of tokens": lambda: mixer.init_state(2),
        r"state: expected room for 3 tokens, .* capacity; got 2": lambda: mixer(x, state),
        r"state: expected keys \[2, capacity, 3, 4\]; got \(1, 2, 3, 4\)": lambda: mixer(
            x, mixer.init_state(1, capacity=2)
        ),
        r"Attention: gamma: expected None": lambda: mixer(x, gamma=torch.zeros(DIM)),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_autocast():
    mixer = make({"num_heads": 3}, torch.float32)
    x = torch.randn(2, 9, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = mixer(x)
        z, _ = mixer(x, mixer.init_state(2, capacity=9))
    wanted = mixer(x)[0]
    for got in (y, z):
        assert (got.float() - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.gpu
@by_options
def test_cuda_equals_cpu(options, device):
    if device == "cpu":
        pytest.skip("compares CUDA with the CPU")
    mixer = make(options, torch.float32)
    x = torch.randn(2, 33, DIM)
    there = copy.deepcopy(mixer).to(device)
    torch.testing.assert_close(there(x.to(device))[0].cpu(), mixer(x)[0], rtol=1e-3, atol=1e-4)
