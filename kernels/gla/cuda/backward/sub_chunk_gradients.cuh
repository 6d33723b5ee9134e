#pragma once

// From what enters and leaves a sub-chunk of 16 tokens to the gradients of its tokens, for a
// K-slice of 16 channels, in one warp's registers: the way of dyadic.cuh, back.
//
// L neighbouring tokens have pre_L(t), the product of their decays up to t, and suf_L(s), that of
// those after s. Three things come from outside of them:
//   before(t)  the state at their start, times do_t: dq_t has pre_L(t) before(t)
//   after(s)   the state's gradient at their end, times v_s: dk_s has suf_L(s) after(s)
//   through    what enters before and leaves after them: dL/df_u has pre_L(u-1) suf_L(u) through
// They are handed on to the two halves, E earlier and H later, until L = 1. With tot the product of
// a half's decays, and the factors of L / 2,
//   before(t of H) becomes tot_E before(t) + sum over s of E of dA(t, s) k_s suf(s)
//   after(s of E)  becomes tot_H after(s)  + sum over t of H of dA(t, s) q_t pre(t)
//   through of E   is tot_H through + sum over t of H of q_t pre(t) before(t)
//   through of H   is tot_E through + sum over s of E of k_s suf(s) after(s)
// At L = 1, dq_t = f_t before(t) + dA(t, t) k_t, dk_t = after(t) + dA(t, t) q_t, and
// dL/df_t = through + q_t before(t).
// All factors are products of decays; nothing is divided, and no term has to cancel another.
//
// A lane of H changes `before` only, one of E `after` only, with the same product: that of the
// pairs' dA, which lies at (t, s) and (s, t), by the factors of E and H, each of its own lanes.

#include "kernels/gla/cuda/backward/chunk_factors.cuh"
#include "kernels/gla/cuda/backward/chunk_layout.cuh"

namespace tidegate::kernels::gla {

/// Accumulators of mma_bf16: x[n][2i + e] of token 2r + i and column 8n + 2c + e.
using SubChunkSum = float[2][4];

/// What a sub-chunk has from outside, as its lanes need it first: `active` is before(t) in lanes of
/// the later eight tokens and after(s) in those of the earlier, `passive` the other. `through` is
/// in parts: the whole is the sum over the group's lanes with the same c (lane % 4).
struct SubChunkSums {
  SubChunkSum active, passive;
  float through[4];  // [2n + e]
};

/// The gradients of a lane's two tokens and four channels; f is dL/df.
struct TokenGradients {
  float q[2][4], k[2][4], f[2][4];
};

__device__ inline void swap_if(bool condition, float& a, float& b) {
  const float x = condition ? b : a, y = condition ? a : b;
  a = x;
  b = y;
}

/// Products of decays of a lane's four channels: of its own two tokens, and of the other half of
/// its group of 4, 8 and 16 tokens (levels 0 to 2).
struct LaneDecays {
  float own[4], other[3][4];

  __device__ LaneDecays(const Quad& x) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float total = own[j] = x.f[0][j] * x.f[1][j];
#pragma unroll
      for (int l = 0; l < 3; ++l) {
        other[l][j] = __shfl_xor_sync(~0u, total, 4 << l);
        total *= other[l][j];
      }
    }
  }
};

/// A level's factors, Q in lanes of the later half and K in those of the earlier, and the decays of
/// the lane's half and of the other. They are made for one level at a time, to save registers.
struct DyadicLevel {
  float factor[2][4];  // [token][channel]
  float own[4], other[4];

  __device__ DyadicLevel(const Quad& x, const LaneDecays& decays, int l, int lane) {
    const auto is_later = [lane](int level) { return (lane & 4 << level) != 0; };
    const bool later = is_later(l);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      own[j] = decays.own[j];
      other[j] = decays.other[l][j];
      factor[0][j] = later ? x.q[0][j] * x.f[0][j] : x.k[0][j] * x.f[1][j];
      factor[1][j] = later ? x.q[1][j] * own[j] : x.k[1][j];
      float between = 1.0f;  // tokens of the half, on this lane's way to the boundary
#pragma unroll
      for (int below = 0; below < l; ++below) {
        own[j] *= decays.other[below][j];
        multiply_if(is_later(below) == later, between, decays.other[below][j]);
      }
      if (l > 0) {
        factor[0][j] *= between;
        factor[1][j] *= between;
      }
    }
  }
};

/// Which registers of `pairs` are of level l, 1 or 2, all bits or none. r and 2c + e count pairs of
/// tokens.
__device__ inline uint32_t level_mask(int l, int lane) {
  const int apart = (lane / 4 ^ lane % 4 * 2) / 2;
  return (l == 2 ? apart >= 2 : apart == 1) ? ~0u : 0;
}

/// sum += over this lane's tokens of tile * x, column by column.
__device__ inline void add_products(float (&sum)[4], uint32_t m00, uint32_t m01, uint32_t m10,
                                    uint32_t m11, const SubChunkSum& x) {
  const uint32_t m[2][2] = {{m00, m01}, {m10, m11}};  // [n][i]
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 pair = unpack_pair<__nv_bfloat16>(m[n][i]);
      sum[2 * n] = fmaf(pair.x, x[n][2 * i], sum[2 * n]);
      sum[2 * n + 1] = fmaf(pair.y, x[n][2 * i + 1], sum[2 * n + 1]);
    }
  }
}

/// Multiplies column by column.
__device__ inline void scale_columns(SubChunkSum& x, const float (&d)[4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[n][e] *= d[2 * n + e % 2];
    }
  }
}

/// Exchanges `active` and `passive` in the lanes that change sides from one level to the next.
__device__ inline void change_sides(int lane, int bit, SubChunkSums& sums) {
  const bool swapped = ((lane ^ lane / 2) & bit) != 0;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      swap_if(swapped, sums.active[n][e], sums.passive[n][e]);
    }
  }
}

/// `through` gains what starts or ends in the other half, and `active` is decayed by it.
__device__ inline void pass_half(const DyadicLevel& level, int l, SubChunkSums& sums) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = 2 * n + e;
      float to_other = level.own[j] * sums.through[j];
      to_other = fmaf(level.factor[0][j], sums.active[n][e], to_other);
      to_other = fmaf(level.factor[1][j], sums.active[n][2 + e], to_other);
      sums.through[j] =
          fmaf(level.other[j], sums.through[j], __shfl_xor_sync(~0u, to_other, 4 << l));
    }
  }
  scale_columns(sums.active, level.other);
}

/// From a group of L = 8 or 16 tokens to its halves: `active` gains the pairs of tokens on both
/// sides. dA is a sum of two of bf16, and between fours of tokens the factor is, too, of which the
/// smallest product is left out. (With single bf16, these pairs made most of the gates' error.)
template <int l>
__device__ inline void descend_level(const DyadicLevel& level, const PairGradients& pairs, int lane,
                                     SubChunkSums& sums) {
  pass_half(level, l, sums);
  const uint32_t mask = level_mask(l, lane);
  const uint32_t high[4] = {pairs.high.x & mask, pairs.high.y & mask, pairs.high.z & mask,
                            pairs.high.w & mask};
  const uint32_t low[4] = {pairs.low.x & mask, pairs.low.y & mask, pairs.low.z & mask,
                           pairs.low.w & mask};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    SplitPair factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor[i] = split_bf16(level.factor[i][2 * n], level.factor[i][2 * n + 1]);
      factor[i].high = transpose_matrix(factor[i].high);
      factor[i].low = l == 1 ? transpose_matrix(factor[i].low) : 0;
    }
    if (l == 1) {
      mma_bf16(sums.active[n], high, factor[0].low, factor[1].low);
    }
    mma_bf16(sums.active[n], low, factor[0].high, factor[1].high);
    mma_bf16(sums.active[n], high, factor[0].high, factor[1].high);
  }
}

/// From a group of four tokens to its halves, each with a lane of its own: in fp32. `pairs` is dA
/// of the later two tokens with the earlier, {(0, 0), (0, 1), (1, 0), (1, 1)}.
__device__ inline void descend_to_pairs(const DyadicLevel& level, const float4& pairs, int lane,
                                        SubChunkSums& sums) {
  pass_half(level, 0, sums);
  const bool later = (lane & 4) != 0;
  const float across0 = later ? pairs.y : pairs.z, across1 = later ? pairs.z : pairs.y;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float first = __shfl_xor_sync(~0u, level.factor[0][2 * n + e], 4);
      const float second = __shfl_xor_sync(~0u, level.factor[1][2 * n + e], 4);
      float& even = sums.active[n][e];
      float& odd = sums.active[n][2 + e];
      even = fmaf(across0, second, fmaf(pairs.x, first, even));
      odd = fmaf(pairs.w, second, fmaf(across1, first, odd));
    }
  }
}

/// From a group of two to its tokens: a lane has both, so this is arithmetic of its own.
__device__ inline void descend_to_tokens(const Quad& x, const SubChunkSums& sums,
                                         const float4& near, int lane, TokenGradients& g) {
  const SubChunkSum &active = sums.active, &passive = sums.passive;
  const bool later = (lane & 4) != 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int n = j / 2, e = j % 2;
    const float before0 = later ? active[n][e] : passive[n][e];
    const float after1 = later ? passive[n][2 + e] : active[n][2 + e];
    float before1 = later ? active[n][2 + e] : passive[n][2 + e];
    float after0 = later ? passive[n][e] : active[n][e];
    const float through0 = x.f[1][j] * fmaf(x.q[1][j], before1, sums.through[j]);
    const float through1 = fmaf(x.f[0][j], sums.through[j], x.k[0][j] * after0);
    before1 = fmaf(x.f[0][j], before1, near.z * x.k[0][j]);
    after0 = x.f[1][j] * fmaf(near.z, x.q[1][j], after0);
    g.q[0][j] = fmaf(x.f[0][j], before0, near.x * x.k[0][j]);
    g.q[1][j] = fmaf(x.f[1][j], before1, near.y * x.k[1][j]);
    g.k[0][j] = fmaf(near.x, x.q[0][j], after0);
    g.k[1][j] = fmaf(near.y, x.q[1][j], after1);
    g.f[0][j] = fmaf(x.q[0][j], before0, through0);
    g.f[1][j] = fmaf(x.q[1][j], before1, through1);
  }
}

/// The sums that a lane needs first, from where store_sums left them.
__device__ inline void load_active(const float4* from, bool later, SubChunkSums& sums) {
  const float4* active = from + (later ? 0 : 64);
  *reinterpret_cast<float4*>(sums.active[0]) = active[0];
  *reinterpret_cast<float4*>(sums.active[1]) = active[32];
  *reinterpret_cast<float4*>(sums.through) = from[128];
}

__device__ inline void load_passive(const float4* from, bool later, SubChunkSums& sums) {
  const float4* passive = from + (later ? 64 : 0);
  *reinterpret_cast<float4*>(sums.passive[0]) = passive[0];
  *reinterpret_cast<float4*>(sums.passive[1]) = passive[32];
}

/// The gradients of a lane's two tokens and four channels, by ChunkShared's pairs, fours and
/// neighbours of this sub-chunk and lane.
__device__ inline void compute_token_gradients(const Quad& x, const float4* from,
                                               const ChunkShared& sh, int sub_chunk, int lane,
                                               TokenGradients& g) {
  SubChunkSums sums;
  load_active(from, lane >= 16, sums);
  const LaneDecays decays(x);
  const PairGradients& pairs = sh.pairs[sub_chunk * 32 + lane];
  descend_level<2>(DyadicLevel(x, decays, 2, lane), pairs, lane, sums);
  load_passive(from, lane >= 16, sums);
  change_sides(lane, 8, sums);
  descend_level<1>(DyadicLevel(x, decays, 1, lane), pairs, lane, sums);
  change_sides(lane, 4, sums);
  descend_to_pairs(DyadicLevel(x, decays, 0, lane), sh.fours(sub_chunk, lane / 8), lane, sums);
  descend_to_tokens(x, sums, sh.neighbours(sub_chunk, lane / 4), lane, g);
}

}  // namespace tidegate::kernels::gla
