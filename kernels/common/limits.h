#pragma once

// What no family of kernels takes, whatever it computes: the parts of their `<name>_unsupported`.

#include <cstdint>

#include "kernels/common/time_series.h"

namespace tidegate::kernels {

// The kernels count steps, and the bytes from one row to the next, in 32 bits.
constexpr int64_t kMaxTime = int64_t{1} << 30;
constexpr int64_t kMaxRowDistance = int64_t{1} << 31;  // bytes

/// A gate may come in the data's type or in the wider type of the state.
constexpr bool gate_dtype_fits(DType gate, DType data) {
  return gate == data || gate == state_dtype(data);
}

/// Whether rows of a TimeSeries or HeadSeries are further apart than the kernels can count.
template <class Series>
bool rows_too_far_apart(const Series& t) {
  const int64_t bytes = t.stride_t * element_size(t.dtype);
  return bytes >= kMaxRowDistance || bytes <= -kMaxRowDistance;
}

/// Why, or null.
inline const char* layout_unsupported(const SequenceLayout& layout) {
  if (layout.time > kMaxTime) {
    return "more than 2^30 time steps";
  }
  if (layout.batch < 0 || layout.time < 0 || layout.sequences < 0) {
    return "negative sizes";
  }
  if (layout.offsets != nullptr && layout.batch != 1) {
    return "packed sequences need a batch of one";
  }
  return nullptr;
}

}  // namespace tidegate::kernels
