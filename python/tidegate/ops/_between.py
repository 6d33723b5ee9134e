"""What lies between the mixers and after them: norms, gated linear units, the loss."""

import torch
from torch import Tensor

from ._checks import check_number, check_switch, check_tensor, check_text


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: str = "rms",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """A residual connection and the norm that follows it.

    ``residual_out = residual + x``, rounded to residual's dtype
    ``y = norm(residual_out, weight, bias, kind=kind, eps=eps)``

    Args:
        x: [..., D] as in :func:`norm`: what a layer adds.
        residual: like x, in x's dtype or float32 (float64 for float64): a residual stream may be
            wider than what is computed from it.
        weight, bias, kind, eps: as in :func:`norm`.

    Returns:
        (y in x's dtype, residual_out in residual's). Gradients flow through both to x, residual,
        weight and bias. Inside autocast x goes to autocast's dtype, and a float32 residual stays.
        Cost: one pass that reads x and residual and writes both results; the backward pass reads
        residual_out and the gradients of both, and writes one gradient (two where the dtypes
        differ).
    """
    check_text("add_norm", "kind", kind)
    check_number("add_norm", "eps", eps)
    return torch.ops.tidegate.add_norm(x, residual, weight, bias, kind, eps)


def norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    kind: str = "rms",
    gate_activation: str = "silu",
    gate_first: bool = False,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A norm of every row of x (LayerNorm, arXiv 1607.06450; RMSNorm, arXiv 1910.07467), with an
    optional gate before or after it.

    ``u = x``, or ``act(gate) * x`` with gate_first
    ``y = (u - mean(u)) / sqrt(var(u) + eps) * weight + bias`` (kind="layer")
    ``y = u / sqrt(mean(u^2) + eps) * weight + bias`` (kind="rms")
    ``y = act(gate) * y``, without gate_first

    Args:
        x: [..., D]; float32, float64, bfloat16 or float16. Any strides with a unit last one are
            read in place, where there are up to three dimensions before it.
        weight, bias: [D]; or [H, D] beside x [..., H, D], each head with its own; both of one
            shape. In x's dtype, y's or float32. None: one, and zero.
        gate: logits like x, or None.
        kind: "layer" or "rms".
        gate_activation: "silu" or "sigmoid".
        gate_first: the gate before the norm, instead of after it.
        eps: 0 or more.
        dtype: of y; None is x's, and inside autocast autocast's. Beside a float32 x without a gate
            it may be bfloat16 or float16.

    Returns:
        y [..., D]. Computed in float32 (float64 for float64), rounded once. Gradients flow to x,
        weight, bias and gate. Inside autocast, x and weights that are float32 stay so without a
        gate. Cost: one pass that reads x and gate and writes y; the backward pass reads these and
        dy and writes dx and dgate, and keeps nothing but them.
    """
    check_tensor("norm", "x", x)
    check_text("norm", "kind", kind)
    check_text("norm", "gate_activation", gate_activation)
    check_switch("norm", "gate_first", gate_first)
    check_number("norm", "eps", eps)
    return torch.ops.tidegate.norm(
        x, weight, bias, gate, kind, gate_activation, gate_first, eps, dtype
    )


def glu(x: Tensor, activation: str = "silu") -> Tensor:
    """The gated linear unit's product (arXiv 2002.05202), from the projection that makes both
    halves.

    ``y = act(gate) * value``, ``x = [gate | value]``

    Args:
        x: [..., 2F]; float32, float64, bfloat16 or float16. Any strides with a unit last one are
            read in place, where there are up to three dimensions before it.
        activation: "silu", "sigmoid" or "none".

    Returns:
        y [..., F] in x's dtype, rounded once. The gradient flows to x; the backward pass keeps x
        alone. Cost: one pass each way; backward reads x and dy and writes dx.
    """
    check_tensor("glu", "x", x)
    check_text("glu", "activation", activation)
    return torch.ops.tidegate.glu(x, activation)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of a linear layer's logits ``z = x weight^T + bias``, of which a chunk of
    rows exists at a time: a language model's head and loss.

    ``lse = log sum_j exp(z_j)``; with label y and e = label_smoothing a row's loss is
    ``lse - (1 - e) z_y - e mean_j(z_j) + z_loss lse^2``

    Args:
        x: [..., D], at least two-dimensional; float32, float64, bfloat16 or float16.
        weight: [V, D], x's dtype or float32; where it is not x's, one copy in x's dtype is made a
            call, and its gradient stays float32.
        labels: int32 or int64 of x's shape without D, in [0, V) or ignore_index. One elsewhere is
            an error on the CPU, and makes the loss NaN on CUDA.
        bias: [V], x's dtype or float32.
        ignore_index: rows with this label have no loss and no gradient.
        label_smoothing: in [0, 1]; so much of a label's weight goes to all classes evenly.
        z_loss: at least 0; keeps the logarithm of the softmax's sum near zero.
        reduction: "mean" over the labels that are not ignored (zero when there is none), "sum", or
            "none": a loss a label, zeros where it is ignored.

    Returns:
        The loss in float32 (float64 for float64), [] or labels' shape.

    For N labels 6 N D V floating-point operations with gradients, which the forward pass makes
    ("none": 8 N D V, where the backward pass makes the logits anew), and 2 N D V without. No tensor
    of N x V exists: a chunk of logits has at most 512 MiB (CUDA) or 128 MiB (CPU). On CUDA logits
    are rounded to x's dtype; sums are float32 (float64 for float64). Bitwise deterministic.
    """
    check_text("linear_cross_entropy", "reduction", reduction)
    for name, number in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        check_number("linear_cross_entropy", name, number)
    return torch.ops.tidegate.linear_cross_entropy(
        x, weight, labels, bias, ignore_index, label_smoothing, z_loss, reduction
    )
