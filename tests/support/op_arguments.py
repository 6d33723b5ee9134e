"""A small call of every op: what it cannot do without."""

from __future__ import annotations

import torch


def said_name(op: str) -> str:
    """What an op's own errors call it: gated_rnn's second op, which it calls where a gradient is
    recorded, has the name that callers know."""
    return op.removesuffix("_with_logits")


def arguments() -> dict[str, dict[str, torch.Tensor | None]]:
    """Per op, its tensors by name: whoever adds an op adds a line here."""
    x, small = torch.randn(2, 5, 4), torch.rand(4)
    heads, gates = torch.randn(2, 5, 3, 16), -torch.rand(2, 5, 3)
    angles, labels = torch.rand(1, 5, 8), torch.randint(7, (2, 5))
    return {
        "linear_cross_entropy": {"x": x, "weight": torch.randn(7, 4), "labels": labels},
        "linear_scan": {"x": x, "a": x.sigmoid()},
        "hgru": {"c": x, "f": x},
        "lru_scan": {"x": x, "nu_log": small, "gamma_log": small, "theta_log": None},
        "wkv4": {"w": small, "u": small, "k": x, "v": x},
        "gated_rnn": {"z": x, "x": x, "w_zh": torch.randn(4, 4)},
        "gated_rnn_with_logits": {"z": x, "x": x, "w_zh": torch.randn(4, 4)},
        "hgrn2": {"q": heads, "f": heads, "v": heads},
        "gated_linear_attention": {"q": heads, "k": heads, "v": heads, "log_f": -heads.exp()},
        "forgetting_attention": {"q": heads, "k": heads, "v": heads, "log_f": gates},
        "norm": {"x": x},
        "add_norm": {"x": x, "residual": x},
        "glu": {"x": x},
        "rotary": {"x": heads, "cos": angles.cos(), "sin": angles.sin()},
        **steps(x[:, 0], small, heads[:, 0]),
    }


def steps(
    x: torch.Tensor, small: torch.Tensor, heads: torch.Tensor
) -> dict[str, dict[str, torch.Tensor | None]]:
    """The steps, a token x [B, D] or heads [B, H, K] at a time."""
    state, square = {"state": torch.zeros(2, 4)}, {"state": torch.zeros(2, 3, 16, 16)}
    cache, gates = torch.randn(2, 6, 3, 16), -torch.rand(2, 6, 3)
    lengths = torch.tensor([6, 2], dtype=torch.int32)
    step = {
        "linear_scan": {"x": x, "a": x.sigmoid()} | state,
        "hgru": {"c": x, "f": x} | state,
        "lru_scan": {"x": x, "nu_log": small, "gamma_log": small, "theta_log": None} | state,
        "wkv4": {"w": small, "u": small, "k": x, "v": x, "state": torch.zeros(2, 3, 4)},
        "gated_rnn": {"z": x, "x": x, "w_zh": torch.randn(4, 4)} | state,
        "hgrn2": {"q": heads, "f": heads, "v": heads} | square,
        "gated_linear_attention": {"q": heads, "k": heads, "v": heads, "log_f": -heads.exp()}
        | square,
        "forgetting_attention": {"q": heads, "k_cache": cache, "v_cache": cache}
        | {"gate_cache": gates, "lengths": lengths},
    }
    return {f"{name}_step": given for name, given in step.items()}
