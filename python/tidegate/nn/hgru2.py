"""HGRU2: HGRN2's token mixer, a gated linear recurrence with an outer-product state."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from .._sharding import fill
from ._common import (
    HGRN2_ACTIVATIONS,
    MAX_HEAD_DIM,
    NORMS,
    bounded_gate,
    check_choice,
    check_eps,
    check_gamma,
    check_positive,
    check_switches,
    make_linear,
    make_norm,
    norm_and_project,
    reset_linear,
    reset_norm,
    uniform_,
    widen,
)
from ._gate_init import check_gate_options, gumbel_gate, parse_gate_init
from ._states import TensorStateMixer
from ._token_mixing import activated, head_mixing


class _Preset(NamedTuple):
    q_activation: str
    v_activation: str
    bias: bool
    norm: str
    scaled: bool  # outputs times K^-0.5


MIN_DEFAULT_HEAD_DIM = 32  # channels: narrower heads are nobody's choice but one's own
PRESETS = {
    "paper": _Preset("sigmoid", "silu", bias=True, norm="layer", scaled=False),
    "official": _Preset("silu", "none", bias=False, norm="rms_no_weight", scaled=False),
    "fla": _Preset("silu", "none", bias=False, norm="rms", scaled=True),
}


def head_dim(owner: str, dim: int, num_heads: int | None, expand_ratio: int | None) -> int:
    """Channels a head of a mixer that splits `dim` into heads, by whichever of the two is given;
    ValueError where they do not fit, or are more than the op takes."""
    if num_heads is not None:
        check_positive(owner, "num_heads", num_heads)
        if dim % num_heads:
            raise ValueError(
                f"{owner}: num_heads: expected a divisor of dim={dim}; got {num_heads}"
            )
    if expand_ratio is not None:
        check_positive(owner, "expand_ratio", expand_ratio)
    elif num_heads is None:
        expand_ratio = next(k for k in range(min(dim, 128), 0, -1) if dim % k == 0)
        if expand_ratio < min(dim, MIN_DEFAULT_HEAD_DIM):
            raise ValueError(
                f"{owner}: num_heads: expected a divisor of dim={dim}, or an expand_ratio, since "
                f"heads of {MIN_DEFAULT_HEAD_DIM} to 128 channels do not fit; got neither"
            )
    if expand_ratio is None:
        expand_ratio = dim // num_heads
    if expand_ratio > MAX_HEAD_DIM:
        raise ValueError(
            f"{owner}: expand_ratio: expected at most {MAX_HEAD_DIM} channels a head; got "
            f"{expand_ratio}"
        )
    if dim % expand_ratio:
        raise ValueError(
            f"{owner}: expand_ratio: expected a divisor of dim={dim}; got {expand_ratio}"
        )
    if num_heads is not None and dim != num_heads * expand_ratio:
        raise ValueError(
            f"{owner}: expand_ratio: expected dim / num_heads = {dim // num_heads}, or only one "
            f"of the two; got {expand_ratio}"
        )
    return expand_ratio


class HGRU2(TensorStateMixer):
    """HGRN2's recurrent unit: a token mixer (Qin et al., arXiv 2404.07904, equation 3).

    For each of H heads of K = dim / H channels, with q, f, v linear in x and
    ``f'_t = gamma + (1 - gamma) * sigmoid(f_t)``::

        S_t = diag(f'_t) S_{t-1} + (1 - f'_t) act_v(v_t)^T       [K, K], one a head
        o_t = scale * S_t^T act_q(q_t)
        y_t = Norm([o_t of all heads]) W_o + b_o

    (In the paper q is the output gate o, v the input i.)

    ============ ======== ======= ====== ======================= ==========
    preset       act_q    act_v   biases norm                    scale
    ============ ======== ======= ====== ======================= ==========
    "paper"      sigmoid  SiLU    yes    LayerNorm               1
    "official"   SiLU     none    no     RMSNorm without weight  1
    "fla"        SiLU     none    no     RMSNorm                 K^-0.5
    ============ ======== ======= ====== ======================= ==========

    "official" is the authors' published language model, "fla" flash-linear-attention's
    ``HGRN2Attention``.

    Args:
        dim: width of x and y.
        num_heads: H, a divisor of dim. None: dim / expand_ratio.
        expand_ratio: K, the state's channels per channel of x, at most 512. None: dim / num_heads,
            or, where that is None too, 128, or else dim's largest divisor below.
        gate_init: how the bias of f starts: "standard", "ugi", "chrono:T_max", "gumbel-softmax" or
            "gumbel-softmax:alpha:tau" (see `tidegate.nn.init`); None: as the other biases. One is
            added where the preset has none.
        gumbel_gate: tau of Gumbel-Gate: noise on f in training; see `GatedLinearRNN`.
        bidirectional: runs the recurrence both ways over shared projections and adds the two o
            before the norm. Has no state, and no step().
        preset: a row of the table above.
        q_activation, v_activation: "none", "silu" or "sigmoid". None: the preset's.
        bias: whether the projections have biases. None: the preset's.
        norm: "layer", "rms" or "rms_no_weight", over all of dim. None: the preset's.
        norm_eps: the norm's epsilon.

    Parameters: ``in_proj.weight`` ``[3 * dim, dim]`` and bias, rows of q, f, v in this order, each
    head after head; without biases but with gate_init, ``gate_bias`` ``[dim]`` on f; ``norm``;
    ``out_proj`` ``[dim, dim]``.

    State: one tensor ``[N, H, K, K]``, key channels before value channels; fp32, fp64 in an fp64
    module.

    Raises ValueError for options that are unknown or do not fit each other.
    """

    _owner = "HGRU2"
    takes_gamma = True
    needs_gamma = False
    has_data_gate = True

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        expand_ratio: int | None = None,
        gate_init: str | None = None,
        gumbel_gate: float | None = None,
        bidirectional: bool = False,
        preset: str = "paper",
        q_activation: str | None = None,
        v_activation: str | None = None,
        bias: bool | None = None,
        norm: str | None = None,
        norm_eps: float = 1e-5,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_positive("HGRU2", "dim", dim)
        check_choice("HGRU2", "preset", preset, tuple(PRESETS))
        check_switches("HGRU2", bidirectional=bidirectional)
        check_switches("HGRU2", can_be_none=True, bias=bias)
        defaults = PRESETS[preset]
        self.dim = dim
        self.expand_ratio = head_dim("HGRU2", dim, num_heads, expand_ratio)
        self.num_heads = dim // self.expand_ratio
        check_gate_options("HGRU2", True, "", gate_init, gumbel_gate, dim)
        self.gate_init, self.gumbel_gate = gate_init, gumbel_gate
        self.bidirectional = bool(bidirectional)
        self.preset = preset
        self.q_activation = defaults.q_activation if q_activation is None else q_activation
        self.v_activation = defaults.v_activation if v_activation is None else v_activation
        check_choice("HGRU2", "q_activation", self.q_activation, HGRN2_ACTIVATIONS)
        check_choice("HGRU2", "v_activation", self.v_activation, HGRN2_ACTIVATIONS)
        self.scale = self.expand_ratio**-0.5 if defaults.scaled else 1.0
        bias = defaults.bias if bias is None else bias
        norm = defaults.norm if norm is None else norm
        check_choice("HGRU2", "norm", norm, NORMS)
        check_eps("HGRU2", "norm_eps", norm_eps)
        self.in_proj = make_linear(dim, [dim] * 3, bias, device, dtype)
        gate_bias = None
        if gate_init is not None and not bias:
            gate_bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.register_parameter("gate_bias", gate_bias)
        self.norm = make_norm(norm, dim, norm_eps, device, dtype)
        self.out_proj = make_linear(dim, dim, bias, device, dtype)
        self.reset_parameters()

    @property
    def gamma_size(self) -> int:
        """Width of the lower bound: of all channels, head after head."""
        return self.dim

    def reset_parameters(self) -> None:
        """In this order: in_proj (of the bias then f's rows by gate_init), gate_bias, norm,
        out_proj; projections weight before bias, uniform on +-1/sqrt(dim)."""
        uniform_(self.in_proj.weight, 1.0 / math.sqrt(self.dim))
        if self.in_proj.bias is not None:
            fill(self.in_proj.bias.detach(), self._draw_bias)
        if self.gate_bias is not None:
            self._draw_gate(self.gate_bias)
        reset_norm(self.norm)
        reset_linear(self.out_proj)

    def _draw_bias(self, t: Tensor) -> None:
        """The bias of in_proj."""
        bound = 1.0 / math.sqrt(self.dim)
        ops.init_uniform_(t, -bound, bound)
        self._draw_chosen_rows(t)

    def reset_chosen_biases(self) -> None:
        """in_proj's bias: zero, but for the rows of f with gate_init, which are drawn as
        reset_parameters() does."""
        if self.in_proj.bias is not None:
            fill(self.in_proj.bias.detach(), lambda t: self._draw_chosen_rows(t.zero_()))

    def _draw_chosen_rows(self, t: Tensor) -> None:
        if self.gate_init is not None:
            self._draw_gate(t[self.dim : 2 * self.dim])

    def _draw_gate(self, t: Tensor) -> None:
        parse_gate_init("HGRU2", self.gate_init, self.dim).draw(t, self.dim)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one sequence's state: ``[H, K, K]``."""
        return (self.num_heads, self.expand_ratio, self.expand_ratio)

    def _forward_checked(
        self, x: Tensor, state: Tensor | None, gamma: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        gamma = self._split_gamma(gamma)
        qfv = self._operands(x)
        if self.bidirectional:
            ahead, _ = self._recur(qfv, gamma, None, False, cu_seqlens)
            back, _ = self._recur(qfv, gamma, None, True, cu_seqlens)
            return self._output(ahead + back), None
        o, state = self._recur(qfv, gamma, state, False, cu_seqlens)
        return self._output(o), state

    def _operands(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the recurrence reads: the one product ``[B, T, 3, H, K]`` where nothing is done to
        its parts, or q, f, v."""
        has_noise = self.gumbel_gate is not None and self.training
        if self.gate_bias is None and not has_noise:
            return self.in_proj(x).unflatten(-1, (3, self.num_heads, self.expand_ratio))
        q, f, v = self._project(x)
        return q, gumbel_gate(f, self.gumbel_gate) if has_noise else f, v

    def _step_checked(self, x: Tensor, state: Tensor, gamma: Tensor | None) -> Tensor:
        o = ops.hgrn2_step(
            *self._project(x),
            self._split_gamma(gamma),
            state,
            scale=self.scale,
            q_activation=self.q_activation,
            v_activation=self.v_activation,
        )
        return self._output(o)

    def forget_gate(
        self, x: Tensor, gamma: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """f'_t, without noise, fp32 or fp64: x ``[..., dim]`` -> the same. gamma as in forward();
        cu_seqlens makes no difference, since the gate reads its own token alone."""
        self._check_gamma(gamma)
        return bounded_gate(widen(self._project(x)[1].flatten(-2)), gamma)[0]

    @torch.no_grad()
    def token_mixing(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        """What the outputs are made of: float64 ``[B, H, T, T]``.

        Row t, column s: the weight of v_s in o_t. x ``[B, T, dim]``, gamma as in forward().
        """
        self._check_mixing(x, gamma)
        q, f, _ = self._project(x)
        gamma = self._split_gamma(gamma)
        decay, k = bounded_gate(f.double(), None if gamma is None else gamma.double())
        return head_mixing(activated(q, self.q_activation), k, decay.log(), self.scale)

    def _check_gamma(self, gamma: Tensor | None) -> None:
        check_gamma("HGRU2", gamma, "dim", self.dim, self._own_weight())

    def _split_gamma(self, gamma: Tensor | None) -> Tensor | None:
        """The lower bound a head and channel ``[H, K]``."""
        if gamma is None:
            return None
        return gamma.unflatten(0, (self.num_heads, self.expand_ratio))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, f, v ``[..., H, K]``: views of one matrix product, but for an f with a bias of its
        own."""
        heads = (self.num_heads, self.expand_ratio)
        q, f, v = self.in_proj(x).unflatten(-1, (3, *heads)).unbind(-3)
        if self.gate_bias is not None:
            f = f + self.gate_bias.view(heads).to(f.dtype)
        return q, f, v

    def _recur(
        self,
        qfv: Tensor | tuple[Tensor, ...],
        gamma: Tensor | None,
        state: Tensor | None,
        reverse: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        is_whole = isinstance(qfv, Tensor)
        op, operands = (ops.hgrn2_qfv, (qfv,)) if is_whole else (ops.hgrn2, qfv)
        return op(
            *operands,
            gamma,
            state,
            scale=self.scale,
            q_activation=self.q_activation,
            v_activation=self.v_activation,
            reverse=reverse,
            cu_seqlens=cu_seqlens,
        )

    def _output(self, o: Tensor) -> Tensor:
        """Norm and output projection of o ``[..., H, K]``."""
        return norm_and_project(self.norm, self.out_proj, o.flatten(-2))

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, bidirectional={self.bidirectional}, "
            f"preset={self.preset!r}"
        )
