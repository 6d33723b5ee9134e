#pragma once

// What the plain kernels and the step share: rows of a tensor, exponentials of either state type.

#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/cuda/elements.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::attention {

/// The rows of one head of one sequence.
template <class E>
struct AttentionRows {
  E* first;
  int64_t step;

  __device__ AttentionRows(const HeadSeries& series, int64_t batch, int64_t start, int64_t head)
      : first(static_cast<E*>(series.data) + element_offset(series, batch, start, head)),
        step(series.stride_t) {}
  __device__ E* row(int64_t token) const { return first + token * step; }
};

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

}  // namespace tidegate::kernels::attention
