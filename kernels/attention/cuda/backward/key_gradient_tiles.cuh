#pragma once

// The key-gradient kernel's shared memory and accumulators.

#include "kernels/attention/cuda/backward/tile_configs.cuh"
#include "kernels/attention/cuda/smem_tiles.cuh"

namespace tidegate::kernels::attention {

template <class Shape>
struct BackwardShared {
  unsigned char* keys;
  unsigned char* values;
  unsigned char* queries;  // [kStages]
  unsigned char* d_o;      // [kStages]
  unsigned char* p;
  unsigned char* ds;
  float* key_gates;  // [2][kKeys]: c_ref - c_j, high and low parts
  float* row_stats;  // [2][kRowStats][kRows]
  float* dq;         // [kRows][kDim], where there is room: see BackwardShape::shared_bytes

  __device__ explicit BackwardShared(unsigned char* shared)
      : keys(shared),
        values(keys + Shape::kKeyBytes),
        queries(values + Shape::kKeyBytes),
        d_o(queries + Shape::kStages * Shape::kRowBytes),
        p(d_o + Shape::kStages * Shape::kRowBytes),
        ds(p + Shape::kScoreBytes),
        key_gates(reinterpret_cast<float*>(ds + Shape::kScoreBytes)),
        row_stats(key_gates + 2 * Shape::kKeys),
        dq(row_stats + 2 * Shape::kRowStats * Shape::kRows) {}
};

template <class Shape>
struct KeyGradientAccumulators {
  using T = typename Shape::T;
  using Scores = typename Shape::Scores;
  using KeySums = typename Shape::KeySums;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kRowTiles = Scores::kRowTiles, kColumnTiles = Scores::kColumnTiles;

  float dk[KeySums::kRowTiles][KeySums::kColumnTiles][4] = {};
  float dv[KeySums::kRowTiles][KeySums::kColumnTiles][4] = {};
  float s[kRowTiles][kColumnTiles][4];
  float dp[kRowTiles][kColumnTiles][4];
  float column_sums[kColumnTiles][2];

  /// dp = dS, adding up its columns here, and its rows, of the lane's columns, in `sums`.
  __device__ __forceinline__ void compute_ds(float (&sums)[2 * kRowTiles]) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      sums[i] = 0;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = dp[i / 2][j][i % 2 * 2 + e];
          x *= s[i / 2][j][i % 2 * 2 + e];
          sums[i] += x;
          column_sums[j][e] += x;
        }
      }
    }
  }

  /// Writes scores as 16-bit elements.
  static __device__ __forceinline__ void store_smem(const float (&x)[kRowTiles][kColumnTiles][4],
                                                    unsigned char* tile, int row, int column,
                                                    int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        unsigned char* const to =
            tile + HalfTile<kKeys>::offset(row + 16 * i + lane / 4, column / 8 + j) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(x[i][j][0], x[i][j][1]);
        *reinterpret_cast<uint32_t*>(to + 8 * HalfTile<kKeys>::kRowBytes) =
            pack_pair<T>(x[i][j][2], x[i][j][3]);
      }
    }
  }
};

}  // namespace tidegate::kernels::attention
