"""fla's HGRN2 layer."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..ops import chunk_gla
from ._shared import (
    RMSNorm,
    Unpadded,
    check_mask,
    layer_cache,
    refuse_short_conv,
    rms_norm,
    update_cache,
)

# fla's fused norm and projection are not told the layer's epsilon: they take their own.
_FUSED_NORM_EPS = 1e-5


class HGRN2Attention(nn.Module):
    """``fla.layers.HGRN2Attention`` (HGRN2, arXiv 2404.07904), with its parameters' names:
    ``q_proj, f_proj, i_proj, g_norm, o_proj``. A short convolution has no counterpart."""

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int = None,
    ) -> HGRN2Attention:
        super().__init__()
        refuse_short_conv("HGRN2Attention", use_short_conv)
        assert mode in ["chunk", "fused_recurrent", "fused_chunk"], f"Not supported mode `{mode}`."
        if expand_ratio is not None:
            num_heads = hidden_size // expand_ratio
        elif num_heads is not None:
            expand_ratio = hidden_size // num_heads
        else:
            raise RuntimeError("One of `expand_ratio` or `num_heads` should be provided.")
        self.mode = mode
        self.hidden_size = hidden_size
        self.num_heads, self.expand_ratio = num_heads, expand_ratio
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.forget_dim = int(num_heads * expand_ratio)
        self.input_dim = hidden_size
        self.layer_idx = layer_idx
        assert hidden_size % num_heads == 0, (
            f"input dim must be divisible by num_heads of {num_heads}"
        )
        self.head_f_dim = expand_ratio
        self.head_i_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, self.forget_dim, bias=False)
        self.f_proj = nn.Linear(hidden_size, self.forget_dim, bias=False)
        self.i_proj = nn.Linear(hidden_size, self.input_dim, bias=False)
        self.g_norm = RMSNorm(hidden_size, elementwise_affine, norm_eps)
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
        tokens = Unpadded(hidden_states, attention_mask, kwargs.get("cu_seqlens"))
        x = tokens.x
        q, i = F.silu(self.q_proj(x)), self.i_proj(x)
        g = F.logsigmoid(self.f_proj(x))
        if lower_bound is not None and self.layer_idx > 0:  # the first layer's is zero
            g = torch.logaddexp(lower_bound.log(), torch.log1p(-lower_bound) + g)
        k = -torch.expm1(g).to(i)
        q, k, g = (t.unflatten(-1, (-1, self.head_f_dim)) for t in (q, k, g))
        o, state = chunk_gla(
            q,
            k,
            i.unflatten(-1, (-1, self.head_i_dim)),
            g,
            initial_state=None if cache is None else cache["recurrent_state"],
            output_final_state=use_cache,
            state_v_first=True,
            cu_seqlens=tokens.cu_seqlens,
        )
        update_cache(self, past_key_values, state, hidden_states.shape[1])
        o = rms_norm(o.flatten(-2), self.g_norm.weight, _FUSED_NORM_EPS).to(o.dtype)
        return tokens.pad(self.o_proj(o)), None, past_key_values

    def state_size(self, **kwargs) -> int:
        return self.input_dim * self.expand_ratio
