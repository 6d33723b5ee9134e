#pragma once

// adamw_, the op: torch.ops.tidegate.adamw_, for the optimisers of both languages.

#include <ATen/core/Tensor.h>

#include "src/ops/checks.h"

namespace tidegate::ops {

/// All float32 and of one device; per parameter its gradient and moments, like it, and the count of
/// its steps with this one, []. Gradients may all be bfloat16. rounded: where the new parameters go
/// in bfloat16, too, or empty. lr_tensor: a rate on the device, [] float32, in the place of lr.
struct AdamwArguments {
  at::TensorList parameters, gradients, means, squares, steps, rounded;
  const OptionalTensor& lr_tensor;
  double lr, beta1, beta2, weight_decay, eps;
};

/// On CUDA by one kernel for many parameters, in which each tensor must be laid out as its
/// parameter is; on the CPU torch's fused step.
void adamw(const AdamwArguments& arguments);

}  // namespace tidegate::ops
