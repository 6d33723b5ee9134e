#pragma once

// Products of a few rows with a matrix, which decoding is made of: the few-rows product of the CPU,
// its parameters and its entry point, and the parameters of the fused product of CUDA, whose entry
// points are in product_cuda.h. Libraries of matrix products are made for many rows, and reach a
// part of the memory's speed at a few.

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/parallel_for.h"
#include "kernels/norm/norm.h"

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

/// How many rows share one pass over w; a product of more rows takes more passes.
constexpr int64_t kFewRows = 4;

/// Bound by reading w. A row of y has the same bits whatever the other rows are, and however many.
void few_rows_cpu(const FewRowsParams& params, const ParallelFor& parallel);

/// What a layer does before and after a product of a few rows, in one launch with it:
///
///   u = norm(x), with its gate, rounded to the dtype; or x
///   z = u w^T + bias, rounded
///   y = z, or act(z[:outer]) * z[outer:], and the residual added
///
/// `product.outer` are the channels of y; w and the bias have twice as many rows with is_glu. The
/// last rows of w may lie elsewhere (`more`), where there is neither a GLU nor a bias: so several
/// products of one x are one launch.
struct FusedProductParams {
  static constexpr int kMore = 2;

  struct More {
    const void* w = nullptr;  // null: none
    int64_t stride_w = 0;
    int64_t first = 0;  // the channel of y that its first row makes
  };

  FewRowsParams product;
  More more[kMore];  // in the order of their channels
  // NormParams says what each is; the norm's weights are [inner], in the dtype, or null.
  bool has_norm = false;
  norm::NormKind norm_kind = norm::NormKind::kRms;
  double eps = 0;
  const void* norm_weight = nullptr;
  const void* norm_bias = nullptr;
  // What an RMS norm without a gate divides x by, where an earlier kernel has it: sums of squares,
  // [square_parts, 64], of 64 rows each, all of which add up to a row's. Null: those of x.
  const float* squares = nullptr;
  int64_t square_parts = 0;
  const void* gate = nullptr;  // [rows, inner], or null
  int64_t stride_gate = 0;
  norm::Activation gate_activation = norm::Activation::kSilu;
  bool gate_first = false;
  bool is_glu = false;
  norm::Activation activation = norm::Activation::kSilu;
  const void* residual = nullptr;  // [rows, outer], or null
  int64_t stride_residual = 0;
};

}  // namespace tidegate::kernels::product
