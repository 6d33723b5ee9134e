"""Lower bounds of the forget gates, one vector a layer (HGRN, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._common import (
    LOWER_BOUND_MODES,
    KeepsFloat32,
    check_choice,
    check_positive,
    constant_,
    wide_dtype,
)


class LowerBounds(KeepsFloat32):
    """gamma for every layer: what the forget gate of layer k never falls below.

    With ``P = softmax(Gamma, over layers)`` (HGRN, section 3.2; ablations in Table 10):

    * ``"cumulative"``: ``gamma^k = P_2 + ... + P_k``, rising from zero in the first layer;
    * ``"decreasing"``: the same vectors in reverse order: the last layer gets zero;
    * ``"independent"``: ``gamma^k = sigmoid(Gamma_k)``, no order between the layers;
    * ``"none"``: no parameter; ``forward()`` returns None.

    None of them reaches one, even where the sum rounds to it: results are held at
    ``1 - 2^-24`` (``1 - 2^-53`` for fp64). Gamma starts at zero everywhere, so the cumulative
    bounds start at ``(k-1)/layers``.

    Args:
        layers: number of layers.
        dim: width of the bounds: the mixers' `gamma_size`.
        mode: one of the four above.

    Shapes: ``forward() -> [layers, dim]`` fp32 (fp64 in an fp64 module), or None. Parameter:
    ``logits`` (Gamma) ``[layers, dim]``; it stays fp32 when the module is cast to bf16 or fp16.
    """

    _float32_names = ("logits",)

    def __init__(
        self,
        layers: int,
        dim: int,
        *,
        mode: str = "cumulative",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_positive("LowerBounds", "layers", layers)
        check_positive("LowerBounds", "dim", dim)
        check_choice("LowerBounds", "mode", mode, LOWER_BOUND_MODES)
        self.layers = layers
        self.dim = dim
        self.mode = mode
        if mode == "none":
            self.register_parameter("logits", None)
        else:
            empty = torch.empty(layers, dim, device=device, dtype=wide_dtype(dtype))
            self.logits = nn.Parameter(empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gamma = 0."""
        if self.logits is not None:
            constant_(self.logits, 0.0)

    def forward(self) -> Tensor | None:
        """The bounds ``[layers, dim]``, row k for layer k; None in mode "none"."""
        if self.logits is None:
            return None
        if self.mode == "independent":
            bounds = torch.sigmoid(self.logits)
        else:
            p = torch.softmax(self.logits, dim=0)
            # Summing from the second layer on, instead of subtracting P_1, keeps the first row
            # exactly zero and no row negative.
            bounds = torch.cat([torch.zeros_like(p[:1]), p[1:].cumsum(dim=0)])
            if self.mode == "decreasing":
                bounds = bounds.flip(0)
        return bounds.clamp(max=1.0 - torch.finfo(bounds.dtype).eps / 2)

    def extra_repr(self) -> str:
        return f"layers={self.layers}, dim={self.dim}, mode={self.mode!r}"
