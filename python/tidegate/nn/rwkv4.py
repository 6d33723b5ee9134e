"""RWKV-4's token mixing (arXiv 2305.13048)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .._sharding import fill
from ._common import (
    KeepsFloat32,
    check_choice,
    check_positive,
    check_switch,
    constant_,
    is_finite,
    is_its_weight,
    make_linear,
    number_text,
    refuse_gamma,
    reset_linear,
    wide_dtype,
)
from ._states import TensorStateMixer


class RWKV4(KeepsFloat32, TensorStateMixer):
    """RWKV-4's token mixing: a mean of the values so far, whose weights decay, behind a gate::

        r, k, v = W_r x, W_k x, W_v x
        y = W_o (sigmoid(r) * wkv4(exp(w_log), u, k, v))

    `tidegate.ops.wkv4` has the equations and where they come from. Su Jianlin's article on LRU
    takes this without time_shift.

    Args:
        dim: width of x, y and the state.
        time_shift: whether r, k and v see the previous token too: each is projected from
            ``mix * x_t + (1 - mix) * x_{t-1}`` with a mix of its own a channel (x_{-1} = 0).
        decay_init: how w_log and u start. "speed": RWKV-4's, from slow to fast over the channels,
            ``w_log_j = -5 + 8 (j / (dim - 1))^(0.7 + 1.3 depth)`` and ``u_j = log 0.3`` with -1/2,
            0, 1/2 in turn on top. "uniform": w_log uniform on [-5, 3), u zero.
        depth: where the layer stands, 0 the first and 1 the last: of decay_init="speed", and of how
            the mixes of time_shift start. Models set it for each layer where no option does.

    Parameters: ``in_proj.weight`` ``[3 * dim, dim]``, rows of r, k, v; ``out_proj.weight``;
    ``w_log`` and ``u`` ``[dim]``, which stay fp32 in a 16-bit module, natural logarithms of the
    decay's rate a step and of the newest token's bonus; with time_shift ``mix`` ``[3, dim]``, of r,
    k, v.

    State: one tensor ``[N, 3, dim]``, the op's; with time_shift ``[N, 4, dim]``, the last row being
    the last token's x. fp32, fp64 in an fp64 module. Zeros are empty.

    Raises ValueError for options that are unknown.
    """

    _owner = "RWKV4"
    takes_gamma = False
    needs_gamma = False
    gamma_size = 0
    _float32_names = ("w_log", "u")

    def __init__(
        self,
        dim: int,
        *,
        time_shift: bool = False,
        decay_init: str = "speed",
        depth: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_positive("RWKV4", "dim", dim)
        check_switch("RWKV4", "time_shift", time_shift)
        check_choice("RWKV4", "decay_init", decay_init, ("speed", "uniform"))
        if not (is_finite(depth) and 0.0 <= depth <= 1.0):
            raise ValueError(
                f"RWKV4: depth: expected a number from 0 to 1; got {number_text(depth)}"
            )
        self.dim = dim
        self.time_shift = time_shift
        self.decay_init = decay_init
        self.depth = float(depth)
        self.in_proj = make_linear(dim, [dim] * 3, False, device, dtype)
        self.out_proj = make_linear(dim, dim, False, device, dtype)
        self.w_log = nn.Parameter(torch.empty(dim, device=device, dtype=wide_dtype(dtype)))
        self.u = nn.Parameter(torch.empty(dim, device=device, dtype=wide_dtype(dtype)))
        mix = torch.empty(3, dim, device=device, dtype=dtype) if time_shift else None
        self.mix = None if mix is None else nn.Parameter(mix)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """in_proj, out_proj: uniform on +-1/sqrt(dim); w_log, u by decay_init; mix as RWKV-4's:
        ``(j / dim)^(1 - depth)`` for k, that plus ``0.3 depth`` for v, its square root for r."""
        reset_linear(self.in_proj)
        reset_linear(self.out_proj)
        if self.decay_init == "uniform":
            ops.init_uniform_(self.w_log, -5.0, 3.0)
            constant_(self.u, 0.0)
        else:
            power = 0.7 + 1.3 * self.depth
            last = max(self.dim - 1, 1)
            _write(self.w_log, [-5.0 + 8.0 * (j / last) ** power for j in range(self.dim)])
            bonus = math.log(0.3)
            _write(self.u, [bonus + 0.5 * ((j + 1) % 3 - 1) for j in range(self.dim)])
        if self.mix is not None:
            rest = 1.0 - self.depth
            keys = [(j / self.dim) ** rest for j in range(self.dim)]
            gates = [(j / self.dim) ** (0.5 * rest) for j in range(self.dim)]
            _write(self.mix, gates + keys + [m + 0.3 * self.depth for m in keys])

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one sequence's state: ``[3, dim]``, or ``[4, dim]`` with time_shift."""
        return (4 if self.time_shift else 3, self.dim)

    def _forward_checked(
        self, x: Tensor, state: Tensor | None, gamma: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        last = None
        if state is not None:
            state, last = state[:, :3], state[:, 3:]
        before = None
        if self.time_shift:
            before, last = _previous_tokens(x, last, cu_seqlens)
        r, k, v = self._project(x, before)
        o, sums = ops.wkv4(self.w_log.exp(), self.u, k, v, state, cu_seqlens=cu_seqlens)
        if self.time_shift:
            sums = torch.cat([sums, last.to(sums.dtype)], 1)
        return self.out_proj(torch.sigmoid(r) * o), sums

    def _step_checked(self, x: Tensor, state: Tensor, gamma: Tensor | None) -> Tensor:
        r, k, v = self._project(x, state[:, 3].to(x.dtype) if self.time_shift else None)
        o = ops.wkv4_step(self.w_log.exp(), self.u, k, v, state[:, :3])
        if self.time_shift:
            state[:, 3].copy_(x)
        return self.out_proj(torch.sigmoid(r) * o)

    def _project(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, ...]:
        """r, k, v, of the token x and the one before."""
        if before is None:
            return self.in_proj(x).chunk(3, dim=-1)
        mixed = [torch.lerp(before, x, mix.to(x.dtype)) for mix in self.mix]
        if not is_its_weight(self.in_proj):  # it is called, at the price of rows that are dropped
            return tuple(self.in_proj(m).chunk(3, dim=-1)[k] for k, m in enumerate(mixed))
        weights = self.in_proj.weight.chunk(3)
        return tuple(F.linear(m, w) for m, w in zip(mixed, weights, strict=True))

    def _check_gamma(self, gamma: Tensor | None) -> None:
        refuse_gamma("RWKV4", gamma, ", since it has no lower bound")

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, time_shift={self.time_shift}, decay_init={self.decay_init!r}, "
            f"depth={self.depth}"
        )


def _write(p: Tensor, values: list[float]) -> None:
    def draw(t: Tensor) -> None:
        with torch.no_grad():
            t.copy_(torch.tensor(values, dtype=torch.float64, device="cpu").view(t.shape))

    fill(p, draw)


def _previous_tokens(
    x: Tensor, last: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The token before each one of x ``[B, T, D]``, and the last of every sequence ``[N, 1, D]``.
    last ``[N, 1, D]``: the tokens before the first ones; None: zeros."""
    bounds = None if cu_seqlens is None else ops.packed_bounds("RWKV4", x, cu_seqlens)
    count = x.size(0) if bounds is None else bounds.numel() - 1
    first = x.new_zeros(count, 1, x.size(2)) if last is None else last.to(x.dtype)
    if bounds is None:
        whole = torch.cat([first, x], 1)
        return whole[:, :-1], whole[:, -1:]
    if x.size(1) == 0 or count == 0:
        return x, first
    here = torch.arange(x.size(1), device=x.device)
    sequence = torch.searchsorted(bounds, here, right=True) - 1
    begins = (here == bounds[sequence])[None, :, None]
    before = torch.where(begins, first[sequence, 0][None], x.roll(1, 1))
    has_tokens = (bounds.diff() > 0)[:, None, None]
    ends = x[0, (bounds[1:] - 1).clamp(min=0)][:, None]
    return before, torch.where(has_tokens, ends, first)
