#pragma once

// Sums over the rows of small matrices: what kernels leave as partial sums becomes one row each.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace tidegate::kernels {

/// Matrices of one shape and type, each [rows, columns] and contiguous, and where their sums go.
struct RowSums {
  static constexpr int kMost = 3;
  const void* from[kMost] = {};
  void* to[kMost] = {};
  int count = 0;
  int64_t rows = 0, columns = 0;
  DType dtype = DType::kFloat32;  // or float64
};

/// All of them in one launch, in double, in an order that depends on the shape alone. Without rows
/// the sums are zero.
[[nodiscard]] cudaError_t sum_rows(const RowSums& sums, cudaStream_t stream);

}  // namespace tidegate::kernels
