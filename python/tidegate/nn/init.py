"""Initialisers of forget-gate biases ("Towards Understanding Gated Linear Recurrent Neural
Networks", sections 3 and 4).

Each writes p, the bias of a gate that multiplies the earlier state (logits), in place and returns
it: drawn in float32 from torch's default CPU generator, then cast and copied, the same in C++
(``tidegate::nn::init``). Nothing is recorded by autograd; a sharded p gets its share of what one
process would have drawn. d is the number of gates that the bound of u is taken from; None = p's
elements. Modules that have the option ``gate_init`` call these by name.
"""

from __future__ import annotations

import math

from torch import Tensor

from .. import ops

__all__ = ["chrono_", "gumbel_softmax_", "standard_", "ugi_"]


def standard_(p: Tensor, d: int | None = None) -> Tensor:
    """``p ~ U(-1/sqrt(d), 1/sqrt(d))``: gates near one half."""
    bound = 1.0 / math.sqrt(_count(p, d))
    return ops.init_uniform_(p, -bound, bound)


def chrono_(p: Tensor, T_max: int) -> Tensor:
    """``p = log u, u ~ U(1, T_max - 1)`` (Tallec and Ollivier 2018, arXiv 1804.11188): gates that
    keep for up to about T_max tokens."""
    return ops.init_chrono_(p, T_max)


def ugi_(p: Tensor, d: int | None = None) -> Tensor:
    """``p = logit u, u ~ U(1/d, 1 - 1/d)`` (Gu et al. 2020, arXiv 1910.09890): gates that are
    uniform on (0, 1)."""
    return ops.init_gumbel_softmax_(p, _count(p, d), 0.0, 1.0)


def gumbel_softmax_(
    p: Tensor, d: int | None = None, *, alpha: float = 0.0, tau: float = 0.5
) -> Tensor:
    """``p = (alpha + logit u) / tau, u ~ U(1/d, 1 - 1/d)``: gates near zero and one, the more so
    the smaller tau; alpha pushes them towards one; alpha = 0, tau = 1 is `ugi_`. The paper uses it
    in the first layer."""
    return ops.init_gumbel_softmax_(p, _count(p, d), alpha, tau)


def _count(p: Tensor, d: int | None) -> int:
    return p.numel() if d is None else d
