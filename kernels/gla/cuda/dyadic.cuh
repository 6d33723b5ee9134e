#pragma once

// Dyadic referencing of 16 tokens in one warp: scores, and what the tokens exchange with the state
// before and after them, from registers alone.
//
// In a block of L tokens, pre_L(t) is the product of the decays from the block's start to t, and
// suf_L(s) the product from s + 1 to the block's end. Two neighbouring blocks, s in the earlier and
// t in the later, have the score
//   sum over channels of (q_t pre_L(t)) (k_s suf_L(s)),
// and all these factors are products of at most 16 decays, so at most one: nothing overflows, an
// underflow is the right zero, and no product is divided by another. L = 1 is a pair within a lane;
// L = 2, 4, 8 are matrix products, each of which is right for the pairs of its own blocks only and
// is picked there (never multiplied by a mask: what lies outside may be infinite). L = 16 is the
// state.
//
// Lane 4 r + c holds tokens 2r and 2r + 1 of its channels; the four lanes of a row hold different
// channels. That is how mma_bf16 wants its operands (common/cuda/mma.cuh): token 2r is row r of A,
// token 2r + 1 row r + 8, and of B either one is column r. Which channels a lane holds, and in what
// order, does not matter.

#include "kernels/common/cuda/mma.cuh"

namespace tidegate::kernels {

constexpr int kDyadicTokens = 16;

/// Partial sums of scores over the channels seen so far.
struct DyadicScores {
  float level[3][2][4] = {};  // L = 2, 4, 8; earlier tokens even, odd; as mma_bf16 leaves them
  float diagonal[2] = {};     // q_t k_t of this lane's tokens and channels
  float neighbour = 0;        // the later of them with the earlier

  /// scores[i][j] of t = 2r + i and s = 4c + j; zero where s > t. For all lanes of a warp.
  __device__ void finish(float (&scores)[2][4], int lane) {
    for (float* sum : {&diagonal[0], &diagonal[1], &neighbour}) {
      *sum += __shfl_xor_sync(~0u, *sum, 1);
      *sum += __shfl_xor_sync(~0u, *sum, 2);
    }
    const int r = lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 2 * (lane % 4) + h;  // s = 2n, 2n + 1
      const int apart = r ^ n;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int at = 2 * i + h;
          const float same = i == odd ? diagonal[i] : i > odd ? neighbour : 0.0f;
          const float x = apart >= 4   ? level[2][odd][at]
                          : apart >= 2 ? level[1][odd][at]
                          : apart == 1 ? level[0][odd][at]
                                       : same;
          scores[i][2 * h + odd] = r >= n ? x : 0.0f;
        }
      }
    }
  }
};

/// What a block of 16 exchanges with the state, of a lane's 2 tokens x 4 channels, as bf16 pairs
/// [token][channels 0 1, 2 3]. `own` is q pre_16 in the lanes of the later eight tokens and k
/// suf_16 in those of the earlier eight; `other` is the other way round. (Sorting them out costs a
/// select each; choosing the address that they are stored to costs nothing.)
struct DyadicOperands {
  uint32_t own[2][2];
  uint32_t other[2][2];
  float total[4];  // product of all 16 decays, in every lane of the channel

  static __device__ bool own_is_query(int lane) { return lane >= 16; }
};

namespace dyadic {

/// own = upper ? a : b, other = upper ? b : a.
__device__ inline void sort_out(bool upper, float a, float b, float* own, float* other) {
  *own = upper ? a : b;
  *other = upper ? b : a;
}

__device__ inline void add_level(float (&level)[2][4], const float (&own)[2][4]) {
  const uint32_t x0 = pack_bf16(own[0][0], own[0][1]), y0 = pack_bf16(own[0][2], own[0][3]);
  const uint32_t x1 = pack_bf16(own[1][0], own[1][1]), y1 = pack_bf16(own[1][2], own[1][3]);
  mma_bf16(level[0], x0, x1, y0, y1, x0, y0);
  mma_bf16(level[1], x0, x1, y0, y1, x1, y1);
}

}  // namespace dyadic

/// Sixteen channels (four a lane) of 16 tokens: adds to the scores and returns the operands. Rows
/// that hold no token have q = k = 0 and f = 1.
__device__ inline DyadicOperands dyadic_step(const float (&q)[2][4], const float (&k)[2][4],
                                             const float (&f)[2][4], int lane,
                                             DyadicScores& scores) {
  DyadicOperands out;
  float own[2][4], other[2][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // L = 1, and the factors of L = 2
    const float k0 = k[0][j] * f[1][j];
    const float pair = f[0][j] * f[1][j];
    scores.diagonal[0] = fmaf(q[0][j], k[0][j], scores.diagonal[0]);
    scores.diagonal[1] = fmaf(q[1][j], k[1][j], scores.diagonal[1]);
    scores.neighbour = fmaf(q[1][j], k0, scores.neighbour);
    dyadic::sort_out(lane & 4, q[0][j] * f[0][j], k0, &own[0][j], &other[0][j]);
    dyadic::sort_out(lane & 4, q[1][j] * pair, k[1][j], &own[1][j], &other[1][j]);
    out.total[j] = pair;
  }
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    const int bit = 4 << level;
    dyadic::add_level(scores.level[level], own);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float partner = __shfl_xor_sync(~0u, out.total[j], bit);
      out.total[j] *= partner;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float grown = own[i][j] * partner, same = other[i][j];
        if (level < 2) {  // what the next level multiplies depends on its own bit
          const bool stays = ((lane & bit) != 0) == ((lane & (2 * bit)) != 0);
          dyadic::sort_out(stays, grown, same, &own[i][j], &other[i][j]);
        } else {
          own[i][j] = grown;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      out.own[i][h] = pack_bf16(own[i][2 * h], own[i][2 * h + 1]);
      out.other[i][h] = pack_bf16(other[i][2 * h], other[i][2 * h + 1]);
    }
  }
  return out;
}

}  // namespace tidegate::kernels
