#pragma once

// Copies of tensors into wider ones, or narrower ones, several in one launch: what a family that
// takes certain widths only is given in the place of others.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tidegate::kernels {

/// `to` [sizes[0], sizes[1], sizes[2], to_width] of elements of 2 or 4 bytes. Element (i, j, r, c)
/// is that of `from`, if r < from_rows and c < from_width, and `fill` where it is not. Strides are
/// those of i, j and r, in elements; the last ones are one.
struct PaddedCopy {
  const void* from = nullptr;
  void* to = nullptr;
  int element_bytes = 2;
  uint32_t fill = 0;  // the bits
  int64_t sizes[3] = {};
  int64_t from_strides[3] = {}, to_strides[3] = {};
  int64_t from_rows = 0, from_width = 0, to_width = 0;
};

struct PaddedCopies {
  static constexpr int kMost = 8;
  PaddedCopy copies[kMost] = {};
  int count = 0;
};

/// All of them in one launch. None reads what another writes.
[[nodiscard]] cudaError_t copy_padded(const PaddedCopies& copies, cudaStream_t stream);

}  // namespace tidegate::kernels
