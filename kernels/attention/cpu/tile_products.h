#pragma once

// Matrix products of tiles in scratch memory, in registers. Rows are 64-byte aligned; rows of the
// result come in groups of kTileRows, columns in whole vectors: what is there past the end of a
// tile is computed too and never used.

#include "kernels/attention/cpu/attention_kernels.h"
#include "kernels/common/cpu_unrolled.h"

namespace tidegate::kernels::attention::TIDEGATE_ISA {

using namespace tidegate::kernels::TIDEGATE_ISA;  // NOLINT: the vectors of cpu_simd.h

namespace {

/// Which way the left factor lies in memory.
enum class Left : bool { kRows, kColumns };
/// What becomes of the result's old contents.
enum class Into : bool { kReplace, kAdd };

template <class R>
struct Matrix {
  R* data;
  int64_t stride;
};

/// out[m][n] (+)= sum over p < depth of left[m][p] right[p][n], for m < rows, n < columns.
/// kColumns: left[p][m] instead.
template <class R, Left kLeft, Into kInto>
TIDEGATE_NOINLINE void tile_product(Matrix<const R> left, Matrix<const R> right, int64_t rows,
                                    int64_t columns, int64_t depth, Matrix<R> out) {
  const int64_t row_step = kLeft == Left::kRows ? left.stride : 1;
  const int64_t depth_step = kLeft == Left::kRows ? 1 : left.stride;
  for (int64_t m = 0; m < rows; m += kTileRows) {
    for_each_tile_column<R>(columns, [&](int64_t n, auto vectors) {
      constexpr int kVectors = decltype(vectors)::value;
      R* const to = out.data + m * out.stride + n;
      Vec<R> sums[kTileRows][kVectors];
      unrolled<kTileRows>([&](auto i) {
        unrolled<kVectors>([&](auto v) {
          sums[i.value][v.value] = kInto == Into::kAdd
                                       ? row_vector(to + i.value * out.stride + v.value * kLanes<R>)
                                       : Vec<R>{};
        });
      });
      const R* a = left.data + m * row_step;
      const R* b = right.data + n;
      for (int64_t p = 0; p < depth; ++p, a += depth_step, b += right.stride) {
        Vec<R> across[kVectors];
        unrolled<kVectors>([&](auto v) { across[v.value] = row_vector(b + v.value * kLanes<R>); });
        unrolled<kTileRows>([&](auto i) {
          const Vec<R> down = broadcast(a[i.value * row_step]);
          unrolled<kVectors>([&](auto v) {
            sums[i.value][v.value] = fma(down, across[v.value], sums[i.value][v.value]);
          });
        });
      }
      unrolled<kTileRows>([&](auto i) {
        unrolled<kVectors>([&](auto v) {
          set_row_vector(to + i.value * out.stride + v.value * kLanes<R>, sums[i.value][v.value]);
        });
      });
    });
  }
}

/// `count` rounded up to whole groups of rows, and to whole vectors.
constexpr int64_t whole_groups(int64_t count) {
  return (count + kTileRows - 1) / kTileRows * kTileRows;
}
template <class R>
constexpr int64_t whole_vectors(int64_t count) {
  return (count + kLanes<R> - 1) / kLanes<R> * kLanes<R>;
}

}  // namespace
}  // namespace tidegate::kernels::attention::TIDEGATE_ISA
