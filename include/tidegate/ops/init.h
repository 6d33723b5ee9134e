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

/// p_j = 10000^(-2 j / d), j = 0 .. d - 1, for p of shape [d]: HGRN's phases in radians a step,
/// which spread like the frequencies of rotary embeddings (arXiv 2104.09864).
void init_rope_theta_(at::Tensor p);

}  // namespace tidegate
