#pragma once

// Products of a few row vectors with a packed matrix, for the per-ISA units (see cpu_simd.h about
// what those may include).

#include "kernels/common/cpu_simd.h"
#include "kernels/rnn/cpu/rnn_kernels.h"

namespace tidegate::kernels::rnn::TIDEGATE_ISA {

using namespace tidegate::kernels::TIDEGATE_ISA;  // NOLINT: the vectors of cpu_simd.h

namespace {

/// Numbers in a row of a panel: two vectors.
template <class R>
constexpr int kPanel = 2 * kLanes<R>;

/// Rows that a product holds in registers, two vectors each.
#if defined(TIDEGATE_SIMD_AVX512)
constexpr int kBlockRows = 8;
#else
constexpr int kBlockRows = 4;
#endif
static_assert(kBlockRows <= kMaxRnnRows);

/// Products are added up in runs of this many, and the runs' sums after each other: over one long
/// run, rounding errors would grow with the width.
constexpr int64_t kRun = 64;

/// How far ahead of their use a panel's rows are prefetched.
constexpr int64_t kRowsAhead = 8;

/// products[r, panel's columns] = sum over k of vectors[r, k] * panel[k, :], added up in an order
/// that does not depend on kRows, so that a sequence's results do not depend on its neighbours.
template <class R, int kRows>
TIDEGATE_INLINE void panel_product(const R* panel, const R* vectors, int64_t stride, int64_t inner,
                                   R* products) {
  for (int64_t begin = 0; begin < inner; begin += kRun) {
    const int64_t end = begin + kRun < inner ? begin + kRun : inner;
    Vec<R> sums[kRows][2] = {};
    for (int64_t k = begin; k < end; ++k, panel += kPanel<R>) {
      // A large matrix comes from the second-level cache.
      __builtin_prefetch(panel + kRowsAhead * kPanel<R>);
      __builtin_prefetch(panel + kRowsAhead * kPanel<R> + kLanes<R>);
      const Vec<R> left = load<R>(panel, Whole{});
      const Vec<R> right = load<R>(panel + kLanes<R>, Whole{});
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec<R> factor = splat(vectors[r * stride + k]);
        sums[r][0] = fma(factor, left, sums[r][0]);
        sums[r][1] = fma(factor, right, sums[r][1]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      R* to = products + r * stride;
      const bool first = begin == 0;
      store<R>(to, first ? sums[r][0] : load<R>(to, Whole{}) + sums[r][0], Whole{});
      store<R>(to + kLanes<R>, first ? sums[r][1] : load<R>(to + kLanes<R>, Whole{}) + sums[r][1],
               Whole{});
    }
  }
}

template <int kRows>
struct RowCount {
  static constexpr int kCount = kRows;
};

/// products [rows, D] = vectors [rows, D] times the matrix; both with rows `stride` apart.
template <class R>
TIDEGATE_INLINE void matrix_product(const R* panels, const R* vectors, int64_t stride, int64_t dim,
                                    int rows, R* products) {
  for (int64_t column = 0; column < dim; column += kPanel<R>, panels += kPanel<R> * dim) {
    int row = 0;
    const auto next = [&](auto tag) {
      constexpr int kRows = decltype(tag)::kCount;
      while (rows - row >= kRows) {
        panel_product<R, kRows>(panels, vectors + row * stride, stride, dim,
                                products + row * stride + column);
        row += kRows;
      }
    };
    if constexpr (kBlockRows >= 8) next(RowCount<8>{});
    next(RowCount<4>{});
    next(RowCount<2>{});
    next(RowCount<1>{});
  }
}

/// Panels [begin, end) of kMaxPanelBytes, each of which is a whole number of this unit's.
/// Transposed: panel columns are rows of w.
template <class R>
void pack(const R* w, int64_t dim, bool transposed, int64_t begin, int64_t end, R* panels) {
  constexpr int64_t kEach = kMaxPanelBytes / (kPanel<R> * static_cast<int64_t>(sizeof(R)));
  for (int64_t p = begin * kEach; p < end * kEach; ++p) {
    R* to = panels + p * kPanel<R> * dim;
    if (p * kPanel<R> >= dim) return;
    for (int64_t k = 0; k < dim; ++k, to += kPanel<R>) {
      for (int64_t c = 0; c < kPanel<R>; ++c) {
        const int64_t column = p * kPanel<R> + c;
        to[c] = column >= dim ? R(0) : transposed ? w[column * dim + k] : w[k * dim + column];
      }
    }
  }
}

void pack_panels(const GatedRnnParams& params, bool transposed, int64_t begin, int64_t end,
                 void* panels) {
  if (params.x.dtype == DType::kFloat64) {
    pack(static_cast<const double*>(params.w), params.channels, transposed, begin, end,
         static_cast<double*>(panels));
  } else {
    pack(static_cast<const float*>(params.w), params.channels, transposed, begin, end,
         static_cast<float*>(panels));
  }
}

}  // namespace
}  // namespace tidegate::kernels::rnn::TIDEGATE_ISA
