#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/time_series.h"

namespace tidegate::kernels {

/// Where one sequence lies in the [B, T, ...] tensors.
struct SequenceBounds {
  int64_t batch = 0;   // b
  int64_t begin = 0;   // its first token
  int64_t length = 0;  // and its number of tokens
};

/// The bounds of sequence n. Reads the offsets, so they must be on the CPU. Offsets that do not
/// rise from 0 to T give other lengths, never tokens outside [0, T).
inline SequenceBounds sequence_bounds(const SequenceLayout& layout, int64_t n) {
  if (layout.offsets == nullptr) return {n, 0, layout.time};
  const auto offset_at = [&](int64_t i) {
    const int64_t offset = layout.offsets_are_int64
                               ? static_cast<const int64_t*>(layout.offsets)[i]
                               : static_cast<const int32_t*>(layout.offsets)[i];
    return std::clamp<int64_t>(offset, 0, layout.time);
  };
  const int64_t begin = offset_at(n);
  return {0, begin, std::max<int64_t>(offset_at(n + 1) - begin, 0)};
}

}  // namespace tidegate::kernels
