"""Products with a weight, and what stands before them: what modules use of these.

The weight may be float32 beside 16-bit rows. It is rounded once a call then, and its gradient stays
in the float32 in which it is summed: autograd of a weight that autocast rounds rounds its gradient,
too, and widens it again in a pass of its own.
"""

import torch
from torch import Tensor

from ._checks import check_number, check_switch, check_tensor, check_text


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y = x weight^T + bias``.

    Args:
        x: [..., K]; float32, float64, bfloat16 or float16.
        weight: [N, K] in x's dtype or float32.
        bias: [N] likewise, or None.

    Returns:
        y [..., N] in x's dtype. Gradients flow to all three, once, and have their dtypes. Inside
        autocast x goes to autocast's dtype; a float32 weight and bias stay. The backward pass keeps
        x and the weight in x's dtype.
    """
    check_tensor("linear", "x", x)
    check_tensor("linear", "weight", weight)
    return torch.ops.tidegate.linear(x, weight, bias)


def glu_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """``linear(glu(x, activation), weight, bias)``, x [..., 2K]. The backward pass keeps x and not
    the product of its halves, which it makes again beside the gradient of x, in the same pass."""
    check_tensor("glu_linear", "x", x)
    check_tensor("glu_linear", "weight", weight)
    check_text("glu_linear", "activation", activation)
    return torch.ops.tidegate.glu_linear(x, weight, bias, activation)


def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    kind: str = "rms",
    gate_activation: str = "silu",
    gate_first: bool = False,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``linear(norm(x, norm_weight, norm_bias, gate, ...), weight, bias)``, x [..., K].

    The backward pass keeps x and the gate and not what the norm makes of them, which it makes again
    beside the gradient of x, in the same pass. dtype: of the result, and of what is multiplied.
    """
    check_tensor("norm_linear", "x", x)
    check_tensor("norm_linear", "weight", weight)
    check_text("norm_linear", "kind", kind)
    check_text("norm_linear", "gate_activation", gate_activation)
    check_switch("norm_linear", "gate_first", gate_first)
    check_number("norm_linear", "eps", eps)
    return torch.ops.tidegate.norm_linear(
        *(x, weight, bias, norm_weight, norm_bias, gate),
        *(kind, gate_activation, gate_first, eps, dtype),
    )
