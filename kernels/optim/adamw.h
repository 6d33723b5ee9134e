#pragma once

// A step of AdamW for many parameters: what a launch is told. The CUDA entry point is in
// adamw_cuda.h.

#include <cstdint>

#include "kernels/common/dtype.h"

namespace tidegate::kernels::optim {

/// One parameter with what belongs to it, dense and in one order; float32, but for `gradient` and
/// `rounded`.
struct AdamwTensor {
  float* parameter = nullptr;
  const void* gradient = nullptr;
  void* rounded = nullptr;                   // the new parameter, in bfloat16; null: not wanted
  float *mean = nullptr, *square = nullptr;  // m and v below
  const float* step = nullptr;               // [], the count with this step, on the device
  int64_t size = 0;
};

/// With g the gradient and t the count:
///
///   p -= lr * weight_decay * p
///   m = beta1 * m + (1 - beta1) * g,   v = beta2 * v + (1 - beta2) * g^2
///   p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
///
/// m is the member `mean` and torch's exp_avg, v is the member `square` and torch's exp_avg_sq.
struct AdamwParams {
  /// Tensors of one launch. All that a launch is told goes to it as kernel parameters, which may
  /// take 4096 bytes; adamw.cu asserts that they do not take more.
  static constexpr int kMost = 64;
  AdamwTensor tensors[kMost];
  int count = 0;
  DType gradients = DType::kFloat32;  // of all; or bfloat16
  double lr = 0;
  const float* device_lr = nullptr;  // [], in the place of lr
  double beta1 = 0, beta2 = 0, weight_decay = 0, eps = 0;
};

}  // namespace tidegate::kernels::optim
