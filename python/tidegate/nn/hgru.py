"""HGRU: the hierarchically gated recurrent unit of HGRN (Qin, Yang, Zhong; NeurIPS 2023)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .._sharding import fill
from ._common import (
    NORMS,
    KeepsFloat32,
    bounded_gate,
    check_choice,
    check_eps,
    check_gamma,
    check_positive,
    check_switches,
    make_linear,
    make_norm,
    norm_and_project,
    refuse_gamma,
    reset_linear,
    reset_norm,
    rope_theta_,
    uniform_,
    wide_dtype,
    widen,
)
from ._gate_init import check_gate_options, gumbel_gate, parse_gate_init
from ._states import TensorStateMixer
from ._token_mixing import elementwise_mixing
from .expansion import EXPANSIONS, StateExpansion


class _Preset(NamedTuple):
    complex: bool
    bias: bool
    norm: str
    gate_first: bool  # sigmoid(gate) before the norm; otherwise SiLU(gate) after it


PRESETS = {
    "paper": _Preset(complex=True, bias=True, norm="layer", gate_first=True),
    "official": _Preset(complex=True, bias=True, norm="layer", gate_first=False),
    "fla": _Preset(complex=False, bias=False, norm="rms", gate_first=False),
}


class HGRU(KeepsFloat32, TensorStateMixer):
    """Hierarchically gated recurrent unit: a token mixer (HGRN, equations 2 and 3).

    With S = expand * dim channels of state, ``lambda_t = gamma + (1 - gamma) * sigmoid(f_t)`` and
    c, f, g (and i, theta, where asked for) linear in x::

        h_t = lambda_t * exp(i theta) * h_{t-1} + (1 - lambda_t) * silu(c_t)
        o_t = Norm(sigmoid(g_t) * [Re h_t, Im h_t])        preset "paper"
        o_t = Norm([Re h_t, Im h_t]) * silu(g_t)           presets "official" and "fla"
        y_t = o_t W_o + b_o

    Args:
        dim: width of x and y.
        complex: whether h is complex, rotated by theta every step. None: the preset's; real with
            an expansion.
        theta: "learned" (a parameter; the default), "fixed" (a buffer), both starting as RoPE's
            ``theta_j = 10000^(-2j/S)``, or "data": ``theta_t = x_t W + b`` (Table 11; b starts as
            RoPE's theta). Only with a complex state.
        input_gate: what multiplies silu(c_t): "tied": ``1 - lambda_t``; "free": ``sigmoid(i_t)``;
            "none": nothing (Table 9).
        forget_gate: "data": the equation above; "bound": ``lambda = gamma``, whatever the input
            (Tables 8 and 10; needs a gamma); "none": ``lambda = 1`` (Table 8; takes no gamma, and
            its input gate must be free or none, because a tied one would be zero).
        output_gate: whether there is a g (Table 9).
        expand: channels of state per channel of x.
        expansion: how c, f, g, i grow from dim to expand * dim channels, and that the gated h is
            summed over the `expand` groups of dim channels, before the norm (HGRN2's paper, arXiv
            2404.07904, section 3.1 and Table 2; the state is real)::

                o_t = Norm(sum over groups of act(g_t) * h_t)    act: sigmoid in preset "paper",
                                                                 SiLU in "official" and "fla"

            "naive", "lr", "glt", "glti", "krp" or "kp": see `StateExpansion`. None: one dense
            projection, and no sum.
        rank: rank of "lr". None: dim // (expand + 1), which makes its size about dim^2.
        gate_init: how the bias of f starts: "standard", "ugi", "chrono:T_max", "gumbel-softmax" or
            "gumbel-softmax:alpha:tau" (see `tidegate.nn.init`); a free input gate's starts as its
            negative. Where the projections have no biases, f (and a free i) gets one. None: as the
            other biases.
        gumbel_gate: tau of Gumbel-Gate: in training ``sigmoid((f + logit u) / tau)``, u uniform,
            drawn for every token and channel; evaluation and step() have neither noise nor tau.
        bidirectional: runs the recurrence both ways over shared projections, with one theta a
            direction, and adds the two h before the norm. Has no state, and no step().
        preset: "paper" (equation 3), "official" (the authors' published code: norm, then SiLU
            gate) or "fla" (flash-linear-attention's: real, no biases, RMSNorm, SiLU gate).
        bias: whether the projections have biases. None: the preset's.
        norm: "layer", "rms" or "rms_no_weight". None: the preset's.
        norm_eps: the norm's epsilon.

    Parameters: ``in_proj.weight`` ``[parts, dim]`` and bias, whose rows are, in this order and as
    far as the options ask for them: c (S rows; complex: S real, then S imaginary), f (S), g (as
    many as c), i (S), theta (S a direction); ``theta`` ``[S]`` (bidirectional: ``[2, S]``, forward
    first); ``gate_bias`` ``[S]``, or ``[2S]`` with a free input gate's, where gate_init is given
    and the projections have no biases; ``norm``; ``out_proj`` ``[dim, S or 2S]``. The authors' code
    interleaves real and imaginary rows instead: `tidegate.models.loaders` reorders them. theta
    stays fp32 when the module is cast to bf16 or fp16.

    State: one tensor ``[N, S]``, or ``[N, 2S] = [Re | Im]``; fp32, fp64 in an fp64 module.

    Raises ValueError for options that are unknown or cannot work together.
    """

    _owner = "HGRU"
    _float32_names = ("theta",)

    def __init__(
        self,
        dim: int,
        *,
        complex: bool | None = None,
        theta: str | None = None,
        input_gate: str = "tied",
        forget_gate: str = "data",
        output_gate: bool = True,
        expand: int = 1,
        expansion: str | None = None,
        rank: int | None = None,
        gate_init: str | None = None,
        gumbel_gate: float | None = None,
        bidirectional: bool = False,
        preset: str = "paper",
        bias: bool | None = None,
        norm: str | None = None,
        norm_eps: float = 1e-5,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_positive("HGRU", "dim", dim)
        check_positive("HGRU", "expand", expand)
        check_choice("HGRU", "preset", preset, tuple(PRESETS))
        check_switches("HGRU", can_be_none=True, complex=complex, bias=bias)
        check_switches("HGRU", output_gate=output_gate, bidirectional=bidirectional)
        defaults = PRESETS[preset]
        self.dim = dim
        self.expand = expand
        is_complex = defaults.complex and expansion is None
        self.complex = is_complex if complex is None else bool(complex)
        self.theta_mode = "learned" if theta is None and self.complex else theta
        self.input_gate = input_gate
        self.forget_gate_mode = forget_gate
        self.output_gate = bool(output_gate)
        self.expansion = expansion
        self.rank = rank
        self.gate_init = gate_init
        self.gumbel_gate = gumbel_gate
        self.bidirectional = bool(bidirectional)
        self.preset = preset
        self.gate_first = defaults.gate_first
        self.channels = expand * dim
        self._check_options()
        self.state_size = 2 * self.channels if self.complex else self.channels
        bias = defaults.bias if bias is None else bias
        norm = defaults.norm if norm is None else norm
        check_choice("HGRU", "norm", norm, NORMS)
        check_eps("HGRU", "norm_eps", norm_eps)

        self._parts = self._part_sizes()
        where = {"device": device, "dtype": dtype}
        if expansion is None:
            # c and g of a complex state, and theta of two directions, are two matrices each.
            matrices = sum(self._parts.values()) // self.channels
            self.in_proj = make_linear(dim, [self.channels] * matrices, bias, **where)
        else:
            self.in_proj = StateExpansion(
                expansion, dim, expand, parts=len(self._parts), rank=rank, bias=bias, **where
            )
        self._make_gate_bias(device, dtype)
        self._make_theta(device, dtype)
        width = self.state_size if expansion is None else dim
        self.norm = make_norm(norm, width, norm_eps, **where)
        self.out_proj = make_linear(width, dim, bias, **where)
        self.reset_parameters()

    @property
    def takes_gamma(self) -> bool:
        """Whether the forget gate has a lower bound."""
        return self.forget_gate_mode != "none"

    @property
    def needs_gamma(self) -> bool:
        """Whether the lower bound is the whole forget gate."""
        return self.forget_gate_mode == "bound"

    @property
    def gamma_size(self) -> int:
        """Width of the lower bound."""
        return self.channels

    def _check_options(self) -> None:
        check_choice("HGRU", "input_gate", self.input_gate, ("tied", "free", "none"))
        check_choice("HGRU", "forget_gate", self.forget_gate_mode, ("data", "bound", "none"))
        self._check_expansion()
        if self.complex:
            check_choice("HGRU", "theta", self.theta_mode, ("learned", "fixed", "data"))
        elif self.theta_mode is not None:
            raise ValueError(
                f"HGRU: theta: expected none with complex=False, since a real state is not "
                f"rotated; got {self.theta_mode!r}"
            )
        if self.forget_gate_mode == "none" and self.input_gate == "tied":
            raise ValueError(
                "HGRU: input_gate: expected 'free' or 'none' with forget_gate='none': the tied "
                "gate is 1 - lambda = 0, so nothing would enter the state; got 'tied'"
            )

        has_data = self.forget_gate_mode == "data"
        options = (self.gate_init, self.gumbel_gate, self.channels)
        check_gate_options("HGRU", has_data, "forget_gate='data'", *options)

    def _check_expansion(self) -> None:
        check_choice("HGRU", "expansion", self.expansion, (None, *EXPANSIONS))
        if self.rank is not None and self.expansion != "lr":
            raise ValueError(
                f"HGRU: rank: expected none unless expansion='lr', which alone has one; "
                f"got {self.rank!r}"
            )
        if self.expansion is not None and self.complex:
            raise ValueError("HGRU: complex: expected False with an expansion; got True")

    def _part_sizes(self) -> dict[str, int]:
        """Rows of in_proj a quantity, in their order."""
        s = self.channels
        parts = {"c": self.state_size}
        if self.forget_gate_mode == "data":
            parts["f"] = s
        if self.output_gate:
            parts["g"] = self.state_size
        if self.input_gate == "free":
            parts["i"] = s
        if self.theta_mode == "data":
            parts["theta"] = 2 * s if self.bidirectional else s
        return parts

    def _make_gate_bias(self, device, dtype) -> None:
        if self.gate_init is None or self.in_proj.bias is not None:
            self.register_parameter("gate_bias", None)
            return
        rows = self.channels * (2 if self.input_gate == "free" else 1)
        self.gate_bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))

    def _make_theta(self, device, dtype) -> None:
        shape = (2, self.channels) if self.bidirectional else (self.channels,)
        if self.theta_mode in ("learned", "fixed"):
            theta = torch.empty(shape, device=device, dtype=wide_dtype(dtype))
            if self.theta_mode == "learned":
                self.theta = nn.Parameter(theta)
            else:
                self.register_buffer("theta", theta)
        else:
            self.register_parameter("theta", None)

    def reset_parameters(self) -> None:
        """In this order: in_proj (weight, bias; uniform on +-1/sqrt(dim); an expansion as its
        class says; of the bias then, with theta="data", the rows of theta, RoPE's, and those of the
        gates by gate_init), gate_bias, theta (RoPE's; also when it is a buffer), norm, out_proj."""
        if self.expansion is not None:
            self.in_proj.reset_parameters(self._draw_bias)
        else:
            uniform_(self.in_proj.weight, 1.0 / math.sqrt(self.dim))
            if self.in_proj.bias is not None:
                fill(self.in_proj.bias.detach(), self._draw_bias)
        if self.gate_bias is not None:
            fill(self.gate_bias.detach(), lambda t: self._draw_gates(*t.split(self.channels)))
        if self.theta is not None:
            fill(self.theta.detach(), lambda t: rope_theta_(t, self.channels))
        reset_norm(self.norm)
        reset_linear(self.out_proj)

    def _draw_bias(self, t: Tensor) -> None:
        """The bias of in_proj."""
        bound = 1.0 / math.sqrt(self.dim)
        ops.init_uniform_(t, -bound, bound)
        self._draw_chosen_rows(t)

    def reset_chosen_biases(self) -> None:
        """in_proj's bias: zero, but for the rows of f and i with gate_init, of theta with
        theta="data", which are drawn as reset_parameters() does."""
        if self.in_proj.bias is not None:
            fill(self.in_proj.bias.detach(), lambda t: self._draw_chosen_rows(t.zero_()))

    def _draw_chosen_rows(self, t: Tensor) -> None:
        rows = dict(zip(self._parts, t.view(-1).split(list(self._parts.values())), strict=True))
        if self.theta_mode == "data":
            rope_theta_(rows["theta"], self.channels)
        if self.gate_init is not None:
            self._draw_gates(rows["f"], rows.get("i"))

    def _draw_gates(self, f: Tensor, i: Tensor | None = None) -> None:
        """The bias of f by gate_init, and its negative for i."""
        parse_gate_init("HGRU", self.gate_init, self.channels).draw(f, self.dim)
        if i is not None:
            i.copy_(f).neg_()

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one sequence's state: ``[S]``, or ``[2S]`` when complex."""
        return (self.state_size,)

    def _forward_checked(
        self, x: Tensor, state: Tensor | None, gamma: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        parts = self._project(x)
        if self.gumbel_gate is not None and self.training:
            parts["f"] = gumbel_gate(parts["f"], self.gumbel_gate)
        if self.bidirectional:
            ahead, _ = self._recur(parts, gamma, None, 0, cu_seqlens)
            back, _ = self._recur(parts, gamma, None, 1, cu_seqlens)
            return self._output(ahead + back, parts.get("g")), None
        h, state = self._recur(parts, gamma, state, 0, cu_seqlens)
        return self._output(h, parts.get("g")), state

    def _step_checked(self, x: Tensor, state: Tensor, gamma: Tensor | None) -> Tensor:
        parts = self._project(x)
        if self._is_fused():
            h = ops.hgru_step(parts["c"], parts["f"], gamma, self._theta(parts, 0), state)
        else:
            u, a = self._scan_operands(parts, gamma, 0)
            h = self._scan_step(u, a, state).to(x.dtype)
        return self._output(h, parts.get("g"))

    @property
    def has_data_gate(self) -> bool:
        """Whether the forget gate depends on the data."""
        return self.forget_gate_mode == "data"

    def forget_gate(
        self, x: Tensor, gamma: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """lambda_t, without noise, fp32 or fp64: x ``[..., dim]`` -> ``[..., S]``. Only with
        forget_gate="data". gamma as in forward(); cu_seqlens makes no difference, since the gate
        reads its own token alone."""
        self._check_gamma(gamma)
        return bounded_gate(widen(self._project(x)["f"]), gamma)[0]

    @torch.no_grad()
    def token_mixing(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        """What the state is made of: float64 ``[B, 1, T, T]``, the mean over the channels.

        Row t, column s: the weight of token s in h_t, Lambda of equation 7 (of a complex state the
        modulus: theta turns it, and is left out). x ``[B, T, dim]``, gamma as in forward().
        """
        self._check_mixing(x, gamma)
        decay, entering = self._gates(self._project(x), gamma)
        one = x.new_ones(*x.shape[:2], self.channels)
        decay = one if decay is None else decay.expand_as(one)
        return elementwise_mixing(decay, one if entering is None else entering.expand_as(one))

    def _check_gamma(self, gamma: Tensor | None) -> None:
        if gamma is None and self.needs_gamma:
            raise ValueError(
                "HGRU: gamma: expected the lower bound, which is the whole forget gate with "
                "forget_gate='bound'; got None"
            )
        if not self.takes_gamma:
            refuse_gamma("HGRU", gamma, " with forget_gate='none'")
        check_gamma("HGRU", gamma, "expand*dim", self.channels, self._own_weight())

    def _project(self, x: Tensor) -> dict[str, Tensor]:
        """All projections by one matrix product; views of it by name."""
        if self.expansion is not None:
            values = self.in_proj(x).unbind(0)
        else:
            values = self.in_proj(x).split(list(self._parts.values()), dim=-1)
        parts = dict(zip(self._parts, values, strict=True))
        if self.gate_bias is not None:
            for name, bias in zip("fi", self.gate_bias.split(self.channels), strict=False):
                parts[name] = parts[name] + bias.to(parts[name].dtype)
        return parts

    def _output(self, h: Tensor, gate: Tensor | None) -> Tensor:
        """Gate, norm and output projection of h ``[..., S or 2S]``."""
        if self.expansion is not None:
            if gate is not None:
                h = h * (torch.sigmoid(gate) if self.gate_first else F.silu(gate))
            h = self.norm(h.unflatten(-1, (self.expand, self.dim)).sum(dim=-2))
        else:
            activation = "sigmoid" if self.gate_first else "silu"
            return norm_and_project(self.norm, self.out_proj, h, gate, activation, self.gate_first)
        return self.out_proj(h)

    def _is_fused(self) -> bool:
        """Whether the fused hgru op computes these options; the others compose linear_scan."""
        return (
            self.input_gate == "tied"
            and self.forget_gate_mode == "data"
            and self.theta_mode != "data"
        )

    def _theta(self, parts: dict[str, Tensor], direction: int) -> Tensor | None:
        """A direction's rotation in radians a step: ``[S]``, or ``[..., S]`` with theta="data"."""
        if not self.complex:
            return None
        if self.theta_mode == "data":
            first = direction * self.channels
            return widen(parts["theta"].narrow(-1, first, self.channels))
        return self.theta[direction] if self.bidirectional else self.theta

    def _recur(
        self,
        parts: dict[str, Tensor],
        gamma: Tensor | None,
        state: Tensor | None,
        direction: int,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """h over the whole sequence ([Re | Im] when complex) and the final state."""
        reverse = direction == 1
        if self._is_fused():
            return ops.hgru(
                parts["c"],
                parts["f"],
                gamma,
                self._theta(parts, direction),
                state,
                reverse=reverse,
                cu_seqlens=cu_seqlens,
            )
        u, a = self._scan_operands(parts, gamma, direction)
        h0 = self._to_scan(state) if state is not None else None
        h, final = ops.linear_scan(u, a, h0, reverse=reverse, cu_seqlens=cu_seqlens)
        return self._from_scan(h).to(parts["c"].dtype), self._from_scan(final)

    def _scan_operands(
        self, parts: dict[str, Tensor], gamma: Tensor | None, direction: int
    ) -> tuple[Tensor, Tensor]:
        """What enters the state (``[..., S]``, complex where h is) and its decay (``[..., S]``,
        or ``[S]`` when it does not depend on the input), in fp32 or fp64."""
        decay, entering = self._gates(parts, gamma)
        u = F.silu(widen(parts["c"]))
        if not self.complex:
            u = u if entering is None else u * entering
            return u, u.new_ones(self.channels) if decay is None else decay.to(u.dtype)
        re, im = u.chunk(2, dim=-1)
        if entering is not None:
            re, im = re * entering, im * entering
        theta = self._theta(parts, direction).to(u.dtype)
        cos, sin = theta.cos(), theta.sin()
        if decay is not None:
            cos, sin = cos * decay, sin * decay
        return torch.complex(re, im), torch.complex(cos, sin)

    def _gates(
        self, parts: dict[str, Tensor], gamma: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """lambda and the input gate; None stands for one."""
        if self.forget_gate_mode == "none":
            decay, rest = None, None
        elif self.forget_gate_mode == "bound":
            decay, rest = gamma, 1 - gamma
        else:
            decay, rest = bounded_gate(widen(parts["f"]), gamma)
        if self.input_gate == "free":
            return decay, torch.sigmoid(widen(parts["i"]))
        return decay, rest if self.input_gate == "tied" else None

    def _scan_step(self, u: Tensor, a: Tensor, state: Tensor) -> Tensor:
        """One step of linear_scan on a state kept as [Re | Im]."""
        if not self.complex:
            return ops.linear_scan_step(u, a, state)
        z = self._to_scan(state)
        h = ops.linear_scan_step(u, a, z)
        state.copy_(self._from_scan(z))
        return self._from_scan(h)

    def _to_scan(self, state: Tensor) -> Tensor:
        """[Re | Im] -> complex."""
        return torch.complex(*state.chunk(2, dim=-1)) if self.complex else state

    def _from_scan(self, h: Tensor) -> Tensor:
        """complex -> [Re | Im]."""
        return torch.cat([h.real, h.imag], dim=-1) if self.complex else h

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, complex={self.complex}, theta={self.theta_mode!r}, "
            f"input_gate={self.input_gate!r}, forget_gate={self.forget_gate_mode!r}, "
            f"output_gate={self.output_gate}, expand={self.expand}, expansion={self.expansion!r}, "
            f"bidirectional={self.bidirectional}, preset={self.preset!r}"
        )
