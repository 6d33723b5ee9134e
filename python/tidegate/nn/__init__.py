"""Token mixers, channel mixers and their helpers: torch.nn.Modules over `tidegate.ops`.

Every token mixer: ``y, state = mixer(x, state=None, *, gamma=None, cu_seqlens=None)`` with x, y
``[B, T, dim]``; ``y = mixer.step(x, state, gamma=None)`` with x ``[B, dim]``, the state updated in
place; ``state = mixer.init_state(batch, device=..., dtype=..., capacity=...)``.

``reset_parameters()`` draws every parameter anew, in a documented order, from torch's default CPU
generator, and rebuilds buffers; constructing a module does the same.
"""

from . import init
from ._attention_state import AttentionState
from .attention import Attention
from .forgetting_attention import ForgettingAttention
from .gated_linear_attention import GatedLinearAttention, GLAState
from .gated_linear_rnn import GatedLinearRNN
from .gated_rnn import GatedRNN
from .glu import GLU
from .hgru import HGRU
from .hgru2 import HGRU2
from .lower_bounds import LowerBounds
from .lru import LRU, SLRU
from .rwkv4 import RWKV4

__all__ = [
    "GLU",
    "HGRU",
    "HGRU2",
    "Attention",
    "AttentionState",
    "ForgettingAttention",
    "GLAState",
    "GatedLinearAttention",
    "GatedLinearRNN",
    "GatedRNN",
    "LRU",
    "LowerBounds",
    "RWKV4",
    "SLRU",
    "init",
]
