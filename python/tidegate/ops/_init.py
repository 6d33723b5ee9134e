"""How parameters begin."""

import torch
from torch import Tensor

from .._sharding import fill
from ._checks import check_numbers, check_tensor


def init_uniform_(p: Tensor, low: float, high: float) -> Tensor:
    """``p ~ U[low, high)``. All initialisers here draw in float32 from torch's default CPU
    generator, as the C++ functions do, then cast and copy to p; they draw nothing on the meta
    device, and autograd does not record them. A sharded p (a DTensor) gets its share of what one
    process would have drawn; the bare operator takes plain tensors only. Returns p.
    """
    check_numbers("init_uniform_", p, low=low, high=high)
    fill(p, lambda t: torch.ops.tidegate.init_uniform_(t, low, high))
    return p


def init_normal_(p: Tensor, mean: float, std: float) -> Tensor:
    """``p ~ N(mean, std^2)``; see :func:`init_uniform_`."""
    check_numbers("init_normal_", p, mean=mean, std=std)
    fill(p, lambda t: torch.ops.tidegate.init_normal_(t, mean, std))
    return p


def init_constant_(p: Tensor, value: float) -> Tensor:
    """``p = value``; see :func:`init_uniform_`."""
    check_numbers("init_constant_", p, value=value)
    fill(p, lambda t: torch.ops.tidegate.init_constant_(t, value))
    return p


def init_chrono_(p: Tensor, t_max: int) -> Tensor:
    """``p = log u, u ~ U[1, t_max - 1)``, t_max of 2 or more; see :func:`init_uniform_`, and
    `tidegate.nn.init` for what it is for."""
    check_numbers("init_chrono_", p, t_max=t_max)
    fill(p, lambda t: torch.ops.tidegate.init_chrono_(t, t_max))
    return p


def init_gumbel_softmax_(p: Tensor, d: int, alpha: float, tau: float) -> Tensor:
    """``p = (alpha + log u - log(1 - u)) / tau, u ~ U[1/d, 1 - 1/d)``, d of 2 or more, tau above 0;
    see :func:`init_uniform_`, and `tidegate.nn.init` for what it is for."""
    check_numbers("init_gumbel_softmax_", p, d=d, alpha=alpha, tau=tau)
    fill(p, lambda t: torch.ops.tidegate.init_gumbel_softmax_(t, d, alpha, tau))
    return p


def init_lru_nu_log_(p: Tensor, r_min: float, r_max: float) -> Tensor:
    """``p = log(-log r), r^2 ~ U[r_min^2, r_max^2)``: ``exp(-exp(p))`` is the modulus of a number
    uniform on a ring (LRU, arXiv 2303.06349). 0 <= r_min <= r_max <= 1, not both 0 nor both 1; see
    :func:`init_uniform_`."""
    check_numbers("init_lru_nu_log_", p, r_min=r_min, r_max=r_max)
    fill(p, lambda t: torch.ops.tidegate.init_lru_nu_log_(t, r_min, r_max))
    return p


def init_lru_theta_log_(p: Tensor, max_phase: float) -> Tensor:
    """``p = log theta, theta ~ U(0, max_phase)``, in radians a step; see :func:`init_uniform_`."""
    check_numbers("init_lru_theta_log_", p, max_phase=max_phase)
    fill(p, lambda t: torch.ops.tidegate.init_lru_theta_log_(t, max_phase))
    return p


def init_lru_gamma_log_(p: Tensor, nu_log: Tensor) -> Tensor:
    """``p = log sqrt(1 - r^2), r = exp(-exp(nu_log))``: keeps the size of a state whose inputs are
    independent; nu_log has p's shape; see :func:`init_uniform_`."""
    check_numbers("init_lru_gamma_log_", p)
    check_tensor("init_lru_gamma_log_", "nu_log", nu_log)
    with torch.no_grad():
        rates = nu_log.full_tensor() if hasattr(nu_log, "device_mesh") else nu_log.detach()
    fill(p, lambda t: torch.ops.tidegate.init_lru_gamma_log_(t, rates))
    return p


def init_long_(p: Tensor, t_min: float, t_max: float) -> Tensor:
    """``p_h = -log(exp(1 / T_h) - 1)`` for p [H], T_h from t_min to t_max, both above 0, in equal
    steps of log T (one head: t_min): a gate sigmoid(p_h) forgets over T_h tokens,
    ``sigmoid(p_h)^T_h = 1 / e`` (Forgetting Transformer, section 4.5); see :func:`init_uniform_`.
    """
    check_numbers("init_long_", p, t_min=t_min, t_max=t_max)
    fill(p, lambda t: torch.ops.tidegate.init_long_(t, t_min, t_max))
    return p


def init_rope_theta_(p: Tensor) -> Tensor:
    """``p_j = 10000^(-2 j / d)`` for p [d]: HGRN's phases, in radians a step, which spread like the
    frequencies of rotary embeddings (arXiv 2104.09864); see :func:`init_uniform_`.
    """
    check_numbers("init_rope_theta_", p)
    fill(p, torch.ops.tidegate.init_rope_theta_)
    return p
