"""`tidegate.nn.Attention` against its equations, and its window.

What it shares with ForgettingAttention is in test_nn_softmax_attention.py.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.attention_mixers import ATTENTION, check_against
from support.attention_mixers import ATTENTION_DIM as DIM
from support.attention_mixers import attention as make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tidegate.models import CausalLM, LMConfig
from tidegate.models.presets import presets
from tidegate.nn import Attention
from tidegate.nn._attention_base import rotary_angles
from tidegate.ops import rotary

by_options = pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)


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
    check_against(make(options), by_hand)


def test_scores_depend_on_distances():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind(0)

    def rotate(x, position):
        angles = rotary_angles(torch.tensor([[position]]), 4, 1e4, torch.float64)
        return rotary(x, *angles)

    at = [(rotate(q, i) * rotate(k, i - 3)).sum() for i in (3, 10, 1000)]
    torch.testing.assert_close(at[0], at[1])
    torch.testing.assert_close(at[0], at[2])


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


@pytest.mark.parametrize("mixer", ["transformer", "transformer-pro"])
def test_the_baselines_positions_turn_as_in_the_papers(mixer):
    """The Forgetting Transformer's paper, section 4.1: theta = 500000; Transformer++ of HGRN2's
    paper: LLaMA's 10000."""
    config = LMConfig(mixer=mixer, mixer_options={"num_heads": 2}, dim=DIM, layers=1)
    assert CausalLM(config).blocks[0].mixer.rope == 500000.0
    assert presets()["transformer-386m"].mixer_options["rope"] == 10000.0


def test_bad_options():
    calls = {
        r"Attention: num_heads: expected a divisor of dim=12; got 5": lambda: Attention(DIM, 5),
        r"Attention: rope: expected a positive number; got 0": lambda: Attention(DIM, 3, rope=0),
        r"rope: expected a positive number; got True": lambda: Attention(DIM, 3, rope=True),
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
        r"^Attention: norm_eps: expected 0 or more; got 'x'": lambda: Attention(
            DIM, 3, norm_eps="x"
        ),
        r"^Attention: qk_norm_eps: expected 0 or more; got -1": lambda: Attention(
            DIM, 3, qk_norm_eps=-1.0
        ),
        r"^Attention: qk_norm_eps: expected 0 or more; got nan": lambda: Attention(
            DIM, 3, preset="pro", qk_norm_eps=math.nan
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


class Largest(TorchDispatchMode):
    """The most elements that a tensor made under this mode has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(made):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return made


@pytest.mark.parametrize("case", ["whole", "packed", "state"])
@torch.no_grad()
def test_a_window_needs_no_mask(case):
    """Memory grows with T, not with its square."""
    time = 2048
    mixer = make({"num_heads": 1, "window": 8})
    x = torch.randn(1, time, DIM, dtype=torch.float64)
    with Largest() as largest:
        if case == "state":
            mixer(x, mixer.init_state(1))
        else:
            bounds = torch.tensor([0, 700, time]) if case == "packed" else None
            mixer(x, cu_seqlens=bounds)
    assert largest.elements < 8 * time * DIM < time * time
