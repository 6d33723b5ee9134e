#pragma once

// How blocks of 16 tokens lie in shared memory, between the warps that make them from q, k and the
// gates (producers) and those that own the state (consumers).

#include "kernels/common/cuda/mma.cuh"
#include "kernels/gla/cuda/dyadic.cuh"

namespace tidegate::kernels {

constexpr int kTileColumns = 128;  // of V, at most

/// A row's 16-byte pieces are permuted, so that neither the eight rows that ldmatrix reads at once
/// nor the four pieces of every second row that a producer's quarter-warps write meet in a bank.
__device__ inline int piece_swizzle(int row) {
  return (row >> 1 & 1) << 2 | (row & 1) << 1 | (row >> 2 & 1);
}

/// 16 tokens x kColumns bf16.
template <int kColumns>
struct TokenTile {
  static_assert(kColumns % 64 == 0);
  uint4 pieces[kDyadicTokens][kColumns / 8];

  __device__ uint4* at(int token, int piece) {
    return &pieces[token][piece ^ piece_swizzle(token)];
  }
};

struct ScoreTile {
  uint2 rows[kDyadicTokens][6];  // 16 bf16 a row; the padding keeps ldmatrix free of conflicts
};

/// A factor a channel. Stored so that the four channels of a 16-wide step that a consumer's lane
/// holds (2c, 2c + 1, 2c + 8, 2c + 9 in the layout of an accumulator) are one access.
template <int kKeys>
struct ChannelFactors {
  float4 quads[kKeys / 4];

  /// Of channels first .. first + 3, a multiple of four.
  __device__ void set(int first, const float (&x)[4]) {
    float* const step = reinterpret_cast<float*>(quads) + first / 16 * 16 + first / 8 % 2 * 2;
    const int c = first % 8 / 2;
    *reinterpret_cast<float2*>(step + 4 * c) = {x[0], x[1]};
    *reinterpret_cast<float2*>(step + 4 * c + 4) = {x[2], x[3]};
  }
  /// Of step j, for lanes of column c.
  __device__ float4 get(int j, int c) const { return quads[4 * j + c]; }
  /// The channels of quads[i], in their order.
  static __device__ int channel(int i, int e) { return i / 4 * 16 + e / 2 * 8 + i % 4 * 2 + e % 2; }
};

/// What consumers need of 16 tokens.
template <int kKeys>
struct TokenBlock {
  TokenTile<kKeys> query;  // q_t times the decays from the block's start to t
  TokenTile<kKeys> key;    // k_s times the decays from s + 1 to the block's end
  TokenTile<kTileColumns> value;
  ScoreTile score;              // [t][s], zero where s > t
  ChannelFactors<kKeys> total;  // the product of the block's decays
};

}  // namespace tidegate::kernels
