"""`forgetting_attention`, and the rotation of queries and keys."""

import torch
from torch import Tensor

from ._checks import check_number, check_switch, offsets_on


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    prune: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Forgetting attention (Forgetting Transformer, arXiv 2503.02130, eq. 10-12): causal
    softmax attention whose scores lose what the forget gates between key and query have forgotten.
    For every head, with ``c = cumsum(log_f)`` over time and query i at position p = i + Tk - Tq:

    ``o_i = sum_{j <= p} softmax_j(scale * q_i . k_j + c_p - c_j) v_j``

    Args:
        q: [B, Tq, Hq, D], float32, float64, bfloat16 or float16. D from 1 to 256.
        k: [B, Tk, Hkv, D] in q's dtype; Hkv divides Hq, and query head h reads head
            h // (Hq // Hkv).
        v: like k.
        log_f: [B, Tk, Hq] natural logarithms of the forget gates, at most 0; float32 or q's dtype.
            What is below -1e5, -inf included, counts as -1e5: it shuts any gate. The first token's
            gate is in no sum.
        scale: above 0; ``D ** -0.5`` when None.
        window: a query sees itself and the window - 1 keys before it; all keys when None.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to Tq, on q's device or the CPU: N
            sequences packed along time, B = 1. Empty sequences are allowed.
        cu_seqlens_k: the same for keys, rising to Tk; cu_seqlens when None, and then Tk = Tq.
            Tq <= Tk in every sequence: the last query is on the last key.
        prune: in [0, 1). Leaves out keys whose weights in a row are proven to be below prune
            together: an element of o changes by at most ``2 * prune * max|v|``. Worth it with gates
            that forget.
        return_lse: return (o, lse).

    Returns:
        o [B, Tq, Hq, D] in q's dtype; with return_lse also lse [B, Hq, Tq] in float32 (float64 for
        float64): the natural log of the sum of exponentials of a row's scores, c_p - c_j included.

    Memory is linear in Tq and Tk; cost O(B Hq Tq Tk D), less what window and prune leave out. The
    forward pass is bitwise deterministic; so is the backward pass on the CPU, and on CUDA under
    ``torch.use_deterministic_algorithms(True)``, while its default may add up dq and the row sums
    behind dlog_f with atomics. Training keeps the inputs, o and lse. Any strides with a unit last
    one are read in place, but on CUDA 16-bit rows are copied first where they do not begin at
    multiples of 16 bytes, or where D is below 16 or no multiple of 8 (padded with zeros).
    """
    check_number("forgetting_attention", "scale", scale)
    check_number("forgetting_attention", "window", window)
    check_number("forgetting_attention", "prune", prune)
    check_switch("forgetting_attention", "return_lse", return_lse)
    cu_seqlens = offsets_on("forgetting_attention", cu_seqlens, q)
    cu_seqlens_k = offsets_on("forgetting_attention", cu_seqlens_k, q, "cu_seqlens_k")
    o, lse = torch.ops.tidegate.forgetting_attention(
        q, k, v, log_f, scale, window, cu_seqlens, cu_seqlens_k, prune
    )
    return (o, lse) if return_lse else o


def forgetting_attention_step(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    gate_cache: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    prune: float | None = None,
    key_norms: Tensor | None = None,
) -> Tensor:
    """The newest token of :func:`forgetting_attention` against a cache, for decoding.

    Args:
        q: [B, Hq, D].
        k_cache: [B, Tmax, Hkv, D] in q's dtype.
        v_cache: like k_cache.
        gate_cache: [B, Tmax, Hq], each token's own log_f, in float32 (float64 for float64). Sums
            are taken here, from the newest token backwards, so that they keep their digits however
            long the cache is.
        lengths: int32 [B], the number of tokens in each row of the cache, the current one included;
            0 gives o = 0. What lies behind them is never read. Below 0 counts as 0 and above Tmax
            as Tmax; with TIDEGATE_DEBUG=1 they raise, and so does a gate above 0.
        scale: above 0; ``D ** -0.5`` when None.
        window: as in :func:`forgetting_attention`.
        prune: as in :func:`forgetting_attention`; needs key_norms. The oldest keys whose weights
            are proven to be below prune together are not read, nor are their values: an element of
            o changes by at most ``2 * prune * max|v|``.
        key_norms: [B, Hkv] in gate_cache's dtype, any strides: at least the Euclidean length of the
            longest key that a row of the cache holds of each head, which is what bounds the scores
            of keys that are not read. A norm of the keys gives it: RMS normalisation with weights w
            makes none longer than ``max|w| * sqrt(D)``. Too small a bound leaves out keys that
            matter (with TIDEGATE_DEBUG=1 it raises).

    Returns:
        o [B, Hq, D]. Has no gradient: raises when an argument requires one and gradients are
        recorded. On CUDA, reads the cache once for up to eight query heads a key head (four on CUDA
        cores).
    """
    check_number("forgetting_attention_step", "scale", scale)
    check_number("forgetting_attention_step", "window", window)
    check_number("forgetting_attention_step", "prune", prune)
    return torch.ops.tidegate.forgetting_attention_step(
        q, k_cache, v_cache, gate_cache, lengths, scale, window, prune, key_norms
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotary positions (arXiv 2104.09864): channels i < D/2 and i + D/2 of every head turned by an
    angle.

    ``y_i = x_i cos_i - x_{i+D/2} sin_i``, ``y_{i+D/2} = x_{i+D/2} cos_i + x_i sin_i``

    Args:
        x: [B, T, H, D], D even; float32, float64, bfloat16 or float16. Any strides with a unit last
            one are read in place.
        cos, sin: [1, T, D/2] or [B, T, D/2], float32 (float64 for float64), of the angles in
            radians; constants: no gradient flows to them.
        inverse: turn by the angles' negatives, which is also the gradient.

    Returns:
        y [B, T, H, D] in x's dtype, rounded once. Differentiable as often as asked. Cost O(BTHD);
        one pass that reads x and writes y.
    """
    check_switch("rotary", "inverse", inverse)
    return torch.ops.tidegate.rotary(x, cos, sin, inverse)
