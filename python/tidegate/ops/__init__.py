"""The ops as functions: ``torch.ops.tidegate.*`` with keyword arguments and offsets from the CPU.

Every recurrent op returns ``(output, final_state)``. The state is float32 (float64 for float64
inputs, complex for complex ones) and can be passed back as ``h0`` to go on. A step's ``state`` is
one that its op returned, or of any dtype that ``h0`` may have, and is overwritten (in another dtype
than the op's own it is converted and copied back). Gradients flow through every tensor argument and
both results, once: double backward raises (`rotary` and `linear_cross_entropy` are no recurrences:
see there). `norm`, `add_norm` and `glu` are what lies between them, each in one pass over memory.
Shapes: B batch, T time, D channels, H heads, K key and V value dimension of a head, N sequences (B,
or the number of packed ones). Wrong arguments raise ``RuntimeError`` with op, argument, expected
and given; with ``TIDEGATE_DEBUG=1`` also values that only a synchronisation can show
(``cu_seqlens`` on a GPU, ``gamma`` outside [0, 1), ``log_f`` above 0, ``theta`` or a parameter of
``lru_scan`` not finite, ``w`` of ``wkv4`` below 0, lengths of a cache).

A page an op in docs/ops has its equations, gradients, errors and an example;
:mod:`tidegate.reference` has each op once more in a few lines of torch.
"""

from .. import _library
from ._attention import forgetting_attention, forgetting_attention_step, rotary
from ._between import add_norm, glu, linear_cross_entropy, norm
from ._checks import packed_bounds  # noqa: F401 (the modules read it)
from ._gla import (
    gated_linear_attention,
    gated_linear_attention_step,
    hgrn2,
    hgrn2_qfv,  # noqa: F401 (the same)
    hgrn2_step,
)
from ._init import (
    init_chrono_,
    init_constant_,
    init_gumbel_softmax_,
    init_long_,
    init_lru_gamma_log_,
    init_lru_nu_log_,
    init_lru_theta_log_,
    init_normal_,
    init_rope_theta_,
    init_uniform_,
)
from ._linear import glu_linear, linear, norm_linear  # noqa: F401 (the same)
from ._rnn import gated_rnn, gated_rnn_step, gated_rnn_with_logits  # noqa: F401 (the same)
from ._scan import hgru, hgru_step, linear_scan, linear_scan_step, lru_scan, lru_scan_step
from ._wkv4 import wkv4, wkv4_step

__all__ = [
    "add_norm",
    "forgetting_attention",
    "forgetting_attention_step",
    "gated_linear_attention",
    "gated_linear_attention_step",
    "gated_rnn",
    "gated_rnn_step",
    "glu",
    "hgrn2",
    "hgrn2_step",
    "hgru",
    "hgru_step",
    "init_chrono_",
    "init_constant_",
    "init_gumbel_softmax_",
    "init_long_",
    "init_lru_gamma_log_",
    "init_lru_nu_log_",
    "init_lru_theta_log_",
    "init_normal_",
    "init_rope_theta_",
    "init_uniform_",
    "linear_cross_entropy",
    "linear_scan",
    "linear_scan_step",
    "lru_scan",
    "lru_scan_step",
    "norm",
    "rotary",
    "wkv4",
    "wkv4_step",
]

# What the modules read beside these.
_OF_MODULES = (
    *("gated_rnn_with_logits", "glu_linear", "hgrn2_qfv", "linear", "norm_linear"),
    "packed_bounds",
)
globals().update(_library.stand_ins([*__all__, *_OF_MODULES]))
