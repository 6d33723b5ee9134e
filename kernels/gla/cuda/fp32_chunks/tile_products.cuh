#pragma once

// Products of tiles in shared memory, in float32: of 16 rows with the rows of a state, which gives
// outputs, and of 16 rows with 16 others, which a state takes up.

#include "kernels/gla/cuda/fp32_chunks/lane_tokens.cuh"

namespace tidegate::kernels::gla::fp32_chunks {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ inline int warp_index() { return static_cast<int>(threadIdx.x) / 32; }
__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline float4 four(const float* from) { return *reinterpret_cast<const float4*>(from); }

/// Two, or whole fours, from shared memory.
template <int kCount>
__device__ inline void load_rows(const float* from, float (&rows)[kCount]) {
  if constexpr (kCount == 2) {
    const auto both = *reinterpret_cast<const float2*>(from);
    rows[0] = both.x;
    rows[1] = both.y;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 all = four(from + i);
      rows[i] = all.x;
      rows[i + 1] = all.y;
      rows[i + 2] = all.z;
      rows[i + 3] = all.w;
    }
  }
}

/// Elements from one token to the next of a partial product: four tokens that are four apart lie
/// in different banks, eight neighbouring rows of each.
constexpr int kPartialStride = 34;
constexpr int kPartialSize = kTokens * kPartialStride;

/// Split-K partial sums of [16 tokens][8 kEights rows], over some of the columns, in a warp's
/// registers: lane 8 t + r has tokens t, t + 4, .. and rows r, r + 8, ..
template <int kEights>
struct PartialProduct {
  float sums[kTokens / 4][kEights] = {};

  /// Adds x y^T over columns [first, last), multiples of four. Rows of both are `stride` apart.
  __device__ void add(const float* x, const float* y, int stride, int first, int last) {
    const int lane = lane_index();
    x += lane / 8 * stride;
    y += lane % 8 * stride;
    for (int column = first; column < last; column += 4) {
      float4 xs[kTokens / 4];
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        xs[i] = four(x + 4 * i * stride + column);
      }
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        const float4 ys = four(y + 8 * j * stride + column);
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) {
          float& sum = sums[i][j];
          sum = fmaf(xs[i].x, ys.x, sum);
          sum = fmaf(xs[i].y, ys.y, sum);
          sum = fmaf(xs[i].z, ys.z, sum);
          sum = fmaf(xs[i].w, ys.w, sum);
        }
      }
    }
  }

  /// Tokens are kStride apart.
  template <int kStride>
  __device__ void store(float* to) const {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        to[(lane / 8 + 4 * i) * kStride + lane % 8 + 8 * j] = sums[i][j];
      }
    }
  }
};

/// The columns that are the share of one of several warps, in fours.
struct ColumnShare {
  int first, last;

  __device__ ColumnShare(int width, int share, int shares)
      : first(width / 4 * share / shares * 4), last(width / 4 * (share + 1) / shares * 4) {}
};

/// The sum over the partial sums of a product, in their order.
template <int kPartials>
__device__ inline float sum_of_partials(const float* partials, int token, int row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPartials; ++i) {
    sum += partials[i * kPartialSize + token * kPartialStride + row];
  }
  return sum;
}

/// What a state is multiplied by: a factor a row of its tile in shared memory, or a column.
enum class DecayOf : bool { kRow, kColumn };

/// after[row][column] = total before[row][column] + sum over 16 tokens of x[t][row] y[t][column];
/// `after` may be `before`. Rows of the state and of y are `stride` apart, those of x `x_stride`.
/// By `threads` threads, of which this one is `thread`; kRows rows and four columns each at a time.
template <int kRows, DecayOf kDecay>
__device__ inline void update_state(const float* before, float* after, const float* total,
                                    const float* x, int x_stride, const float* y, int stride,
                                    int rows, int width, int thread, int threads) {
  const int fours = width / 4;
  const int rows_on = threads / fours * kRows, columns_on = threads % fours * 4;
  for (int row = thread / fours * kRows, column = thread % fours * 4; row < rows;) {
    float4 s[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      s[i] = four(before + (row + i) * stride + column);
      const float4 f = kDecay == DecayOf::kColumn ? four(total + column)
                                                  : make_float4(total[row + i], total[row + i],
                                                                total[row + i], total[row + i]);
      s[i].x *= f.x;
      s[i].y *= f.y;
      s[i].z *= f.z;
      s[i].w *= f.w;
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float4 ys = four(y + t * stride + column);
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const float4 xs = four(x + t * x_stride + row + i);
        const float of_row[4] = {xs.x, xs.y, xs.z, xs.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          s[i + j].x = fmaf(of_row[j], ys.x, s[i + j].x);
          s[i + j].y = fmaf(of_row[j], ys.y, s[i + j].y);
          s[i + j].z = fmaf(of_row[j], ys.z, s[i + j].z);
          s[i + j].w = fmaf(of_row[j], ys.w, s[i + j].w);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      *reinterpret_cast<float4*>(after + (row + i) * stride + column) = s[i];
    }
    row += rows_on;
    column += columns_on;
    if (column >= width) {
      column -= width;
      row += kRows;
    }
  }
}

}  // namespace tidegate::kernels::gla::fp32_chunks
