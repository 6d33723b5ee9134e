"""What the minimal gated RNNs share: one projection of x, and how their gates start."""

from __future__ import annotations

import math

from torch import Tensor

from .. import ops
from .._sharding import fill
from ._common import (
    check_positive,
    check_switch,
    make_linear,
    uniform_,
)
from ._gate_init import check_gumbel_gate, parse_gate_init
from ._lower_bound import OptionalLowerBound
from ._states import TensorStateMixer


class MinimalGatedRNN(OptionalLowerBound, TensorStateMixer):
    """`GatedLinearRNN` and `GatedRNN`, but for the recurrence."""

    has_data_gate = True
    _gamma_axis = "dim"

    def __init__(
        self,
        dim: int,
        gate_init: str,
        gumbel_gate: float | None,
        lower_bound: bool,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_positive(self._owner, "dim", dim)
        parse_gate_init(self._owner, gate_init, dim)
        check_gumbel_gate(self._owner, gumbel_gate)
        check_switch(self._owner, "lower_bound", lower_bound)
        self.dim = dim
        self.gate_init = gate_init
        self.gumbel_gate = gumbel_gate
        self.lower_bound = lower_bound
        self.in_proj = make_linear(dim, [dim] * 2, True, device, dtype)

    def _reset_in_proj(self) -> None:
        """Weight, then bias, uniform on +-1/sqrt(dim); of the bias then the rows of z, by
        gate_init."""
        uniform_(self.in_proj.weight, 1.0 / math.sqrt(self.dim))
        fill(self.in_proj.bias.detach(), self._draw_bias)

    def _draw_bias(self, t: Tensor) -> None:
        bound = 1.0 / math.sqrt(self.dim)
        ops.init_uniform_(t, -bound, bound)
        self._draw_gate_rows(t)

    def reset_chosen_biases(self) -> None:
        """in_proj's bias: zero, but for the rows of z, which are drawn by gate_init."""
        fill(self.in_proj.bias.detach(), lambda t: self._draw_gate_rows(t.zero_()))

    def _draw_gate_rows(self, t: Tensor) -> None:
        parse_gate_init(self._owner, self.gate_init, self.dim).draw(t[: self.dim], self.dim)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one sequence's state: ``[dim]``."""
        return (self.dim,)

    def _own_weight(self) -> Tensor:
        return self.in_proj.weight

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, gate_init={self.gate_init!r}, gumbel_gate={self.gumbel_gate}, "
            f"lower_bound={self.lower_bound}"
        )
