"""flash-linear-attention's ops and layers (the signatures of fla-core 0.6.0), backed by tidegate.

``from fla.ops.gla import chunk_gla`` becomes ``from tidegate.compat.fla import chunk_gla``, and
``from fla.layers import HGRNAttention`` becomes ``from tidegate.compat.fla import HGRNAttention``.
"""

from .layers import ForgettingAttention, GatedLinearAttention, HGRN2Attention, HGRNAttention
from .ops import (
    chunk_gla,
    chunk_hgrn,
    fused_chunk_gla,
    fused_recurrent_gla,
    fused_recurrent_hgrn,
    fused_recurrent_rwkv4,
    parallel_forgetting_attn,
)

__all__ = [
    "ForgettingAttention",
    "GatedLinearAttention",
    "HGRN2Attention",
    "HGRNAttention",
    "chunk_gla",
    "chunk_hgrn",
    "fused_chunk_gla",
    "fused_recurrent_gla",
    "fused_recurrent_hgrn",
    "fused_recurrent_rwkv4",
    "parallel_forgetting_attn",
]
