#pragma once

// adamw_, the op: torch.ops.tidegate.adamw_, for the optimisers of both languages.

#include <ATen/core/Tensor.h>

#include "src/ops/checks.h"

namespace tidegate::ops {

/// All float32 and of one device; per parameter its gradient and moments, like it, and the count of
/// its steps with this one, []. Gradients may all be bfloat16. rounded: where the new parameters go
/// in bfloat16, too, or empty. lr_tensor: one float32 number on their device, in the place of lr.
struct AdamwArguments {
  at::TensorList parameters, gradients, means, squares, steps, rounded;
  const OptionalTensor& lr_tensor;
  double lr, beta1, beta2, weight_decay, eps;
};

/// Whether the numbers of t lie in the order of the parameter's, of the same sizes. (The stride of
/// a dimension of size one says nothing, and may differ: a file keeps what a view left there.)
bool lies_like(const at::Tensor& t, const at::Tensor& parameter);

/// On CUDA by one kernel for many parameters, in which each tensor must be laid out as its
/// parameter is; on the CPU torch's fused step.
void adamw(const AdamwArguments& arguments);

}  // namespace tidegate::ops
