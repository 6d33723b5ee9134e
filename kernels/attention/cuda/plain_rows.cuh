#pragma once

// What the plain kernels and the step share: rows of a tensor, numbers of a warp.

#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/time_tiles.cuh"

namespace tidegate::kernels::attention {

/// The rows of one head of one sequence.
template <class E>
struct AttentionRows {
  E* first;
  int64_t step;

  __device__ AttentionRows(const HeadSeries& series, int64_t batch, int64_t start, int64_t head)
      : first(static_cast<E*>(series.data) + batch * series.stride_b + start * series.stride_t +
              head * series.stride_h),
        step(series.stride_t) {}
  __device__ E* row(int64_t token) const { return first + token * step; }
};

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

template <class Real>
__device__ inline Real warp_sum(Real x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(~0u, x, step);
  }
  return x;
}
template <class Real>
__device__ inline Real warp_max(Real x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x = larger(x, __shfl_xor_sync(~0u, x, step));
  }
  return x;
}

/// visit.template operator()<E>() with the CUDA type of `dtype`.
template <class Visit>
auto with_element(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kFloat64:
      return visit.template operator()<double>();
    case DType::kBFloat16:
      return visit.template operator()<__nv_bfloat16>();
    case DType::kFloat16:
      return visit.template operator()<__half>();
    default:
      return visit.template operator()<float>();
  }
}

}  // namespace tidegate::kernels::attention
