"""The options that `Attention` and `ForgettingAttention` are tried with, and what both must do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from support.mixer_checks import check_values_and_gradients, gamma_of
from tidegate.nn import Attention, ForgettingAttention

ATTENTION_DIM = 12
ATTENTION: dict[str, dict[str, Any]] = {
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

FORGETTING_DIM, FORGETTING_HEADS = 32, 2
FORGETTING: dict[str, dict[str, Any]] = {
    "llama": {},
    "pro": {"preset": "pro"},
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "preset": "pro", "window": 4},
    "independent": {"gate": "independent", "gate_init": ("long", 1, 4)},
    "fixed": {"gate": "fixed", "gate_init": "long:2:8", "rope": 100.0},
    "rope": {"preset": "pro", "rope": 500000.0},
    "own-norms": {"qk_norm": True, "qk_norm_shared": False},
    "none": {"gate": "none", "output_gate": True, "output_activation": "silu"},
    "bounded": {"num_heads": 4, "lower_bound": True},
    "bounded-pro": {"preset": "pro", "gate": "independent", "lower_bound": True},
}


def attention(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> Attention:
    """Drawn from seed 0, with larger weights than it starts with."""
    torch.manual_seed(0)
    mixer = Attention(ATTENTION_DIM, **options, dtype=dtype)
    with torch.no_grad():
        for p in mixer.parameters():
            p.mul_(2.0)
    return mixer


def forgetting(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> ForgettingAttention:
    """Drawn from seed 0, with larger weights than it starts with, and none that is zero."""
    torch.manual_seed(0)
    options = {"num_heads": FORGETTING_HEADS, **options}
    mixer = ForgettingAttention(FORGETTING_DIM, **options, dtype=dtype)
    with torch.no_grad():
        for p in mixer.parameters():
            p.mul_(2.0).add_(torch.randn(p.shape, dtype=torch.float64).to(p) * 0.1)
    return mixer


# Both mixers with all of their options: makers that take a dtype.
MAKERS: dict[str, Callable[..., Attention | ForgettingAttention]] = {
    **{f"attention-{name}": partial(attention, options) for name, options in ATTENTION.items()},
    **{f"forgetting-{name}": partial(forgetting, options) for name, options in FORGETTING.items()},
}


def check_against(mixer: nn.Module, reference: Callable[..., Tensor]) -> None:
    """Outputs and all gradients are those of `reference`, of one sequence ``[T, dim]`` and, where
    the mixer takes one, a gamma."""
    x = torch.randn(2, 7, mixer.dim, dtype=torch.float64, requires_grad=True)
    gamma = gamma_of(mixer)
    bounds = [] if gamma is None else [gamma.requires_grad_()]
    y, state = mixer(x, gamma=gamma)
    assert state is None
    check_values_and_gradients(
        lambda: (y,),
        lambda: (torch.stack([reference(mixer, row, *bounds) for row in x]),),
        [x, *bounds, *mixer.parameters()],
    )
