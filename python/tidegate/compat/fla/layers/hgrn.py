"""fla's HGRN layer."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..ops import chunk_hgrn, fused_recurrent_hgrn
from ._shared import (
    GatedRMSNorm,
    check_mask,
    layer_cache,
    refuse_short_conv,
    update_cache,
)


class HGRNAttention(nn.Module):
    """``fla.layers.HGRNAttention`` (HGRN, arXiv 2311.04823), with its parameters' names: ``i_proj,
    f_proj, g_proj, g_norm, o_proj``. A short convolution has no counterpart."""

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_ratio: int | None = 1,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int = None,
    ) -> HGRNAttention:
        super().__init__()
        refuse_short_conv("HGRNAttention", use_short_conv)
        assert mode in ["chunk", "fused_recurrent"], f"Not supported mode `{mode}`."
        self.mode = mode
        self.hidden_size = hidden_size
        self.expand_ratio = expand_ratio
        self.input_dim = int(hidden_size * expand_ratio)
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.layer_idx = layer_idx
        self.i_proj = nn.Linear(hidden_size, self.input_dim, bias=False)
        self.f_proj = nn.Linear(hidden_size, self.input_dim, bias=False)
        self.g_proj = nn.Linear(hidden_size, self.input_dim, bias=False)
        self.g_norm = GatedRMSNorm(self.input_dim, elementwise_affine, norm_eps)
        self.o_proj = nn.Linear(self.input_dim, hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        lower_bound: torch.Tensor | None = None,
        **kwargs,
    ):
        """hidden_states ``[B, T, hidden_size]`` -> (the same shape, None, past_key_values)."""
        check_mask(attention_mask)
        cache = layer_cache(self, past_key_values)
        cu_seqlens = kwargs.get("cu_seqlens")
        i, f = self.i_proj(hidden_states), F.logsigmoid(self.f_proj(hidden_states))
        if lower_bound is not None and self.layer_idx > 0:  # the first layer's is zero
            f = torch.logaddexp(lower_bound.log(), torch.log1p(-lower_bound) + f).to(f)
        i = F.silu(i) * -torch.expm1(f)
        if attention_mask is not None:  # padding enters no state; on the left it decays zeros
            i = i * attention_mask[:, -i.shape[1] :, None].to(i.dtype)
        state = None if cache is None else cache["recurrent_state"]
        if cu_seqlens is None:
            o, state = chunk_hgrn(i, f, state, use_cache)
        else:
            o, state = fused_recurrent_hgrn(i, f, state, use_cache, cu_seqlens)
        update_cache(self, past_key_values, state, i.shape[1])
        return self.o_proj(self.g_norm(o, self.g_proj(hidden_states))), None, past_key_values

    def state_size(self, **kwargs) -> int:
        return self.input_dim
