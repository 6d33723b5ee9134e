"""The minimal gated linear RNN ("Towards Understanding Gated Linear Recurrent Neural Networks")."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ._common import bounded_gate, widen
from ._gate_init import gumbel_gate
from ._minimal_rnn import MinimalGatedRNN
from ._token_mixing import elementwise_mixing


class GatedLinearRNN(MinimalGatedRNN):
    """Minimal gated linear RNN: a token mixer (equations 2 to 4 of the paper)::

        z_t = sigmoid(W_z x_t + b_z)
        h_t = z_t * h_{t-1} + (1 - z_t) * (W_x x_t + b_x)
        y_t = h_t

    It is `tidegate.ops.hgru` without activation and rotation: one fused pass each way. The paper
    stacks it and says nothing of what stands around it: here `tidegate.models.Block` does, with
    pre-norm residuals and a GLU, and there is no output projection.

    Args:
        dim: width of x, y and the state.
        gate_init: how b_z starts: "standard" (uniform on +-1/sqrt(dim)), "ugi", "chrono:T_max",
            "gumbel-softmax" or "gumbel-softmax:alpha:tau" (see `tidegate.nn.init`).
        gumbel_gate: tau of Gumbel-Gate: in training ``sigmoid((z + logit u) / tau)``, u uniform,
            drawn for every token and channel; evaluation and step() have neither noise nor tau.
        lower_bound: whether a gamma is taken: ``z_t = gamma + (1 - gamma) * sigmoid(...)`` (the
            paper's LB, HGRN's lower bounds).

    Parameters: ``in_proj.weight`` ``[2 * dim, dim]`` and bias, rows of z first, then of x.

    State: one tensor ``[N, dim]``; fp32, fp64 in an fp64 module.

    Raises ValueError for options that are unknown.
    """

    _owner = "GatedLinearRNN"

    def __init__(
        self,
        dim: int,
        *,
        gate_init: str = "standard",
        gumbel_gate: float | None = None,
        lower_bound: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(dim, gate_init, gumbel_gate, lower_bound, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """in_proj: weight, then bias, uniform on +-1/sqrt(dim); of the bias then the rows of z, by
        gate_init."""
        self._reset_in_proj()

    def _forward_checked(
        self, x: Tensor, state: Tensor | None, gamma: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        z, entering = self.in_proj(x).chunk(2, dim=-1)
        if self.gumbel_gate is not None and self.training:
            z = gumbel_gate(z, self.gumbel_gate)
        return ops.hgru(entering, z, gamma, None, state, activation="none", cu_seqlens=cu_seqlens)

    def _step_checked(self, x: Tensor, state: Tensor, gamma: Tensor | None) -> Tensor:
        z, entering = self.in_proj(x).chunk(2, dim=-1)
        return ops.hgru_step(entering, z, gamma, None, state, activation="none")

    def forget_gate(
        self, x: Tensor, gamma: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """z_t, without noise, fp32 or fp64: x ``[..., dim]`` -> the same. gamma as in forward();
        cu_seqlens makes no difference, since the gate reads its own token alone."""
        self._check_gamma(gamma)
        return bounded_gate(widen(self._gate_logits(x)), gamma)[0]

    @torch.no_grad()
    def token_mixing(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        """What the state is made of: float64 ``[B, 1, T, T]``, the mean over the channels, without
        noise. Row t, column s: the weight of token s in h_t. x ``[B, T, dim]``."""
        self._check_mixing(x, gamma)
        bound = None if gamma is None else gamma.double()
        return elementwise_mixing(*bounded_gate(self._gate_logits(x).double(), bound))

    def _gate_logits(self, x: Tensor) -> Tensor:
        return self.in_proj(x).narrow(-1, 0, self.dim)
