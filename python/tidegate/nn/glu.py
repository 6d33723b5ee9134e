"""The gated linear unit: the channel mixer of HGRN's blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ._common import (
    GLU_ACTIVATIONS,
    can_project,
    check_choice,
    check_positive,
    check_switch,
    make_linear,
    reset_linear,
)
from ._recompute import is_recomputing, remember


class GLU(nn.Module):
    """Gated linear unit: ``y = (act(x W_g + b_g) * (x W_v + b_v)) W_o + b_o``
    (Shazeer 2020; HGRN, section 3.1).

    Args:
        dim: width of x and y.
        hidden: width of the gated product; None is ``2 * dim``.
        activation: ``"silu"`` or ``"none"``. HGRN's language models have none, its image models
            SiLU.
        bias: whether the projections have biases.

    Shapes: x ``[..., dim]`` -> y ``[..., dim]``. Parameters: ``in_proj.weight``
    ``[2*hidden, dim]``, rows of the gate first, then of the value; ``out_proj.weight``
    ``[dim, hidden]``; their biases. Raises ValueError for unknown options or another last size.
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden: int | None = None,
        activation: str = "silu",
        bias: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_positive("GLU", "dim", dim)
        hidden = 2 * dim if hidden is None else hidden
        check_positive("GLU", "hidden", hidden)
        check_switch("GLU", "bias", bias)
        check_choice("GLU", "activation", activation, GLU_ACTIVATIONS)
        self.dim = dim
        self.hidden = hidden
        self.activation = activation
        self.in_proj = make_linear(dim, [hidden] * 2, bias, device, dtype)
        self.out_proj = make_linear(hidden, dim, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """in_proj, then out_proj: uniform on +-1/sqrt(fan in), weight before bias."""
        reset_linear(self.in_proj)
        reset_linear(self.out_proj)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., dim]`` -> ``[..., dim]``."""
        if x.size(-1) != self.dim:
            raise ValueError(f"GLU: x: expected [..., dim={self.dim}]; got {tuple(x.shape)}")
        projected = self.in_proj(x)
        if can_project(self.out_proj, projected):
            return ops.glu_linear(
                projected, self.out_proj.weight, self.out_proj.bias, self.activation
            )
        product = ops.glu(projected, self.activation)
        if is_recomputing() and projected.dtype == product.dtype:
            remember(product, [projected], self._product)
        return self.out_proj(product)

    def _product(self, projected: Tensor) -> Tensor:
        with torch.autocast(projected.device.type, enabled=False):
            return ops.glu(projected, self.activation)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, hidden={self.hidden}, activation={self.activation!r}"
