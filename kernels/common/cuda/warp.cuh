#pragma once

// Sums and largest values over the lanes of a warp, each of which gets the result. Their order is
// fixed by the lanes' numbers, so that equal inputs give equal bits.

#include "kernels/common/cuda/numeric.cuh"

namespace tidegate::kernels {

__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

/// The sum over kLanes neighbouring lanes, a power of two: lanes that are far apart first.
template <int kLanes = kWarpSize, class Real>
__device__ inline Real warp_sum(Real x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

template <int kLanes = kWarpSize, class Real>
__device__ inline Real warp_max(Real x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x = larger(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

/// The sum over four neighbouring lanes, those that hold a row of an mma's accumulators:
/// neighbours first.
template <class Real>
__device__ inline Real quad_sum(Real x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x;
}

template <class Real>
__device__ inline Real quad_max(Real x) {
  x = larger(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return larger(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/// Sums kCount values, each over as many lanes as differ in kDistance and the bits below, at the
/// price of about one: every exchange halves the values that a lane still adds up, and with them
/// the lanes it shares them with. A lane is left with the sums of its own, in front.
template <int kCount, int kDistance, class Real>
__device__ inline void scatter_sums(Real* values, int lane) {
  if constexpr (kDistance > 0) {
    if constexpr (kCount > 1) {
      constexpr int kHalf = kCount / 2;
      const bool upper = (lane & kDistance) != 0;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const Real keep = upper ? values[i + kHalf] : values[i];
        const Real give = upper ? values[i] : values[i + kHalf];
        values[i] = keep + __shfl_xor_sync(0xffffffffu, give, kDistance);
      }
      scatter_sums<kHalf, kDistance / 2>(values, lane);
    } else {
      values[0] += __shfl_xor_sync(0xffffffffu, values[0], kDistance);
      scatter_sums<1, kDistance / 2>(values, lane);
    }
  }
}

/// threadIdx.x, read anew: what is derived from it is computed where it is needed, instead of being
/// kept in registers through a loop that has none left, or fetched again and again.
__device__ inline int fresh_thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

}  // namespace tidegate::kernels
