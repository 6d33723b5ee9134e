#pragma once

// Products of a few rows with a matrix, for the per-ISA units (see cpu_simd.h about what those may
// include).

#include "kernels/common/cpu_types.h"
#include "kernels/product/cpu/product_kernels.h"

namespace tidegate::kernels::product::TIDEGATE_ISA {
namespace {

using namespace kernels::TIDEGATE_ISA;

template <class R>
TIDEGATE_INLINE R sum_of_lanes(Vec<R> x) {
  R sum = 0;
  for (int i = 0; i < kLanes<R>; ++i) sum += x[i];
  return sum;
}

/// y[row, n] for kRows rows and kOuter channels from n on. Each of them has one vector of sums, and
/// terms enter it in one order, whatever kRows and kOuter are.
template <class R, class E, int kRows, int kOuter>
TIDEGATE_INLINE void few_rows_tile(const FewRowsParams& p, const E* x, E* y, int64_t n) {
  const E* const w = static_cast<const E*>(p.w) + n * p.stride_w;
  Vec<R> sums[kRows][kOuter] = {};
  for_each_vector<R>(p.inner, [&](int64_t j, auto extent) {
    Vec<R> right[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) right[r] = load<R>(x + r * p.stride_x + j, extent);
#pragma GCC unroll 8
    for (int o = 0; o < kOuter; ++o) {
      const Vec<R> left = load<R>(w + o * p.stride_w + j, extent);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][o] = fma(left, right[r], sums[r][o]);
    }
  });
  for (int r = 0; r < kRows; ++r) {
    for (int o = 0; o < kOuter; ++o) {
      Vec<R> out = splat(sum_of_lanes<R>(sums[r][o]));
      if (p.bias != nullptr) {
        out += load<R>(static_cast<const E*>(p.bias) + n + o, Part{1});
      }
      store<R>(y + r * p.stride_y + n + o, out, Part{1});
    }
  }
}

template <class R, class E, int kRows>
TIDEGATE_NOINLINE void few_rows_columns(const FewRowsParams& p, const E* x, E* y, int64_t begin,
                                        int64_t end) {
  // As many sums as hide the latency of their additions, in registers that every set has.
  constexpr int kOuter = 8 / kRows > 2 ? 8 / kRows : 2;
  int64_t n = begin;
  for (; n + kOuter <= end; n += kOuter) few_rows_tile<R, E, kRows, kOuter>(p, x, y, n);
  for (; n < end; ++n) few_rows_tile<R, E, kRows, 1>(p, x, y, n);
}

void few_rows(const FewRowsParams& p, int64_t begin, int64_t end) {
  with_real_types(p.dtype, p.dtype, [&](auto r, auto e, auto) {
    using R = typename decltype(r)::Type;
    using E = typename decltype(e)::Type;
    for (int64_t row = 0; row < p.rows; row += kFewRows) {
      const E* const x = static_cast<const E*>(p.x) + row * p.stride_x;
      E* const y = static_cast<E*>(p.y) + row * p.stride_y;
      switch (p.rows - row) {
        case 1:
          few_rows_columns<R, E, 1>(p, x, y, begin, end);
          break;
        case 2:
          few_rows_columns<R, E, 2>(p, x, y, begin, end);
          break;
        case 3:
          few_rows_columns<R, E, 3>(p, x, y, begin, end);
          break;
        default:
          few_rows_columns<R, E, 4>(p, x, y, begin, end);
      }
    }
  });
}

}  // namespace
}  // namespace tidegate::kernels::product::TIDEGATE_ISA
