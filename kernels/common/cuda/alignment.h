#pragma once

// Whether tensors can be accessed in packs of so many bytes.

#include <cstdint>

#include "kernels/common/time_series.h"

namespace tidegate::kernels {

/// Whether an address is a multiple of `bytes`. Null is.
inline bool is_aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

/// Whether every row of a tensor begins at a multiple of `bytes`, a multiple of the element's size.
inline bool rows_aligned(const TimeSeries& t, int64_t bytes) {
  const int64_t elements = bytes / element_size(t.dtype);
  return is_aligned(t.data, bytes) && t.stride_b % elements == 0 && t.stride_t % elements == 0;
}
inline bool rows_aligned(const HeadSeries& t, int64_t bytes) {
  const int64_t elements = bytes / element_size(t.dtype);
  return is_aligned(t.data, bytes) && t.stride_b % elements == 0 && t.stride_t % elements == 0 &&
         t.stride_h % elements == 0;
}

}  // namespace tidegate::kernels
