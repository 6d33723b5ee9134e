"""LRU (arXiv 2303.06349) and its real form SLRU: linear recurrences with a constant decay."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .. import ops
from .._sharding import fill
from ._common import (
    KeepsFloat32,
    bounded_decay,
    check_choice,
    check_positive,
    check_switch,
    is_finite,
    make_linear,
    normal_,
    number_text,
    refuse_gamma,
    reset_linear,
    wide_dtype,
    widen,
)
from ._gate_init import check_gate_options, gumbel_gate, parse_gate_init
from ._lower_bound import OptionalLowerBound
from ._states import TensorStateMixer
from ._token_mixing import elementwise_mixing


class _LinearRecurrentUnit(KeepsFloat32, TensorStateMixer):
    """What LRU and SLRU share: everything but whether the state is complex."""

    takes_gamma = False
    needs_gamma = False
    _float32_names = ("nu_log", "theta_log", "gamma_log")

    def __init__(
        self,
        dim: int,
        state: int | None,
        is_complex: bool,
        skip: bool,
        r_min: float,
        r_max: float,
        device,
        dtype,
    ) -> None:
        super().__init__()
        check_positive(self._owner, "dim", dim)
        if state is None:
            state = dim if is_complex else 2 * dim
        check_positive(self._owner, "state", state)
        check_switch(self._owner, "skip", skip)
        are_numbers = is_finite(r_min) and is_finite(r_max)
        if not (are_numbers and 0 <= r_min <= r_max <= 1 and r_max > 0 and r_min < 1):
            raise ValueError(
                f"{self._owner}: r_min, r_max: expected 0 <= r_min <= r_max <= 1, not both 0 nor "
                f"both 1; got {number_text(r_min)} and {number_text(r_max)}"
            )
        self.dim, self.state = dim, state
        self.skip = skip
        self.r_min, self.r_max = r_min, r_max
        self.state_size = 2 * state if is_complex else state
        where = {"device": device, "dtype": dtype}
        wide = {"device": device, "dtype": wide_dtype(dtype)}
        self.in_proj = make_linear(dim, [state] * (2 if is_complex else 1), False, **where)
        self.nu_log = nn.Parameter(torch.empty(state, **wide))
        theta_log = nn.Parameter(torch.empty(state, **wide)) if is_complex else None
        self.register_parameter("theta_log", theta_log)
        self.gamma_log = nn.Parameter(torch.empty(state, **wide))
        weight = nn.Parameter(torch.empty(dim, **where)) if self.skip else None
        self.register_parameter("skip_weight", weight)
        self.out_proj = make_linear(self.state_size, dim, False, **where)

    def _reset(self, max_phase: float | None) -> None:
        fan_in = self.dim if max_phase is None else 2 * self.dim
        normal_(self.in_proj.weight, 1.0 / math.sqrt(fan_in))
        ops.init_lru_nu_log_(self.nu_log, self.r_min, self.r_max)
        if max_phase is not None:
            ops.init_lru_theta_log_(self.theta_log, max_phase)
        ops.init_lru_gamma_log_(self.gamma_log, self.nu_log)
        if self.skip_weight is not None:
            normal_(self.skip_weight, 1.0)
        normal_(self.out_proj.weight, 1.0 / math.sqrt(self.state))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one sequence's state: ``[state]``, or ``[2 * state]`` when complex."""
        return (self.state_size,)

    def _forward_checked(
        self, x: Tensor, state: Tensor | None, gamma: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        h, state = self._scan(x, state, gamma, cu_seqlens)
        return self._output(h, x), state

    def _step_checked(self, x: Tensor, state: Tensor, gamma: Tensor | None) -> Tensor:
        return self._output(self._scan_step(x, state, gamma), x)

    @torch.no_grad()
    def token_mixing(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        """What the state is made of: float64 ``[B, 1, T, T]``, the mean over the channels.

        Row t, column s: the weight of token s in h_t (of a complex state the modulus: the phase
        turns it, and is left out). x ``[B, T, dim]``, gamma as in forward().
        """
        self._check_mixing(x, gamma)
        log_decay = -self.nu_log.double().exp() * self._sharpness(x).double()
        decay = bounded_decay(log_decay, None if gamma is None else gamma.double())
        return elementwise_mixing(decay, self.gamma_log.double().exp().expand_as(decay))

    def _sharpness(self, x: Tensor) -> Tensor:
        """The power that lambda's modulus is raised to, a token and channel."""
        return x.new_ones(*x.shape[:-1], self.state)

    def _scan(
        self, x: Tensor, state: Tensor | None, gamma: None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The recurrence with a constant decay. That has no lower bound, so gamma is None, here and
        in the step: only LRU's gate, which has ways of its own, takes one."""
        parameters = (self.nu_log, self.theta_log, self.gamma_log)
        return ops.lru_scan(self.in_proj(x), *parameters, state, cu_seqlens=cu_seqlens)

    def _scan_step(self, x: Tensor, state: Tensor, gamma: None) -> Tensor:
        parameters = (self.nu_log, self.theta_log, self.gamma_log)
        return ops.lru_scan_step(self.in_proj(x), *parameters, state)

    def _output(self, h: Tensor, x: Tensor) -> Tensor:
        y = self.out_proj(h)
        return y if self.skip_weight is None else y + self.skip_weight * x

    def _check_gamma(self, gamma: Tensor | None) -> None:
        refuse_gamma(self._owner, gamma, ", since its decay has no lower bound")


class LRU(OptionalLowerBound, _LinearRecurrentUnit):
    """Linear recurrent unit (arXiv 2303.06349): a token mixer with a complex state::

        lambda = exp(-exp(nu_log) + i exp(theta_log))
        h_t = lambda * h_{t-1} + exp(gamma_log) * (B x_t)
        y_t = Re(C h_t) + d * x_t                           (d only with skip)

    B and C are complex; as real matrices of twice the width they are in_proj and out_proj. The
    recurrence is one fused op, `tidegate.ops.lru_scan`.

    Args:
        dim: width of x and y.
        state: width of the complex state. None: dim.
        skip: whether d is there.
        r_min: least modulus of lambda at the start; its square is uniform on [r_min^2, r_max^2], so
            that lambda is uniform on the ring.
        r_max: largest one.
        max_phase: largest phase at the start, in radians a step; uniform on [0, max_phase].
        gate: None, or "data": a forget gate that depends on x (HGRN, arXiv 2311.04823, Table 8,
            "LRU w forget gate", which leaves the formula open). Here it sharpens lambda's modulus::

                |lambda_t| = |lambda|^s_t,  s_t = sigmoid(W x_t + b)

            so that the unit keeps more where s is small, and what it keeps is never less than
            lambda keeps. The phase and gamma_log are as without it. This variant composes
            `tidegate.ops.linear_scan`, and stores complex numbers in single precision.
        gate_init: how the gate starts, with gate="data": "standard", "ugi", "chrono:T_max",
            "gumbel-softmax" or "gumbel-softmax:alpha:tau" (see `tidegate.nn.init`), of
            ``1 - s_t``, the part that keeps: b is the negative of what is drawn. None: b uniform on
            +-1/sqrt(dim).
        gumbel_gate: tau of Gumbel-Gate, with gate="data": noise on the logits of s in training; see
            `GatedLinearRNN`.
        lower_bound: whether a gamma is taken, with gate="data":
            ``|lambda_t| = gamma + (1 - gamma) * |lambda|^s_t`` (HGRN's lower bounds).

    Parameters: ``in_proj.weight`` ``[2 * state, dim]``, rows of the real part, then of the
    imaginary one; ``nu_log``, ``theta_log``, ``gamma_log`` ``[state]``, fp32 also in 16-bit
    modules; ``skip_weight`` ``[dim]`` (d); ``gate_proj`` (W, b, with a gate); ``out_proj.weight``
    ``[dim, 2 * state]``. No other biases.

    State: one tensor ``[N, 2 * state]`` = [Re | Im]; fp32, fp64 in an fp64 module.

    Raises ValueError for options that are unknown or do not fit each other.
    """

    _owner = "LRU"
    _gamma_axis = "state"

    def __init__(
        self,
        dim: int,
        *,
        state: int | None = None,
        skip: bool = False,
        r_min: float = 0.9,
        r_max: float = 0.999,
        max_phase: float = 2 * math.pi,
        gate: str | None = None,
        gate_init: str | None = None,
        gumbel_gate: float | None = None,
        lower_bound: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(dim, state, True, skip, r_min, r_max, device, dtype)
        if not (is_finite(max_phase) and max_phase > 0):
            raise ValueError(
                f"LRU: max_phase: expected a number above 0; got {number_text(max_phase)}"
            )
        check_choice("LRU", "gate", gate, (None, "data"))
        options = (gate_init, gumbel_gate, self.state)
        check_gate_options("LRU", gate == "data", "gate='data'", *options)
        check_switch("LRU", "lower_bound", lower_bound)
        if lower_bound and gate is None:
            raise ValueError(
                "LRU: lower_bound: expected False unless gate='data', whose modulus it bounds; got "
                "True"
            )
        self.gate_init, self.gumbel_gate = gate_init, gumbel_gate
        self.lower_bound = lower_bound
        self.max_phase = max_phase
        self.gate = gate
        self.gate_proj = None
        if gate is not None:
            self.gate_proj = make_linear(dim, self.state, True, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """In this order: in_proj (normal, variance 1/(2 dim)), nu_log, theta_log (on the ring),
        gamma_log (``log sqrt(1 - |lambda|^2)``), skip_weight (normal, variance 1), out_proj
        (normal, variance 1/state), gate_proj (weight, then bias, uniform on +-1/sqrt(dim);
        the bias then by gate_init)."""
        self._reset(self.max_phase)
        if self.gate_proj is not None:
            reset_linear(self.gate_proj)
        self.reset_chosen_biases()

    def reset_chosen_biases(self) -> None:
        """gate_proj's bias, by gate_init; without it, nothing."""
        if self.gate_init is not None:
            fill(self.gate_proj.bias.detach(), self._draw_gate)

    def _draw_gate(self, t: Tensor) -> None:
        parse_gate_init("LRU", self.gate_init, self.state).draw(t, self.dim)
        t.neg_()  # s is what forgets

    def _scan(
        self, x: Tensor, state: Tensor | None, gamma: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.gate_proj is None:
            return super()._scan(x, state, gamma, cu_seqlens)
        entering, decay = self._gated(x, gamma, self.gumbel_gate if self.training else None)
        h0 = None if state is None else _to_complex(widen(state))
        h, final = ops.linear_scan(entering, decay, h0, cu_seqlens=cu_seqlens)
        return _to_halves(h).to(self.out_proj.weight.dtype), _to_halves(final)

    def _scan_step(self, x: Tensor, state: Tensor, gamma: Tensor | None) -> Tensor:
        if self.gate_proj is None:
            return super()._scan_step(x, state, gamma)
        entering, decay = self._gated(x, gamma)
        h = _to_complex(widen(state))
        ops.linear_scan_step(entering, decay, h)
        state.copy_(_to_halves(h))
        return state.to(self.out_proj.weight.dtype)

    @property
    def has_data_gate(self) -> bool:
        """Whether there is a forget gate that depends on the data."""
        return self.gate_proj is not None

    def forget_gate(
        self, x: Tensor, gamma: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """``|lambda_t|``, without noise, fp32 or fp64: x ``[..., dim]`` -> ``[..., state]``. Only
        with gate="data". gamma as in forward(); cu_seqlens makes no difference, since the gate
        reads its own token alone."""
        self._check_gamma(gamma)
        return self._modulus(x, gamma)

    def _modulus(self, x: Tensor, gamma: Tensor | None, gumbel: float | None = None) -> Tensor:
        """``|lambda_t|``; gumbel: tau of the gate's noise."""
        return bounded_decay(-self.nu_log.exp() * self._sharpness(x, gumbel), gamma)

    def _sharpness(self, x: Tensor, gumbel: float | None = None) -> Tensor:
        if self.gate_proj is None:
            return super()._sharpness(x)
        logits = widen(self.gate_proj(x))
        return torch.sigmoid(logits if gumbel is None else gumbel_gate(logits, gumbel))

    def _gated(
        self, x: Tensor, gamma: Tensor | None, gumbel: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """What enters the state, and lambda_t, complex; gumbel: tau of the gate's noise."""
        modulus = self._modulus(x, gamma, gumbel)
        u = _to_complex(widen(self.in_proj(x)))
        # polar() of the modulus would divide by |lambda| for its gradient, which may be subnormal.
        theta = self.theta_log.exp()
        return self.gamma_log.exp() * u, modulus * torch.polar(torch.ones_like(theta), theta)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, state={self.state}, skip={self.skip}, r_min={self.r_min}, "
            f"r_max={self.r_max}, max_phase={self.max_phase}, gate={self.gate!r}, "
            f"lower_bound={self.lower_bound}"
        )


class SLRU(_LinearRecurrentUnit):
    """The real form of the linear recurrent unit (Su Jianlin 2023, on LRU): a token mixer::

        h_t = exp(-exp(nu_log)) * h_{t-1} + exp(gamma_log) * (B x_t)
        y_t = C h_t + d * x_t                               (d only with skip)

    One fused op, `tidegate.ops.lru_scan`, computes the recurrence.

    Args:
        dim: width of x and y.
        state: width of the state. None: 2 * dim, so that the matrices are as large as LRU's.
        skip: whether d is there.
        r_min: least decay at the start; its square is uniform on [r_min^2, r_max^2].
        r_max: largest one.

    Parameters: ``in_proj.weight`` ``[state, dim]``; ``nu_log``, ``gamma_log`` ``[state]``, fp32
    also in 16-bit modules; ``skip_weight`` ``[dim]`` (d); ``out_proj.weight`` ``[dim, state]``. No
    biases.

    State: one tensor ``[N, state]``; fp32, fp64 in an fp64 module.

    Raises ValueError for options that do not fit.
    """

    _owner = "SLRU"

    def __init__(
        self,
        dim: int,
        *,
        state: int | None = None,
        skip: bool = False,
        r_min: float = 0.9,
        r_max: float = 0.999,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(dim, state, False, skip, r_min, r_max, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """In this order: in_proj (normal, variance 1/dim), nu_log (as for the ring), gamma_log
        (``log sqrt(1 - lambda^2)``), skip_weight (normal, variance 1), out_proj (normal, variance
        1/state)."""
        self._reset(None)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, state={self.state}, skip={self.skip}, r_min={self.r_min}, "
            f"r_max={self.r_max}"
        )


def _to_complex(halves: Tensor) -> Tensor:
    """[Re | Im] as complex numbers."""
    return torch.complex(*halves.chunk(2, -1))


def _to_halves(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], -1)
