"""None where an op needs a tensor: the error names op and argument."""

from __future__ import annotations

import pytest
import torch

from tidegate import ops


def arguments() -> dict[str, dict[str, torch.Tensor | None]]:
    """Per op, what it cannot do without."""
    x, small = torch.randn(2, 5, 4), torch.rand(4)
    heads, gates = torch.randn(2, 5, 3, 16), -torch.rand(2, 5, 3)
    return {
        "linear_scan": {"x": x, "a": x.sigmoid()},
        "hgru": {"c": x, "f": x},
        "lru_scan": {"x": x, "nu_log": small, "gamma_log": small, "theta_log": None},
        "wkv4": {"w": small, "u": small, "k": x, "v": x},
        "gated_rnn": {"z": x, "x": x, "w_zh": torch.randn(4, 4)},
        "hgrn2": {"q": heads, "f": heads, "v": heads},
        "gated_linear_attention": {"q": heads, "k": heads, "v": heads, "log_f": -heads.exp()},
        "forgetting_attention": {"q": heads, "k": heads, "v": heads, "log_f": gates},
    }


@pytest.mark.parametrize("mode", ["plain", "gradients", "inference"])
@pytest.mark.parametrize("op", arguments())
def test_none_for_a_tensor_is_named(op: str, mode: str) -> None:
    given = arguments()[op]
    for tensor in given.values():
        if tensor is not None:
            tensor.requires_grad_(mode == "gradients")
    with torch.inference_mode(mode == "inference"):
        check(op, given)


def check(op: str, given: dict[str, torch.Tensor | None]) -> None:
    """Without any one of its tensors the op says which."""
    getattr(ops, op)(**given)
    for name in (name for name, tensor in given.items() if tensor is not None):
        with pytest.raises(RuntimeError, match=f"^{op}: {name} must be a tensor, got"):
            getattr(ops, op)(**{**given, name: None})
