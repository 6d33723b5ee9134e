"""fla's layer of gated linear attention."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..._common import no_counterpart
from ..ops import chunk_gla
from ._shared import (
    GatedRMSNorm,
    RMSNorm,
    Unpadded,
    check_mask,
    layer_cache,
    refuse_short_conv,
    update_cache,
)

# fla's ACT2FN.
_ACTIVATIONS = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "bias_gelu": lambda x: F.gelu(x, approximate="tanh"),
    "sqrelu": lambda x: F.relu(x).square(),
}


def _activation(option: str, name: str):
    if name not in _ACTIVATIONS:
        raise no_counterpart("GatedLinearAttention", f"{option}={name!r}")
    return _ACTIVATIONS[name]


class GatedLinearAttention(nn.Module):
    """``fla.layers.GatedLinearAttention`` (GLA, arXiv 2312.06635), with its parameters' names:
    ``q_proj, k_proj, v_proj, g_proj, gk_proj.0, gk_proj.1, g_norm_swish_gate`` or ``g_norm``,
    ``o_proj``. A short convolution has no counterpart."""

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
        layer_idx: int = None,
    ) -> GatedLinearAttention:
        super().__init__()
        refuse_short_conv("GatedLinearAttention", use_short_conv)
        assert mode in ["chunk", "fused_recurrent", "fused_chunk"], f"Not supported mode `{mode}`."
        self.mode = mode
        self.hidden_size = hidden_size
        self.expand_k, self.expand_v = expand_k, expand_v
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        assert num_heads % self.num_kv_heads == 0, "num_heads must be divisible by num_kv_heads"
        self.num_kv_groups = num_heads // self.num_kv_heads
        self.feature_map_fn = None
        if feature_map is not None:
            self.feature_map_fn = _activation("feature_map", feature_map)
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.use_output_gate = use_output_gate
        self.clamp_min = clamp_min
        self.layer_idx = layer_idx
        self._set_widths()
        self._make_projections(gate_low_rank_dim)
        self.fuse_norm_and_gate = gate_fn == "swish" and fuse_norm and use_output_gate
        if self.fuse_norm_and_gate:
            self.g_norm_swish_gate = GatedRMSNorm(self.head_v_dim, elementwise_affine, norm_eps)
        else:
            self.g_norm = RMSNorm(self.head_v_dim, elementwise_affine, norm_eps)
            self.gate_fn = _activation("gate_fn", gate_fn)
        self.gate_logit_normalizer = gate_logit_normalizer

    def _set_widths(self) -> None:
        key_dim, value_dim = self.hidden_size * self.expand_k, self.hidden_size * self.expand_v
        self.key_dim, self.value_dim = round(key_dim), round(value_dim)
        for name, exact, width in (
            ("expand_k", key_dim, self.key_dim),
            ("expand_v", value_dim, self.value_dim),
        ):
            assert math.isclose(exact, width), (
                f"`hidden_size * {name}` must be an integer, got {exact}."
            )
            assert width % self.num_heads == 0, (
                f"{name}: width {width} must be divisible by num_heads of {self.num_heads}"
            )
        self.key_dim_per_group = self.key_dim // self.num_kv_groups
        self.value_dim_per_group = self.value_dim // self.num_kv_groups
        self.head_k_dim = self.key_dim // self.num_heads
        self.head_v_dim = self.value_dim // self.num_heads

    def _make_projections(self, rank: int) -> None:
        dim = self.hidden_size
        self.q_proj = nn.Linear(dim, self.key_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.key_dim_per_group, bias=False)
        self.v_proj = nn.Linear(dim, self.value_dim_per_group, bias=False)
        if self.use_output_gate:
            self.g_proj = nn.Linear(dim, self.value_dim, bias=False)
        self.gk_proj = nn.Sequential(
            nn.Linear(dim, rank, bias=False),
            nn.Linear(rank, self.key_dim_per_group, bias=True),
        )
        self.o_proj = nn.Linear(self.value_dim, dim, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs,
    ):
        """hidden_states ``[B, T, hidden_size]`` -> (the same shape, None, past_key_values)."""
        check_mask(attention_mask)
        cache = layer_cache(self, past_key_values)
        tokens = Unpadded(hidden_states, attention_mask, kwargs.get("cu_seqlens"))
        q, k, v, gk = self._operands(tokens.x)
        o, state = chunk_gla(
            q,
            k,
            v,
            gk,
            initial_state=None if cache is None else cache["recurrent_state"],
            output_final_state=use_cache,
            state_v_first=True,
            cu_seqlens=tokens.cu_seqlens,
        )
        update_cache(self, past_key_values, state, hidden_states.shape[1])
        return tokens.pad(self.o_proj(self._output(o, tokens.x))), None, past_key_values

    def _operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v and the log gate ``[..., num_heads, K or V]``."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_k_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_k_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_v_dim))
        gk = self.gk_proj(x).unflatten(-1, (-1, self.head_k_dim))
        if self.num_kv_groups > 1:
            k, v, gk = (t.repeat_interleave(self.num_kv_groups, -2) for t in (k, v, gk))
        gk = F.logsigmoid(gk) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            gk = gk.clamp_min(self.clamp_min)
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        return q, k, v, gk

    def _output(self, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Norm and gate of o ``[..., num_heads, V]``."""
        if not self.use_output_gate:
            return self.g_norm(o).flatten(-2)
        g = self.g_proj(x)
        if self.fuse_norm_and_gate:
            return self.g_norm_swish_gate(o, g.unflatten(-1, (-1, self.head_v_dim))).flatten(-2)
        return self.g_norm(o).flatten(-2) * self.gate_fn(g)
