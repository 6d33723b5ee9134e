"""Gated linear attention as a token mixer, with the normaliser of linear attention on request."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ._common import (
    MAX_HEAD_DIM,
    NORMS_OR_NONE,
    bounded_log_gate,
    check_choice,
    check_eps,
    check_mixer_input,
    check_positive,
    check_switch,
    gated_norm,
    is_finite,
    kind_of,
    make_linear,
    make_norm,
    reset_linear,
    reset_norm,
    wide_dtype,
    widen,
)
from ._gate_init import check_gate_options, gumbel_gate, parse_gate_init
from ._lower_bound import OptionalLowerBound
from ._states import (
    check_own_memory,
    check_sizes,
    check_state_tensor,
    empty_state,
    refuse_gradients,
    sequence_count,
)
from ._token_mixing import head_mixing

FEATURE_MAPS = ("elu+1", "relu", "exp")


class GLAState(NamedTuple):
    """What a normalising `GatedLinearAttention` remembers: s ``[N, H, K, V]`` and the sum of the
    gated keys z ``[N, H, K]``."""

    s: Tensor
    z: Tensor


def feature_map_of(name: str | None, x: Tensor) -> Tensor:
    """The feature map `name` of x, in x's dtype; none of them is negative."""
    if name == "elu+1":  # exp where x < 0: elu(x) + 1 would round there
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    if name == "relu":
        return F.relu(x)
    return x.exp() if name == "exp" else x


class GatedLinearAttention(OptionalLowerBound, nn.Module):
    """Gated linear attention: a token mixer (Yang et al., arXiv 2312.06635; with a scalar gate and
    a normaliser, the Forgetting Transformer's equations 7 to 9).

    For each of H heads, with q, k of K = key_dim / H and v of V = value_dim / H channels, linear in
    x, feature map phi and gate f_t in (0, 1), one a key channel or one a head::

        S_t = diag(f_t) S_{t-1} + phi(k_t) v_t^T
        o_t = K^-0.5 * S_t^T phi(q_t)                                    normalize=False
        o_t = S_t^T phi(q_t) / z_t.phi(q_t),  z_t = f_t z_{t-1} + phi(k_t)   normalize=True
        y_t = [Norm(o_t) * silu(g_t)] W_o,  Norm over each head

        log f_t = logsigmoid(x_t W_1 W_2 + b) / temperature     gate="vector", W_1 of rank gate_rank
        log f_t = logsigmoid(x_t w + b) / temperature           gate="scalar", one w a head

        f_t = gamma + (1 - gamma) * f'_t, with f' from the line above       lower_bound=True

    Args:
        dim: width of x and y.
        num_heads: H, a divisor of key_dim and value_dim.
        gate: "vector" or "scalar".
        normalize: whether o is divided by the normaliser; needs a feature map, and means something
            with norm="none" alone: any other norm of a head takes out again what o was divided by.
        feature_map: phi: "elu+1", "relu", "exp" (none of them negative), or None: phi(x) = x.
        key_dim: width of q and of k over all heads. None: dim / 2.
        value_dim: width of v over all heads. None: dim.
        gate_rank: rank of the vector gate's projection.
        gate_temperature: None: 16 for the vector gate, 1 for the scalar one.
        gate_init: how b starts: "standard", "ugi", "chrono:T_max", "gumbel-softmax" or
            "gumbel-softmax:alpha:tau" (see `tidegate.nn.init`); None: uniform on +-1/sqrt(fan in),
            which is "standard".
        gumbel_gate: tau of Gumbel-Gate: noise on what logsigmoid takes in training; see
            `GatedLinearRNN`.
        lower_bound: whether a gamma is taken, one a gate: HGRN's lower bounds.
        output_gate: whether there is a g.
        norm: "layer", "rms" or "rms_no_weight"; its weights are shared over the heads. "none": o
            itself, with normalize=True the paper's equations 7 to 9.
        norm_eps: the norm's epsilon.

    Parameters: ``in_proj.weight``, whose rows are q, k (key_dim each), v (value_dim), g (value_dim,
    with an output gate) and W_1 (gate_rank, with a vector gate); ``gate_proj`` (weight and bias:
    W_2 and b, or w and b); ``norm`` (V); ``out_proj.weight`` ``[dim, value_dim]``. No other biases.

    State: a tensor ``[N, H, K, V]``; normalising, a `GLAState`. fp32, fp64 in an fp64 module.

    Raises ValueError for options that are unknown or do not fit each other. The default options are
    those of flash-linear-attention's layer of this name.
    """

    bidirectional = False
    _owner = "GatedLinearAttention"

    def __init__(
        self,
        dim: int,
        num_heads: int = 4,
        *,
        gate: str = "vector",
        normalize: bool = False,
        feature_map: str | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        gate_rank: int = 16,
        gate_temperature: float | None = None,
        gate_init: str | None = None,
        gumbel_gate: float | None = None,
        lower_bound: bool = False,
        output_gate: bool = True,
        norm: str = "rms",
        norm_eps: float = 1e-5,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        owner = self._owner
        check_positive(owner, "dim", dim)
        key_dim = max(dim // 2, 1) if key_dim is None else key_dim
        value_dim = dim if value_dim is None else value_dim
        check_positive(owner, "num_heads", num_heads)
        for name, width in (("key_dim", key_dim), ("value_dim", value_dim)):
            check_positive(owner, name, width)
            if width % num_heads:
                raise ValueError(
                    f"{owner}: {name}: expected a multiple of num_heads={num_heads}; got {width}"
                )
            if width // num_heads > MAX_HEAD_DIM:
                raise ValueError(
                    f"{owner}: {name}: expected at most {MAX_HEAD_DIM} channels a head; got "
                    f"{width // num_heads}"
                )
        check_positive(owner, "gate_rank", gate_rank)
        check_choice(owner, "gate", gate, ("vector", "scalar"))
        check_switch(owner, "normalize", normalize)
        check_switch(owner, "lower_bound", lower_bound)
        check_switch(owner, "output_gate", output_gate)
        check_choice(owner, "feature_map", feature_map, (None, *FEATURE_MAPS))
        check_choice(owner, "norm", norm, NORMS_OR_NONE)
        check_eps(owner, "norm_eps", norm_eps)
        if gate_temperature is None:
            gate_temperature = 16.0 if gate == "vector" else 1.0
        if not (is_finite(gate_temperature) and gate_temperature > 0):
            raise ValueError(
                f"{owner}: gate_temperature: expected a positive number; got {gate_temperature!r}"
            )
        gates = key_dim if gate == "vector" else num_heads
        check_gate_options(owner, True, "", gate_init, gumbel_gate, gates)
        if normalize and feature_map is None:
            raise ValueError(
                f"{owner}: feature_map: expected 'elu+1', 'relu' or 'exp' with normalize=True, "
                "whose divisor must not be negative; got None"
            )
        if normalize and norm != "none":
            warnings.warn(
                f"{owner}: normalize=True changes nothing before norm={norm!r}, which divides each "
                "head by its own size; norm='none' gives the normalised output",
                stacklevel=2,
            )
        self.dim, self.num_heads = dim, num_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.gate = gate
        self.normalize = bool(normalize)
        self.feature_map = feature_map
        self.gate_temperature = gate_temperature
        self.gate_init, self.gumbel_gate = gate_init, gumbel_gate
        self.lower_bound = lower_bound
        self.output_gate = bool(output_gate)
        self.scale = 1.0 if normalize else (key_dim // num_heads) ** -0.5

        where = {"device": device, "dtype": dtype}
        is_vector = gate == "vector"
        self._parts = {"q": key_dim, "k": key_dim, "v": value_dim}
        if self.output_gate:
            self._parts["g"] = value_dim
        if is_vector:
            self._parts["gate"] = gate_rank
        self.in_proj = make_linear(dim, self._parts.values(), False, **where)
        self.gate_proj = make_linear(gate_rank if is_vector else dim, gates, True, **where)
        self.norm = make_norm(norm, value_dim // num_heads, norm_eps, **where)
        self.out_proj = make_linear(value_dim, dim, False, **where)
        self.reset_parameters()

    @property
    def _gamma_axis(self) -> str:
        return "key_dim" if self.gate == "vector" else "num_heads"

    def reset_parameters(self) -> None:
        """In this order: in_proj, gate_proj (its bias then by gate_init), norm, out_proj;
        projections weight before bias, uniform on +-1/sqrt(fan in)."""
        reset_linear(self.in_proj)
        reset_linear(self.gate_proj)
        self.reset_chosen_biases()
        reset_norm(self.norm)
        reset_linear(self.out_proj)

    def reset_chosen_biases(self) -> None:
        """gate_proj's bias, by gate_init; without it, nothing."""
        if self.gate_init is not None:
            gate = self.gate_proj
            init = parse_gate_init(self._owner, self.gate_init, gate.out_features)
            init.draw(gate.bias, gate.in_features)

    def init_state(
        self,
        batch: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        capacity: int | None = None,
    ) -> Tensor | GLAState:
        """The empty state of `batch` sequences: zeros.

        device and dtype default to the module's; the state is fp32, or fp64 for dtype float64.
        capacity (tokens to come) is ignored: the state has one size.
        """
        check_sizes(self._owner, batch, capacity)
        s, *z = (
            empty_state(self.out_proj.weight, batch, *shape, device=device, dtype=dtype)
            for shape in self._state_shapes()
        )
        return GLAState(s, *z) if self.normalize else s

    def _state_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of s and, normalising, of z, for one sequence."""
        h, k, v = self.num_heads, self.key_dim // self.num_heads, self.value_dim // self.num_heads
        return [(h, k, v), (h, k)] if self.normalize else [(h, k, v)]

    def forward(
        self,
        x: Tensor,
        state: Tensor | GLAState | None = None,
        *,
        gamma: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | GLAState]:
        """x ``[B, T, dim]`` -> y ``[B, T, dim]`` and the state after the last token.

        state: where to go on from; None = zeros. gamma: this layer's lower bound ``[key_dim]``, or
        ``[num_heads]`` with gate="scalar", in [0, 1), only with lower_bound; None = 0. cu_seqlens:
        bounds ``[N+1]`` of the sequences packed into a B = 1 batch.
        """
        check_mixer_input(self._owner, x, self.dim, weight=self.out_proj.weight)
        self._check_gamma(gamma)
        s, z = (None, None) if state is None else self._split_state(state, x, cu_seqlens)
        parts = self._project(x)
        gumbel = self.gumbel_gate if self.training else None
        q, k, v, log_f = self._operands(parts, x, gamma, gumbel)
        o, s = ops.gated_linear_attention(
            q, k, v, log_f, s, scale=self.scale, cu_seqlens=cu_seqlens
        )
        if not self.normalize:
            return self._output(o, parts), s
        z = None if z is None else z.flatten(1)
        sums, z = ops.linear_scan(*self._key_scan(k, log_f), z, cu_seqlens=cu_seqlens)
        y = self._output(self._normalized(o, q, sums), parts)
        return y, GLAState(s, z.unflatten(-1, k.shape[-2:]))

    def step(self, x: Tensor, state: Tensor | GLAState, gamma: Tensor | None = None) -> Tensor:
        """One token: x ``[B, dim]`` -> y ``[B, dim]``; `state` is updated in place. Has no
        gradient: call it under torch.no_grad() or torch.inference_mode()."""
        check_mixer_input(f"{self._owner}.step", x, self.dim, False, self.out_proj.weight)
        self._check_gamma(gamma)
        s, z = self._split_state(state, x)
        for part in (s,) if z is None else (s, z):
            check_own_memory(f"{self._owner}.step: state", part)
        refuse_gradients(f"{self._owner}.step", self, x, s)
        parts = self._project(x)
        q, k, v, log_f = self._operands(parts, x, gamma)
        o = ops.gated_linear_attention_step(q, k, v, log_f, s, scale=self.scale)
        if z is not None:
            flat = z.flatten(1)
            sums = ops.linear_scan_step(*self._key_scan(k, log_f), flat)
            if not z.is_contiguous():  # flat may be a copy
                z.copy_(flat.view_as(z))
            o = self._normalized(o, q, sums)
        return self._output(o, parts)

    has_data_gate = True

    def forget_gate(
        self, x: Tensor, gamma: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """f_t, without noise, fp32 or fp64: x ``[..., dim]`` -> ``[..., key_dim]``, or
        ``[..., num_heads]`` with gate="scalar". gamma as in forward(); cu_seqlens makes no
        difference, since the gate reads its own token alone."""
        self._check_gamma(gamma)
        return self._operands(self._project(x), x, gamma)[3].exp().flatten(-2)

    def _split_state(
        self, state: Tensor | GLAState, x: Tensor, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """S and z, checked."""
        is_list = isinstance(state, (tuple, list))
        if not (is_list and len(state) == 2 if self.normalize else isinstance(state, Tensor)):
            wanted = "a pair (s, z)" if self.normalize else "a tensor"
            count = f" of {len(state)}" if is_list and self.normalize else ""
            given = kind_of(state) + count
            raise ValueError(
                f"{self._owner}: state: expected {wanted} with normalize={self.normalize}; "
                f"got {given}"
            )
        s, z = state if self.normalize else (state, None)
        count, dtype = sequence_count(x, cu_seqlens), wide_dtype(self.out_proj.weight.dtype)
        names = (f"{self._owner}: state", f"{self._owner}: state: z")
        for name, part, shape in zip(names, (s, z), self._state_shapes(), strict=False):
            check_state_tensor(name, part, (count, *shape), dtype)
        return s, z

    @torch.no_grad()
    def token_mixing(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        """What the outputs are made of: float64 ``[B, H, T, T]``; with a normaliser, divided by it.

        Row t, column s: the weight of v_s in o_t. x ``[B, T, dim]``, gamma as in forward().
        """
        check_mixer_input(f"{self._owner}.token_mixing", x, self.dim)
        self._check_gamma(gamma)
        q, k, _, log_f = self._operands(self._project(x), x, gamma)
        mixing = head_mixing(q, k, log_f, self.scale)
        if self.normalize:
            mixing = mixing / mixing.sum(-1, keepdim=True).clamp_min(torch.finfo().tiny)
        return mixing

    def _project(self, x: Tensor) -> dict[str, Tensor]:
        """All projections of x by one matrix product; views of it by name."""
        sizes = list(self._parts.values())
        return dict(zip(self._parts, self.in_proj(x).split(sizes, dim=-1), strict=True))

    def _operands(
        self,
        parts: dict[str, Tensor],
        x: Tensor,
        gamma: Tensor | None,
        gumbel: float | None = None,
    ) -> tuple[Tensor, ...]:
        """q, k, v ``[..., H, K or V]`` and log f ``[..., H, K or 1]``, in fp32 or fp64; gumbel: tau
        of the gate's noise."""
        heads = (self.num_heads, -1)
        q, k, v = (parts[name].unflatten(-1, heads) for name in "qkv")
        logits = widen(self.gate_proj(parts["gate"] if self.gate == "vector" else x))
        if gumbel is not None:
            logits = gumbel_gate(logits, gumbel)
        log_f = F.logsigmoid(logits).unflatten(-1, heads) / self.gate_temperature
        log_f = bounded_log_gate(log_f, None if gamma is None else gamma.unflatten(-1, heads))
        return feature_map_of(self.feature_map, q), feature_map_of(self.feature_map, k), v, log_f

    def _key_scan(self, k: Tensor, log_f: Tensor) -> tuple[Tensor, Tensor]:
        """What enters z ``[..., H*K]``, and its decay."""
        return widen(k).flatten(-2), log_f.exp().expand(k.shape).flatten(-2)

    def _normalized(self, o: Tensor, q: Tensor, sums: Tensor) -> Tensor:
        """o / (z . q), for z = sums ``[..., H*K]``; zero where all weights are."""
        divisor = (widen(q) * sums.unflatten(-1, q.shape[-2:])).sum(-1, keepdim=True)
        # Where no weight is left, o is zero already: dividing by one keeps its gradient finite.
        empty = divisor < torch.finfo(divisor.dtype).tiny
        return (widen(o) / divisor.masked_fill(empty, 1.0)).to(o.dtype)

    def _output(self, o: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """Norm, gate and output projection of o ``[..., H, V]``."""
        gate = parts["g"].unflatten(-1, o.shape[-2:]) if self.output_gate else None
        return self.out_proj(gated_norm(self.norm, o, gate, "silu").flatten(-2))

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, gate={self.gate!r}, "
            f"normalize={self.normalize}, feature_map={self.feature_map!r}, "
            f"key_dim={self.key_dim}, value_dim={self.value_dim}, lower_bound={self.lower_bound}"
        )
