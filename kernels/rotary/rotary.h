#pragma once

// Rotary positions: parameters and the CPU entry point. The CUDA entry point is in rotary_cuda.h.

#include <cstdint>

#include "kernels/common/parallel_for.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::rotary {

/// y = x with channels i and i + half of every head turned by an angle.
struct RotaryParams {
  int64_t batch = 0, time = 0, heads = 0, half = 0;
  HeadSeries x;               // [B, T, H, 2 * half]
  HeadSeries y;               // [B, T, H, 2 * half] in x's dtype
  const void* cos = nullptr;  // [1 or B, T, half] in the state's dtype, contiguous
  const void* sin = nullptr;
  bool shared_angles = false;  // the whole batch has the same angles
  bool inverse = false;        // turns back
};

/// Reads x and writes y once, in any real dtype.
void rotary_cpu(const RotaryParams& params, const ParallelFor& parallel);

}  // namespace tidegate::kernels::rotary
