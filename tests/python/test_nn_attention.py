"""`tidegate.nn.Attention` against its equations, and its state."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate.nn import Attention
from tidegate.nn._attention_base import rotary_angles
from tidegate.ops import rotary

DIM = 12
CASES = {
    "default": {"num_heads": 3},
    "one-head": {},
    "no-positions": {"num_heads": 2, "rope": None},
    "window": {"num_heads": 3, "window": 3, "rope": 100.0},
    "pro": {"num_heads": 3, "preset": "pro"},
    "grouped": {"num_heads": 6, "num_kv_heads": 2, "preset": "pro", "window": 4},
    "own-norms": {"num_heads": 2, "qk_norm": True, "qk_norm_shared": False, "qk_norm_eps": 0.1},
    "silu": {"num_heads": 2, "output_gate": True, "output_activation": "silu"},
    "norm-alone": {"num_heads": 2, "output_norm": True, "norm_eps": 0.2},
    "shift-alone": {"num_heads": 2, "kv_shift": True, "rope": None},
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


def normed(x: Tensor, norm: torch.nn.Module | None, head: int, eps: float) -> Tensor:
    """One head's channels by RMSNorm with its own weights, or with the shared ones."""
    if norm is None:
        return x
    weight = norm.weight.view(-1, x.numel())
    return x / (x.pow(2).mean() + eps).sqrt() * weight[head % weight.size(0)]


def by_hand(mixer: Attention, x: Tensor) -> Tensor:
    """x [T, dim], one query and head after another."""
    d, kv_heads, rows = DIM // mixer.num_heads, mixer.num_kv_heads, []
    q, k, v, *g = F.linear(x, mixer.in_proj.weight).split(mixer._rows, -1)
    k, v = k.view(-1, kv_heads, d), v.view(-1, kv_heads, d)
    if mixer.shift_proj is not None:
        mix = torch.sigmoid(F.linear(x, mixer.shift_proj.weight)).view(-1, 2, kv_heads, 1)
        before = [torch.cat([torch.zeros_like(t[:1]), t[:-1]]) for t in (k, v)]
        a, c = mix.unbind(1)
        k, v = a * before[0] + (1 - a) * k, c * before[1] + (1 - c) * v
    for t in range(x.size(0)):
        parts = []
        for h in range(mixer.num_heads):
            mine, group = slice(h * d, (h + 1) * d), h * kv_heads // mixer.num_heads
            first = 0 if mixer.window is None else max(0, t - mixer.window + 1)
            eps = mixer.qk_norm_eps
            query = turned(normed(q[t, mine], mixer.q_norm, h, eps), t, mixer.rope)
            keys = [
                turned(normed(k[s, group], mixer.k_norm, group, eps), s, mixer.rope)
                for s in range(first, t + 1)
            ]
            weights = torch.softmax(torch.stack([query @ key for key in keys]) / d**0.5, 0)
            o = normed(weights @ v[first : t + 1, group], mixer.output_norm, h, mixer.norm_eps)
            if g:
                gate = F.silu if mixer.output_activation == "silu" else torch.sigmoid
                o = o * gate(g[0][t, mine])
            parts.append(o)
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

    def rotate(x, position):
        angles = rotary_angles(torch.tensor([[position]]), 4, 1e4, torch.float64)
        return rotary(x, *angles)

    at = [(rotate(q, i) * rotate(k, i - 3)).sum() for i in (3, 10, 1000)]
    torch.testing.assert_close(at[0], at[1])
    torch.testing.assert_close(at[0], at[2])


@by_options
@pytest.mark.parametrize("capacity", [9, None])
def test_split_anywhere(options, capacity):
    mixer = make(options)
    x = torch.randn(3, 9, DIM, dtype=torch.float64)
    with torch.no_grad():
        whole, _ = mixer(x)
        for cut in (0, 1, 4, 8):
            head, state = mixer(x[:, :cut], mixer.init_state(3, capacity=capacity))
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


@by_options
def test_sequences_go_on_from_different_lengths(options):
    """Packed and unpacked tokens after a state whose sequences hold 4, 0 and 2 tokens."""
    mixer = make(options)
    first, more = (torch.randn(1, n, DIM, dtype=torch.float64) for n in (6, 7))
    row = torch.randn(3, 2, DIM, dtype=torch.float64)
    bounds, new = [0, 4, 4, 6], [0, 1, 4, 7]
    with torch.no_grad():
        _, state = mixer(first, mixer.init_state(3), cu_seqlens=torch.tensor(bounds))
        y, after = mixer(more, state, cu_seqlens=torch.tensor(new))
        z, last = mixer(row, after)
        assert last.lengths.tolist() == last.seen.tolist() == [7, 5, 7]
        assert last.room.tolist() == [7, -1]
        for n in range(3):
            parts = [
                first[:, bounds[n] : bounds[n + 1]],
                more[:, new[n] : new[n + 1]],
                row[n][None],
            ]
            whole = mixer(torch.cat(parts, dim=1))[0]
            held = parts[0].size(1)
            torch.testing.assert_close(y[:, new[n] : new[n + 1]], whole[:, held:-2])
            torch.testing.assert_close(z[n], whole[0, -2:])


def test_a_state_is_left_as_it_was_by_forward():
    mixer = make({"num_heads": 3, "preset": "pro"})
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    with torch.no_grad():
        _, state = mixer(x, mixer.init_state(2))
        before = [t.clone() for t in state]
        mixer(x, state)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@torch.no_grad()
def test_a_window_keeps_memory_flat():
    """A full state drops what no query to come can see, so a fixed one never fills."""
    mixer = make({"num_heads": 3, "window": 4, "preset": "pro"})
    x = torch.randn(2, 40, DIM, dtype=torch.float64)
    whole, _ = mixer(x)
    state = mixer.init_state(2, capacity=8)
    parts = []
    for t in range(0, 40, 5):
        y, state = mixer(x[:, t : t + 5], state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    state = mixer.init_state(2, capacity=6)
    parts = [mixer.step(x[:, t], state) for t in range(40)]
    torch.testing.assert_close(torch.stack(parts, dim=1), whole)
    assert state.capacity == 6
    assert state.seen.tolist() == [40, 40]


@torch.no_grad()
def test_memory_grows_by_doubling():
    mixer = make({"num_heads": 3})
    state = mixer.init_state(2)
    x = torch.randn(2, DIM, dtype=torch.float64)
    sizes = set()
    for _ in range(130):
        mixer.step(x, state)
        sizes.add(state.capacity)
    assert sorted(sizes) == [64, 128, 256]
    assert state.lengths.tolist() == [130, 130]


def test_bad_options_and_arguments():
    mixer = Attention(DIM, 3)
    x, state = torch.zeros(2, 3, DIM), mixer.init_state(2, capacity=2)
    calls = {
        r"Attention: num_heads: expected a divisor of dim=12; got 5": lambda: Attention(DIM, 5),
        r"Attention: rope: expected a positive number; got 0": lambda: Attention(DIM, 3, rope=0),
        r"Attention: num_heads: expected an even number of channels": lambda: Attention(DIM, 4),
        r"Attention: num_kv_heads: expected a divisor of num_heads=3; got 2": lambda: Attention(
            DIM, 3, num_kv_heads=2
        ),
        r"Attention: window: expected a positive integer; got 0": lambda: Attention(
            DIM, 3, window=0
        ),
        r"Attention: preset: expected one of 'llama', 'pro'; got 'gpt'": lambda: Attention(
            DIM, 3, preset="gpt"
        ),
        r"output_activation: expected one of 'sigmoid', 'silu'; got 'tanh'": lambda: Attention(
            DIM, 3, output_activation="tanh"
        ),
        r"state: expected room for 3 tokens, .* capacity; got 2": lambda: mixer(x, state),
        r"state: expected keys \[2, capacity, 3, 4\]; got \(1, 2, 3, 4\)": lambda: mixer(
            x, mixer.init_state(1, capacity=2)
        ),
        r"state: expected the 8 tensors of an AttentionState; got 3": lambda: mixer(x, state[:3]),
        r"Attention: gamma: expected None": lambda: mixer(x, gamma=torch.zeros(DIM)),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    mixer(x[:, :2], state)
    for _ in range(2):
        mixer.step(x[:, 0], state)
    with pytest.raises(ValueError, match=r"expected room for 3 tokens, .*; got 2"):
        mixer.step(x[:, 0], state)


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
