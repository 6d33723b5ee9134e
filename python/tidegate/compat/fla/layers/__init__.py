"""flash-linear-attention's layers: its constructors, parameter names, calls and caches."""

from .forgetting_attn import ForgettingAttention
from .gla import GatedLinearAttention
from .hgrn import HGRNAttention
from .hgrn2 import HGRN2Attention

__all__ = ["ForgettingAttention", "GatedLinearAttention", "HGRN2Attention", "HGRNAttention"]
