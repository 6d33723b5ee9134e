#pragma once

// scale_, the op: torch.ops.tidegate.scale_, by which masters' gradients are clipped.

#include <ATen/core/Tensor.h>

namespace tidegate::ops {

/// Multiplies floating-point tensors of one device, in place, by one float32 number there; each
/// product is made in float32 (float64 for float64) and rounded once. at::_foreach_mul_ would round
/// the factor to the tensors' 16 bits.
void scale(at::TensorList tensors, const at::Tensor& factor);

}  // namespace tidegate::ops
