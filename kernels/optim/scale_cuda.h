#pragma once

// Many tensors in bfloat16 times one factor in float32, which is on the device.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tidegate::kernels::optim {

struct ScaleParams {
  /// Tensors of one launch, all of which it is told as kernel parameters.
  static constexpr int kMost = 128;
  void* tensors[kMost] = {};  // dense, bfloat16, in place
  int64_t sizes[kMost] = {};
  int count = 0;
  const float* factor = nullptr;  // []
};

/// One pass over memory; each product is made in float32 and rounded once.
[[nodiscard]] cudaError_t scale(const ScaleParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::optim
