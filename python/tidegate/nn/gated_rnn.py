"""The minimal gated RNN ("Towards Understanding Gated Linear Recurrent Neural Networks")."""

from __future__ import annotations

import math

from torch import Tensor

from .. import ops
from ._common import bounded_gate, check_mixer_input, make_linear, uniform_, weight_of
from ._gate_init import gumbel_gate
from ._minimal_rnn import MinimalGatedRNN


class GatedRNN(MinimalGatedRNN):
    """Minimal gated RNN, whose gate reads the state: a token mixer (equations 5 to 7 of the
    paper)::

        z_t = sigmoid(W_zx x_t + W_zh h_{t-1} + b_z)
        h_t = z_t * h_{t-1} + (1 - z_t) * (W_x x_t + b_x)
        y_t = h_t

    It is `tidegate.ops.gated_rnn` over one projection of x (the op's z is W_zx x_t + b_z, its g the
    z here). The state enters the gate through a matrix, so that tokens are computed one after
    another: `GatedLinearRNN` is the same without W_zh. There is no output projection;
    `tidegate.models.Block` puts pre-norm residuals and a GLU around it.

    Args:
        dim: width of x, y and the state.
        gate_init: how b_z starts: "standard" (uniform on +-1/sqrt(dim)), "ugi", "chrono:T_max",
            "gumbel-softmax" or "gumbel-softmax:alpha:tau" (see `tidegate.nn.init`).
        gumbel_gate: tau of Gumbel-Gate: in training ``sigmoid((... + logit u) / tau)`` around all
            that the gate reads, u uniform, drawn for every token and channel; evaluation and step()
            have neither noise nor tau.
        lower_bound: whether a gamma is taken: ``z_t = gamma + (1 - gamma) * sigmoid(...)`` (the
            paper's LB, HGRN's lower bounds).

    Parameters: ``in_proj.weight`` ``[2 * dim, dim]`` and bias, rows of z first, then of x;
    ``state_proj.weight`` ``[dim, dim]``, W_zh.

    State: one tensor ``[N, dim]``; fp32, fp64 in an fp64 module.

    Raises ValueError for options that are unknown.
    """

    _owner = "GatedRNN"

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
        self.state_proj = make_linear(dim, dim, False, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """in_proj: weight, then bias, uniform on +-1/sqrt(dim); of the bias then the rows of z, by
        gate_init; state_proj uniform on +-1/sqrt(dim)."""
        self._reset_in_proj()
        uniform_(self.state_proj.weight, 1.0 / math.sqrt(self.dim))

    def _forward_checked(
        self, x: Tensor, state: Tensor | None, gamma: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        z, entering = self.in_proj(x).chunk(2, dim=-1)
        w_zh = weight_of(self.state_proj, x.device)
        if self.gumbel_gate is not None and self.training:
            z, w_zh = gumbel_gate(z, self.gumbel_gate), w_zh / self.gumbel_gate
        return ops.gated_rnn(z, entering, w_zh, state, gamma=gamma, cu_seqlens=cu_seqlens)

    def _step_checked(self, x: Tensor, state: Tensor, gamma: Tensor | None) -> Tensor:
        z, entering = self.in_proj(x).chunk(2, dim=-1)
        return ops.gated_rnn_step(
            z, entering, weight_of(self.state_proj, x.device), state, gamma=gamma
        )

    def forget_gate(
        self, x: Tensor, gamma: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """z_t, without noise, for sequences that start empty: x ``[B, T, dim]`` -> the same, fp32
        or fp64. gamma, cu_seqlens: as in forward(); the state that the gate reads depends on
        both."""
        return bounded_gate(self.gate_logits(x, gamma, cu_seqlens), gamma)[0]

    def gate_logits(
        self, x: Tensor, gamma: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """What the gate is the sigmoid of, without noise and bound, for sequences that start empty:
        x ``[B, T, dim]`` -> the same, in the state's dtype. gamma, cu_seqlens: as in forward();
        the state that the gate reads depends on both."""
        return self.gate_parts(x, gamma, cu_seqlens)[0]

    def gate_parts(
        self, x: Tensor, gamma: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """gate_logits and how much of it comes from x, W_zx x_t + b_z; the difference of the two,
        W_zh h_{t-1}, comes from the state. Both ``[B, T, dim]``."""
        check_mixer_input("GatedRNN.gate_parts", x, self.dim)
        self._check_gamma(gamma)
        z, entering = self.in_proj(x).chunk(2, dim=-1)
        w_zh = weight_of(self.state_proj, x.device)
        _, _, logits = ops.gated_rnn_with_logits(
            z, entering, w_zh, gamma=gamma, cu_seqlens=cu_seqlens
        )
        return logits, z
