#pragma once

// Dyadic referencing of 16 tokens in one warp: scores, and what the tokens exchange with the state
// before and after them, from registers alone.
//
// Time is divided into groups of L = 1, 2, 4, 8 and 16 tokens. In a group of L tokens, pre_L(t) is
// the product of the decays from the group's start to t, and suf_L(s) the product from s + 1 to the
// group's end. Two tokens of neighbouring groups, s in the earlier and t in the later, have the
// score
//   sum over channels of (q_t pre_L(t)) (k_s suf_L(s)),
// and all these factors are products of at most 16 decays, so at most one: nothing overflows, an
// underflow is the right zero, and no product is divided by another. L = 1 is a pair within a lane;
// L = 2, 4, 8 are matrix products, each of which is right for the pairs of its own groups only and
// is picked there (never multiplied by a mask: what lies outside may be infinite). L = 16 is the
// state.
//
// Lane 4 r + c holds tokens 2r and 2r + 1 of its channels; the four lanes of a row hold different
// channels. That is how mma_bf16 wants its operands (common/cuda/warp.cuh): token 2r is row r of A,
// token 2r + 1 row r + 8, and of B either one is column r. Which channels a lane holds, and in what
// order, does not matter.

#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::gla {

/// Tokens of a sub-chunk: what one warp takes at a time, and what one mma is deep.
constexpr int kSubChunk = 16;

/// Partial sums of scores over the channels seen so far.
struct DyadicScores {
  float level[3][2][4] = {};  // L = 2, 4, 8; earlier tokens even, odd; as mma_bf16 leaves them
  float diagonal[2] = {};     // q_t k_t of this lane's tokens and channels
  float neighbour = 0;        // the later of them with the earlier

  /// scores[i][j] of t = 2r + i and s = 4c + j; zero where s > t. For all lanes of a warp.
  __device__ void finish(float (&scores)[2][4], int lane) {
    for (float* sum : {&diagonal[0], &diagonal[1], &neighbour}) {
      *sum = quad_sum(*sum);
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

namespace dyadic {

/// A level multiplies q of a later group by k of an earlier one. x is q in lanes of later groups
/// and k in those of earlier ones. Its two registers are A, and each of them, even or odd tokens,
/// is B of a product 8 deep. Entries of later with earlier tokens are the scores; the rest is never
/// read.
__device__ inline void add_level(float (&level)[2][4], bool later, const float (&q)[2][4],
                                 const float (&k)[2][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t of_q = pack_bf16(q[i][2 * h], q[i][2 * h + 1]);
      const uint32_t of_k = pack_bf16(k[i][2 * h], k[i][2 * h + 1]);
      x[i] = later ? of_q : of_k;
    }
    mma_bf16(level[0], x[0], x[1], x[0]);
    mma_bf16(level[1], x[0], x[1], x[1]);
  }
}

}  // namespace dyadic

/// Sixteen channels (four a lane) of 16 tokens: adds to the scores, and turns q into q pre_16, k
/// into k suf_16; `total` is the product of all 16 decays, in every lane of the channel. Rows that
/// hold no token have f = 1, and either k = 0 (forward) or meet v = do = 0 (backward).
__device__ inline void dyadic_step(float (&q)[2][4], float (&k)[2][4], const float (&f)[2][4],
                                   int lane, DyadicScores& scores, float (&total)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // L = 1, and the factors of L = 2
    scores.diagonal[0] = fmaf(q[0][j], k[0][j], scores.diagonal[0]);
    scores.diagonal[1] = fmaf(q[1][j], k[1][j], scores.diagonal[1]);
    k[0][j] *= f[1][j];
    scores.neighbour = fmaf(q[1][j], k[0][j], scores.neighbour);
    total[j] = f[0][j] * f[1][j];
    q[0][j] *= f[0][j];
    q[1][j] *= total[j];
  }
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    const int bit = 4 << level;
    const bool later = (lane & bit) != 0;
    dyadic::add_level(scores.level[level], later, q, k);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float partner = __shfl_xor_sync(~0u, total[j], bit);
      total[j] *= partner;
      if (later) {
        q[0][j] *= partner;
        q[1][j] *= partner;
      } else {
        k[0][j] *= partner;
        k[1][j] *= partner;
      }
    }
  }
}

/// The part of dyadic_step that a state needs: k becomes k suf_16, `total` the product of all 16
/// decays.
__device__ inline void dyadic_keys(float (&k)[2][4], const float (&f)[2][4], int lane,
                                   float (&total)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    k[0][j] *= f[1][j];
    total[j] = f[0][j] * f[1][j];
#pragma unroll
    for (int bit = 4; bit <= 16; bit *= 2) {
      const float partner = __shfl_xor_sync(~0u, total[j], bit);
      if ((lane & bit) == 0) {
        k[0][j] *= partner;
        k[1][j] *= partner;
      }
      total[j] *= partner;
    }
  }
}

}  // namespace tidegate::kernels::gla
