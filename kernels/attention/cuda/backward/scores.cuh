#pragma once

// Scores of a tile in registers, as both kernels of the backward pass work on them: from Q K^T to
// P, from dO V^T to dS, sums over rows.

#include <cmath>

#include "kernels/attention/cuda/pruning.cuh"
#include "kernels/attention/cuda/smem_tiles.cuh"

namespace tidegate::kernels::attention {

/// A row's c, lse and delta - dlse in device memory.
struct RawRowStats {
  double gate;
  float lse, delta_minus_dlse;
};

/// What the scores of a row need, kRows apart: c_i - c_ref, its high and low parts; lse, in log2;
/// dlse - delta. A row that is not there, or has no keys, gets P = 0.
template <int kRows>
__device__ inline void write_row_stats(float* to, const RawRowStats& row, double reference) {
  const SplitGate gate = SplitGate::of(row.gate - reference);
  to[0] = gate.high;
  to[kRows] = gate.low;
  to[2 * kRows] = row.lse == -INFINITY ? INFINITY : row.lse * kLog2E;
  to[3 * kRows] = -row.delta_minus_dlse;
}

/// s = log2 of P, from Q K^T. `gates`: of the lane's first two keys; `rows`: of its first row, see
/// write_row_stats.
template <int kRows, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void compute_log2_p(float (&s)[kRowTiles][kColumnTiles][4], float scale,
                                               const float* gates, const float* rows) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * i + 8 * half;
      const float row_offset = rows[2 * kRows + row] - rows[row];
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const float2 gate = *reinterpret_cast<const float2*>(gates + 8 * j);
        s[i][j][2 * half] = fmaf(s[i][j][2 * half], scale, gate.x) - row_offset;
        s[i][j][2 * half + 1] = fmaf(s[i][j][2 * half + 1], scale, gate.y) - row_offset;
      }
    }
  }
}

/// As above, with what it needs read before: of pairs of keys c_ref - c_j, of rows lse - c_i.
template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void compute_log2_p(float (&s)[kRowTiles][kColumnTiles][4], float scale,
                                               const float2 (&gates)[kColumnTiles],
                                               const float (&row_offsets)[2 * kRowTiles]) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      float* const pair = s[i / 2][j] + i % 2 * 2;
      pair[0] = fmaf(pair[0], scale, gates[j].x) - row_offsets[i];
      pair[1] = fmaf(pair[1], scale, gates[j].y) - row_offsets[i];
    }
  }
}

/// As above, on edge tiles of kKeys keys: pair by pair, -infinity where a pair does not count.
template <int kRows, int kKeys, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void compute_log2_p(float (&s)[kRowTiles][kColumnTiles][4], float scale,
                                               const float* gates, const float* rows, PairMask mask,
                                               int position, int key) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const float high = rows[8 * i], low = rows[kRows + 8 * i], row_offset = rows[2 * kRows + 8 * i];
    const PairMask::Row row = mask.row(position + 8 * i, key);
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const float2 x = read_pair(gates + 8 * j), y = read_pair(gates + kKeys + 8 * j);
      float* const pair = s[i / 2][j] + i % 2 * 2;
      const float first = fmaf(pair[0], scale, (high + x.x) + (low + y.x)) - row_offset;
      const float second = fmaf(pair[1], scale, (high + x.y) + (low + y.y)) - row_offset;
      pair[0] = row.sees(8 * j) ? first : -INFINITY;
      pair[1] = row.sees(8 * j + 1) ? second : -INFINITY;
    }
  }
}

/// s = P; dp = dO V^T - delta + dlse meanwhile. `rows`: of the lane's first row, see
/// write_row_stats.
template <class T, int kRows, int kSteps, int kRowTiles, int kColumnTiles, class TileA, class TileB>
__device__ __forceinline__ void compute_p_and_dp(float (&s)[kRowTiles][kColumnTiles][4],
                                                 float (&dp)[kRowTiles][kColumnTiles][4],
                                                 const float* rows, const TileA& d_o,
                                                 const TileB& values) {
  constexpr int kScores = kRowTiles * kColumnTiles * 4;
  const auto exponentials = [&](int step) {
#pragma unroll
    for (int at = 0; at < kScores; ++at) {
      if (at >= step * kScores / kSteps && at < (step + 1) * kScores / kSteps) {
        float& x = s[at / 4 / kColumnTiles][at / 4 % kColumnTiles][at % 4];
        x = exp2_approx(x);
      }
    }
  };
  FromRows<2 * kRowTiles> start;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    start.x[i] = rows[3 * kRows + 8 * i];
  }
  multiply<T, false, false, kSteps, true>(dp, d_o, values, exponentials, start);
}

/// Sums over the four lanes of a row. A lane has a part of the sums of rows lane / 4 + 8 i, i <
/// kRows, and gets one of the four or two whole: lanes exchange what the other keeps.
template <int kRows>
struct QuadSum {
  static_assert(kRows == 2 || kRows == 4);

  /// Which row's, and whether this lane is the one to store it: of two rows, two lanes have each.
  static __device__ int row(int lane) {
    return lane / 4 + 8 * (kRows == 2 ? lane % 2 : lane % 2 * 2 + lane / 2 % 2);
  }
  static __device__ bool is_first(int lane) { return kRows == 4 || lane % 4 < 2; }

  static __device__ __forceinline__ float of(const float (&parts)[kRows], int lane) {
    float pair[kRows / 2];
    exchange(pair, parts, lane % 2 != 0, 1);
    if constexpr (kRows == 2) {
      return pair[0] + __shfl_xor_sync(0xffffffffu, pair[0], 2);
    } else {
      float sum[1];
      exchange(sum, pair, lane % 4 >= 2, 2);
      return sum[0];
    }
  }

 private:
  template <int kHalf>
  static __device__ __forceinline__ void exchange(float (&half)[kHalf],
                                                  const float (&all)[2 * kHalf], bool upper,
                                                  int mask) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float kept = upper ? all[i + kHalf] : all[i];
      half[i] = kept + __shfl_xor_sync(0xffffffffu, upper ? all[i] : all[i + kHalf], mask);
    }
  }
};

}  // namespace tidegate::kernels::attention
