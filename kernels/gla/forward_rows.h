#pragma once

// Which rows the forward pass on tensor cores reads where they are: for its planner, and for ops,
// which copy the others.

#include <algorithm>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::gla {

/// Channels of K, and columns of V, that a block of threads has at most.
constexpr int64_t kForwardTile = 128;

/// How far past a multiple of 16 bytes a row may begin, 0, 8, 12 or 14 bytes, where all begin at
/// sums of multiples of the lowest bit of `offsets`.
inline int64_t most_late_bytes(uint64_t offsets) {
  return offsets % 16 == 0 ? 0 : 16 - static_cast<int64_t>(offsets & (~offsets + 1));
}

/// Whether rows of `dim` numbers of `size` bytes, copied from the multiple of 16 bytes before each,
/// have room in tiles of `tile` numbers.
inline bool rows_fit_tile(int64_t late, int64_t size, int64_t dim, int64_t tile = kForwardTile) {
  return std::min(dim, kForwardTile) * size + late <= tile * size;
}

inline bool rows_fit_tile(const HeadSeries& rows, int64_t dim, int64_t tile = kForwardTile) {
  const int64_t size = element_size(rows.dtype);
  const auto strides =
      static_cast<uint64_t>((rows.stride_b | rows.stride_t | rows.stride_h) * size);
  const int64_t late = most_late_bytes(reinterpret_cast<uintptr_t>(rows.data) | strides);
  return rows.data == nullptr || rows_fit_tile(late, size, dim, tile);
}

}  // namespace tidegate::kernels::gla
