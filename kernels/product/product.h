#pragma once

// Products of a few rows with a matrix, which decoding is made of: parameters and the CPU entry
// point. Libraries of matrix products are made for many rows, and reach a part of the memory's
// speed at a few.

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/parallel_for.h"

namespace tidegate::kernels::product {

/// y = x w^T + bias, all in one dtype; sums in float, or double for float64.
struct FewRowsParams {
  int64_t rows = 0;   // of x and y
  int64_t inner = 0;  // channels of x
  int64_t outer = 0;  // channels of y
  DType dtype = DType::kFloat32;
  const void* x = nullptr;  // [rows, inner]
  int64_t stride_x = 0;     // elements from one row to the next, here and below
  const void* w = nullptr;  // [outer, inner]
  int64_t stride_w = 0;
  const void* bias = nullptr;  // [outer] or null
  void* y = nullptr;           // [rows, outer]
  int64_t stride_y = 0;
};

/// So many rows share one pass over w; more take more passes.
constexpr int64_t kFewRows = 4;

/// Bound by reading w. A row of y has the same bits whatever the other rows are, and however many.
void few_rows_cpu(const FewRowsParams& params, const ParallelFor& parallel);

}  // namespace tidegate::kernels::product
