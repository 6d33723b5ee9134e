#pragma once

#include <ATen/core/Tensor.h>

namespace tidegate {

// Initialisers of parameters, the same in C++ and Python. Each draws in float32 from torch's
// default CPU generator, in the order of the parameter's elements, then casts and copies, so that a
// seed gives the same parameters on every device and (up to rounding) in every dtype. On the meta
// device nothing is drawn. Autograd records nothing. p: any shape, floating-point.

/// p ~ U[low, high).
void init_uniform_(at::Tensor p, double low, double high);

/// p ~ N(mean, std^2).
void init_normal_(at::Tensor p, double mean, double std);

/// p = value.
void init_constant_(at::Tensor p, double value);

/// p = log u, u ~ U[1, t_max - 1): gates that keep for up to about t_max tokens (chrono
/// initialisation, arXiv 1804.11188). t_max: 2 or more.
void init_chrono_(at::Tensor p, int64_t t_max);

/// p = (alpha + log u - log(1 - u)) / tau, u ~ U[1/d, 1 - 1/d): the Gumbel-softmax trick on a
/// gate's bias; with alpha = 0, tau = 1 gates are uniform (UGI, arXiv 1910.09890). d: 2 or more;
/// tau above 0.
void init_gumbel_softmax_(at::Tensor p, int64_t d, double alpha, double tau);

/// p = log(-log r), r^2 ~ U[r_min^2, r_max^2): with a phase that is uniform, exp(-exp(p)) is the
/// modulus of a number uniform on a ring (LRU, arXiv 2303.06349). 0 <= r_min <= r_max <= 1, not
/// both 0 nor both 1.
void init_lru_nu_log_(at::Tensor p, double r_min, double r_max);

/// p = log theta, theta ~ U(0, max_phase), in radians a step. max_phase above 0.
void init_lru_theta_log_(at::Tensor p, double max_phase);

/// p = log sqrt(1 - r^2), r = exp(-exp(nu_log)): keeps the size of a state whose inputs are
/// independent. nu_log: p's shape, floating-point, on any device.
void init_lru_gamma_log_(at::Tensor p, const at::Tensor& nu_log);

/// p_h = -log(exp(1 / T_h) - 1) for p of shape [H], with T_h from t_min to t_max, both above 0, in
/// equal steps of log T (one head: t_min): a gate sigmoid(p_h) forgets over T_h tokens,
/// sigmoid(p_h)^T_h = 1 / e (Forgetting Transformer, section 4.5).
void init_long_(at::Tensor p, double t_min, double t_max);

/// p_j = 10000^(-2 j / d), j = 0 .. d - 1, for p of shape [d]: HGRN's phases in radians a step,
/// which spread like the frequencies of rotary embeddings (arXiv 2104.09864).
void init_rope_theta_(at::Tensor p);

}  // namespace tidegate
