#pragma once

// Where a sequence of a layout lies.

#include "kernels/common/time_series.h"

namespace tidegate::kernels {

/// One sequence of a layout. Lengths fit 32 bits (see *_unsupported); positions in memory do not.
struct Sequence {
  int64_t index;  // n in [0, N)
  int64_t batch;  // row of the batch
  int64_t start;  // first token
  int length;     // tokens
};

__device__ inline Sequence find_sequence(const SequenceLayout& layout, int64_t n) {
  if (layout.offsets == nullptr) {
    return {n, n, 0, static_cast<int>(layout.time)};
  }
  const auto offset = [&](int64_t i) -> int64_t {
    return layout.offsets_are_int64 ? static_cast<const int64_t*>(layout.offsets)[i]
                                    : static_cast<const int32_t*>(layout.offsets)[i];
  };
  const int64_t start = offset(n);
  return {n, 0, start, static_cast<int>(offset(n + 1) - start)};
}

}  // namespace tidegate::kernels
