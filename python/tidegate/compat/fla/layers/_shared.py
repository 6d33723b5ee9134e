"""What the layers share: norms under fla's names, caches by fla's protocol, padded batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._common import no_counterpart


class GatedRMSNorm(nn.Module):
    """``rms_norm(x) * weight * silu(g)``, in float32: fla's ``FusedRMSNormGated``."""

    def __init__(self, hidden_size: int, elementwise_affine: bool | None, eps: float) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        weight = nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return (rms_norm(x, self.weight, self.eps) * F.silu(_wide(g))).to(x.dtype)


class RMSNorm(nn.Module):
    """``rms_norm(x) * weight``, with a float32 weight: fla's ``RMSNorm``."""

    def __init__(self, hidden_size: int, elementwise_affine: bool | None, eps: float) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        ones = torch.ones(hidden_size, dtype=torch.float32) if elementwise_affine else None
        self.register_parameter("weight", None if ones is None else nn.Parameter(ones))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps).to(x.dtype)


class HeadRMSNorm(nn.Module):
    """RMSNorm of each of `num_groups` equal parts of x: fla's ``GroupNorm(is_rms_norm=True)``."""

    def __init__(self, num_groups: int, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_groups, self.hidden_size, self.eps = num_groups, hidden_size, eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        y = rms_norm(x.unflatten(-1, (self.num_groups, -1)), None, self.eps).flatten(-2)
        return (y * _wide(self.weight)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x's last dimension, in float32 or float64."""
    x = _wide(x)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.to(y.dtype)


def refuse_short_conv(owner: str, use_short_conv: bool) -> None:
    if use_short_conv:
        raise no_counterpart(owner, "use_short_conv=True", "a short convolution")


def check_mask(attention_mask: Tensor | None) -> None:
    assert attention_mask is None or attention_mask.dim() == 2, (
        "Expected attention_mask as a 0-1 matrix with shape [batch_size, seq_len] for padding "
        "purposes (0 indicating padding). Arbitrary attention masks of shape "
        "[batch_size, seq_len, seq_len] are not allowed."
    )


def layer_cache(module: nn.Module, past_key_values: Any) -> Any:
    """What the cache holds of this layer, None where it holds nothing yet."""
    if past_key_values is None:
        return None
    if module.layer_idx is None:
        name = type(module).__name__
        raise ValueError(f"{name} requires `layer_idx` when `past_key_values` is provided.")
    held = len(past_key_values) > module.layer_idx
    return past_key_values[module.layer_idx] if held else None


def update_cache(module: nn.Module, past_key_values: Any, state: Tensor | None, count: int) -> None:
    if past_key_values is not None:
        past_key_values.update(
            recurrent_state=state, conv_state=None, layer_idx=module.layer_idx, offset=count
        )


class Unpadded:
    """The tokens of x ``[B, T, D]`` that the last T columns of a 0-1 mask keep, end to end.

    x: ``[1, tokens, D]``; cu_seqlens ``[B + 1]``. Without a mask, or where the caller packed the
    batch already, x and cu_seqlens as they were given.
    """

    def __init__(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        self._shape = x.shape[:2]
        self._places: Tensor | None = None
        if mask is not None and cu_seqlens is None:
            kept = mask[:, -x.shape[1] :].bool()
            self._places = kept.flatten().nonzero().squeeze(-1)
            cu_seqlens = F.pad(kept.sum(1).cumsum(0), (1, 0))
            x = x.flatten(0, 1)[self._places][None]
        self.x, self.cu_seqlens = x, cu_seqlens

    def pad(self, y: Tensor) -> Tensor:
        """y ``[1, tokens, ...]`` back at its places, zeros elsewhere: ``[B, T, ...]``."""
        if self._places is None:
            return y
        batch, time = self._shape
        out = y.new_zeros(batch * time, *y.shape[2:]).index_copy(0, self._places, y[0])
        return out.unflatten(0, (batch, time))
