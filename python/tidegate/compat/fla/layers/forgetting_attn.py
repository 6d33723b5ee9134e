"""fla's layer of forgetting attention."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from .... import ops
from ._shared import HeadRMSNorm, Unpadded, check_mask


class ForgettingAttention(nn.Module):
    """``fla.layers.ForgettingAttention`` (Forgetting Transformer, arXiv 2503.02130), with its
    parameters' names: ``q_proj, k_proj, v_proj, f_proj, g_proj, q_norm, k_norm, o_proj``.

    As in fla, window_size bounds what a cache keeps, and so decoding alone; a whole sequence
    attends to all of its tokens. The log gates are cached beside keys and values.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window_size: int | None = None,
        use_output_gate: bool = False,
        layer_idx: int = None,
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        assert num_heads % self.num_kv_heads == 0, "num_heads must be divisible by num_kv_heads"
        self.num_kv_groups = num_heads // self.num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.kv_dim = self.num_kv_heads * self.head_dim
        self.qkv_bias, self.qk_norm = qkv_bias, qk_norm
        self.window_size = window_size
        self.use_output_gate = use_output_gate
        self.layer_idx = layer_idx
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.f_proj = nn.Linear(hidden_size, num_heads, bias=True)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if qk_norm:
            self.q_norm = HeadRMSNorm(num_heads, hidden_size)
            self.k_norm = HeadRMSNorm(self.num_kv_heads, self.kv_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.LongTensor | None = None,
        past_key_values=None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs,
    ):
        """hidden_states ``[B, T, hidden_size]`` -> (the same shape, None, past_key_values)."""
        check_mask(attention_mask)
        count = hidden_states.shape[1]
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        f = F.logsigmoid(self.f_proj(hidden_states).float())
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        cu_seqlens = kwargs.get("cu_seqlens")
        k, v, f = self._cached(k, v, f, past_key_values, cu_seqlens)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        o = self._attend(q, k, v, f, attention_mask, cu_seqlens).flatten(-2)
        assert o.shape[1] == count
        if self.use_output_gate:
            o = self.g_proj(hidden_states).sigmoid() * o
        return self.o_proj(o), None, past_key_values

    def _cached(self, k, v, f, past_key_values, cu_seqlens):
        """Keys, values and log gates of all tokens that the cache holds, the new ones included."""
        if past_key_values is None:
            return k, v, f
        assert cu_seqlens is None, (
            "cu_seqlens should not be provided when past_key_values is not None"
        )
        has_content = past_key_values.get_seq_length(self.layer_idx) > 0
        assert not has_content or k.shape[1] == 1, "only support q_len == 1 for decoding"
        state = past_key_values.update(
            attn_state=(k, v, f),
            layer_idx=self.layer_idx,
            offset=k.shape[1],
            cache_kwargs={"window_size": self.window_size},
        )
        return state["attn_state"] if has_content else (k, v, f)

    def _attend(self, q, k, v, f, attention_mask, cu_seqlens):
        if cu_seqlens is not None or attention_mask is None:
            return ops.forgetting_attention(q, k, v, f, cu_seqlens=cu_seqlens)
        keys = attention_mask[:, -k.shape[1] :]
        packed_k, packed_v, packed_f = (
            Unpadded(t, keys, None) for t in (k.flatten(-2), v.flatten(-2), f)
        )
        # Queries are the last of the keys, of which a mask may leave some out.
        queries = Unpadded(q.flatten(-2), keys, None)
        o = ops.forgetting_attention(
            queries.x.unflatten(-1, (-1, self.head_dim)),
            packed_k.x.unflatten(-1, (-1, self.head_dim)),
            packed_v.x.unflatten(-1, (-1, self.head_dim)),
            packed_f.x,
            cu_seqlens=queries.cu_seqlens,
            cu_seqlens_k=packed_k.cu_seqlens,
        )
        return queries.pad(o)
