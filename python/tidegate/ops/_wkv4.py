"""The recurrence of RWKV-4: `wkv4`."""

import torch
from torch import Tensor

from ._checks import offsets_on


def wkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RWKV-4's token mixing (arXiv 2305.13048, eq. 16): a mean of the values so far, whose weights
    decay, with a bonus for the newest one.

    ``y_t = exp(-w) y_{t-1} + exp(k_t) v_t``, ``z_t = exp(-w) z_{t-1} + exp(k_t)``
    ``o_t = (y_{t-1} + exp(u + k_t) v_t) / (z_{t-1} + exp(u + k_t))``

    Args:
        w: [D] rates of decay a step, in natural logarithms, w >= 0; float32 or k's dtype.
        u: [D] the bonus, a natural logarithm; float32 or k's dtype.
        k: [B, T, D] natural logarithms of the weights, of any size; float32, float64, bfloat16 or
            float16.
        v: [B, T, D] in k's dtype.
        state: [N, 3, D]: y and z, scaled by exp(-m), and m; empty when None, as is one of zeros;
            float32 or k's dtype. m is a scaling exponent: its gradient is zero.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on k's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        o [B, T, D] in k's dtype and the final state [N, 3, D] in float32 (float64 for float64); at
        T = 0 the state is a copy of the given one, zeros when there is none.

    Weights are taken relative to a running scaling exponent (on CUDA within a factor of 2^40 of
    it), so k may span any range; on CUDA values v up to about 2^60 in size stay finite. Cost
    O(B T D): reads k and v once, writes o once. Accumulates in the state's dtype; bitwise
    deterministic; training keeps the inputs and, for every eighth token, the state that enters it.
    """
    cu_seqlens = offsets_on("wkv4", cu_seqlens, k)
    return torch.ops.tidegate.wkv4(w, u, k, v, state, cu_seqlens)


def wkv4_step(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """One token of :func:`wkv4`, for decoding; the state is updated in place.

    Args:
        w: [D].
        u: [D].
        k: [B, D].
        v: [B, D].
        state: [B, 3, D].

    Returns:
        o in k's dtype, [B, D]. Has no gradient: raises when an argument requires one and gradients
        are recorded.
    """
    return torch.ops.tidegate.wkv4_step(w, u, k, v, state)
