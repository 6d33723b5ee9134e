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
// A lane has four neighbouring tokens and two channels, and the lanes of a row (lane / 4) all
// sixteen tokens of these, so that the factors of a level are, in registers, A of (channels x
// tokens). From 16 tokens to halves, and from 8, a lane of H changes `before` only, one of E
// `after` only, with the same product: that of the factors of E and H, each of its own lanes, by
// the pairs' dA, which lies at (t, s) and (s, t). What four tokens do to each other is arithmetic
// of one lane, in fp32.

#include "kernels/gla/cuda/backward/chunk_factors.cuh"
#include "kernels/gla/cuda/backward/chunk_place.cuh"

namespace tidegate::kernels::gla {

/// Accumulators of mma_bf16: x[n][2j + e] of token 4c + 2e + n and the lane's channel j.
using SubChunkSum = float[2][4];

/// What a sub-chunk has from outside, as its lanes need it first: `active` is before(t) in lanes of
/// the later eight tokens and after(s) in those of the earlier, `passive` the other. `through` is
/// in parts: the whole is the sum over the group's lanes of the same channels.
struct SubChunkSums {
  SubChunkSum active, passive;
  float through[2];  // [channel]
};

/// What the last phase has of a lane's tokens and channels.
using GradientInputs = LaneInputs<4>;
constexpr int kLaneTokens = 4, kLaneChannels = GradientInputs::kChannels;

/// The gradients of a lane's tokens and channels; f is dL/df.
struct TokenGradients {
  float q[kLaneTokens][kLaneChannels], k[kLaneTokens][kLaneChannels], f[kLaneTokens][kLaneChannels];
};

__device__ inline void swap_if(bool condition, float& a, float& b) {
  const float x = condition ? b : a, y = condition ? a : b;
  a = x;
  b = y;
}

/// Exchanges two sums in some lanes.
__device__ inline void swap_if(bool condition, SubChunkSum& a, SubChunkSum& b) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      swap_if(condition, a[n][e], b[n][e]);
    }
  }
}

/// sum += over this lane's tokens of a tile, A of (channels x tokens), times x, channel by channel.
__device__ inline void add_products(float (&sum)[2], const uint32_t (&tile)[4],
                                    const SubChunkSum& x) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 pair = unpack_pair<__nv_bfloat16>(tile[2 * n + j]);
      sum[j] = fmaf(pair.x, x[n][2 * j], sum[j]);
      sum[j] = fmaf(pair.y, x[n][2 * j + 1], sum[j]);
    }
  }
}

/// Multiplies channel by channel.
__device__ inline void scale_channels(SubChunkSum& x, const float (&d)[2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[n][e] *= d[e / 2];
    }
  }
}

/// Products of decays of a lane's channels: of its first and last two tokens, of its four, and of
/// the next lane's four and the other eight of the sub-chunk.
struct LaneDecays {
  float first[kLaneChannels], last[kLaneChannels], own[kLaneChannels];
  float neighbour[kLaneChannels], other[kLaneChannels];

  __device__ explicit LaneDecays(const GradientInputs& x) {
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) {
      first[j] = x.f[0][j] * x.f[1][j];
      last[j] = x.f[2][j] * x.f[3][j];
      own[j] = first[j] * last[j];
      neighbour[j] = __shfl_xor_sync(~0u, own[j], 1);
      other[j] = __shfl_xor_sync(~0u, own[j] * neighbour[j], 2);
    }
  }
};

/// The factors of a lane's four tokens, with the decays to either end of the four.
struct LaneFactors {
  float q[kLaneTokens][kLaneChannels], k[kLaneTokens][kLaneChannels];

  __device__ LaneFactors(const GradientInputs& x, const LaneDecays& decays) {
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) {
      q[0][j] = x.q[0][j] * x.f[0][j];
      q[1][j] = x.q[1][j] * decays.first[j];
      q[2][j] = x.q[2][j] * (decays.first[j] * x.f[2][j]);
      q[3][j] = x.q[3][j] * decays.own[j];
      k[0][j] = x.k[0][j] * (x.f[1][j] * decays.last[j]);
      k[1][j] = x.k[1][j] * decays.last[j];
      k[2][j] = x.k[2][j] * x.f[3][j];
      k[3][j] = x.k[3][j];
    }
  }
};

/// From a group to its halves: a level's factors, Q in lanes of the later half and K in those of
/// the earlier, and the decays of the lane's half and of the other.
struct DyadicLevel {
  SubChunkSum factor;  // as the sums have their tokens
  float own[kLaneChannels], other[kLaneChannels];

  /// The level of 16 tokens, whose halves have eight (kEights), or that of eight with halves of
  /// four.
  template <bool kEights>
  static __device__ DyadicLevel make(const LaneFactors& factors, const LaneDecays& decays,
                                     int lane) {
    const bool later = (lane & (kEights ? 2 : 1)) != 0;
    const bool between = ((lane & 1) != 0) == later;  // the neighbour, and the half's boundary
    DyadicLevel level;
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) {
      level.own[j] = kEights ? decays.own[j] * decays.neighbour[j] : decays.own[j];
      level.other[j] = kEights ? decays.other[j] : decays.neighbour[j];
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        float& factor = level.factor[i % 2][2 * j + i / 2];
        factor = later ? factors.q[i][j] : factors.k[i][j];
        if (kEights) {
          multiply_if(between, factor, decays.neighbour[j]);
        }
      }
    }
    return level;
  }
};

/// `through` gains what starts or ends in the other half, and `active` is decayed by it.
__device__ inline void pass_half(const DyadicLevel& level, int distance, SubChunkSums& sums) {
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) {
    float to_other = level.own[j] * sums.through[j];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 2 * j; e < 2 * j + 2; ++e) {
        to_other = fmaf(level.factor[n][e], sums.active[n][e], to_other);
      }
    }
    sums.through[j] =
        fmaf(level.other[j], sums.through[j], __shfl_xor_sync(~0u, to_other, distance));
  }
  scale_channels(sums.active, level.other);
}

/// From a group of 16 (kEights) or 8 tokens to its halves: `active` gains the pairs of tokens on
/// both sides. dA is a sum of two of bf16, and between fours of tokens the factor is, too, of which
/// the smallest product is left out. (With single bf16, these pairs made most of the gates' error.)
template <bool kEights>
__device__ inline void descend_level(const DyadicLevel& level, const PairGradients& pairs, int lane,
                                     SubChunkSums& sums) {
  pass_half(level, kEights ? 2 : 1, sums);
  // The lane's registers of `pairs` are of tokens of fours lane / 8 and lane % 4.
  const int apart = lane / 8 ^ lane % 4;
  const uint32_t mask = (kEights ? apart >= 2 : apart == 1) ? ~0u : 0;
  const uint32_t high[4] = {pairs.high.x & mask, pairs.high.y & mask, pairs.high.z & mask,
                            pairs.high.w & mask};
  const uint32_t low[4] = {pairs.low.x & mask, pairs.low.y & mask, pairs.low.z & mask,
                           pairs.low.w & mask};
  SplitPair factor[4];  // A of (channels x tokens)
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float (&of_two)[4] = level.factor[i / 2];
    factor[i] = split_bf16(of_two[i % 2 * 2], of_two[i % 2 * 2 + 1]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float (&sum)[4] = sums.active[n];
    if (!kEights) {
      mma_bf16(sum, factor[0].low, factor[1].low, factor[2].low, factor[3].low, high[n],
               high[n + 2]);
    }
    mma_bf16(sum, factor[0].high, factor[1].high, factor[2].high, factor[3].high, low[n],
             low[n + 2]);
    mma_bf16(sum, factor[0].high, factor[1].high, factor[2].high, factor[3].high, high[n],
             high[n + 2]);
  }
}

/// What a lane's four tokens have from outside, one channel.
struct FourSums {
  float before[kLaneTokens], after[kLaneTokens];
};

/// From two neighbouring tokens, `first` and the next, to single ones. `near` is dA of the two with
/// themselves, and of the second with the first.
__device__ inline void descend_to_tokens(const GradientInputs& x, const FourSums& sums,
                                         float through, const float4& near, int first, int j,
                                         TokenGradients& g) {
  const int a = first, b = first + 1;
  const float through_a = x.f[b][j] * fmaf(x.q[b][j], sums.before[b], through);
  const float through_b = fmaf(x.f[a][j], through, x.k[a][j] * sums.after[a]);
  const float before_b = fmaf(x.f[a][j], sums.before[b], near.z * x.k[a][j]);
  const float after_a = x.f[b][j] * fmaf(near.z, x.q[b][j], sums.after[a]);
  g.q[a][j] = fmaf(x.f[a][j], sums.before[a], near.x * x.k[a][j]);
  g.q[b][j] = fmaf(x.f[b][j], before_b, near.y * x.k[b][j]);
  g.k[a][j] = fmaf(near.x, x.q[a][j], after_a);
  g.k[b][j] = fmaf(near.y, x.q[b][j], sums.after[b]);
  g.f[a][j] = fmaf(x.q[a][j], sums.before[a], through_a);
  g.f[b][j] = fmaf(x.q[b][j], before_b, through_b);
}

/// From a lane's four tokens to two and two, and to single ones. `pairs` is dA of the later two
/// with the earlier, {(2, 0), (2, 1), (3, 0), (3, 1)}.
__device__ inline void descend_to_pairs(const GradientInputs& x, const LaneDecays& decays,
                                        const SubChunkSum& before, const SubChunkSum& after,
                                        const float (&through)[kLaneChannels], const float4& pairs,
                                        const float4 (&near)[2], TokenGradients& g) {
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) {
    FourSums sums;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      sums.before[i] = before[i % 2][2 * j + i / 2];
      sums.after[i] = after[i % 2][2 * j + i / 2];
    }
    const float k0 = x.k[0][j] * x.f[1][j], k1 = x.k[1][j];
    const float q2 = x.q[2][j] * x.f[2][j], q3 = x.q[3][j] * decays.last[j];
    const float through_first =
        fmaf(q3, sums.before[3], fmaf(q2, sums.before[2], decays.last[j] * through[j]));
    const float through_last =
        fmaf(k1, sums.after[1], fmaf(k0, sums.after[0], decays.first[j] * through[j]));
    sums.before[2] = fmaf(pairs.y, k1, fmaf(pairs.x, k0, decays.first[j] * sums.before[2]));
    sums.before[3] = fmaf(pairs.w, k1, fmaf(pairs.z, k0, decays.first[j] * sums.before[3]));
    sums.after[0] = fmaf(pairs.z, q3, fmaf(pairs.x, q2, decays.last[j] * sums.after[0]));
    sums.after[1] = fmaf(pairs.w, q3, fmaf(pairs.y, q2, decays.last[j] * sums.after[1]));
    descend_to_tokens(x, sums, through_first, near[0], 0, j, g);
    descend_to_tokens(x, sums, through_last, near[1], 2, j, g);
  }
}

/// The sums that a lane needs first, from where store_sums left them.
__device__ inline void load_sums(const ChunkShared& sh, int slice, int sub_chunk, int lane,
                                 SubChunkSums& sums) {
  const float4* from = sh.sums(slice, sub_chunk, lane);
  const bool later = (lane & 2) != 0;
  const float4 *active = from + (later ? 0 : 64), *passive = from + (later ? 64 : 0);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    *reinterpret_cast<float4*>(sums.active[n]) = active[32 * n];
    *reinterpret_cast<float4*>(sums.passive[n]) = passive[32 * n];
  }
  *reinterpret_cast<float2*>(sums.through) = *sh.through_sums(slice, sub_chunk, lane);
}

/// The gradients of a lane's tokens and channels in a sub-chunk of a K-slice, by the sums and
/// ChunkShared's pairs, fours and neighbours.
__device__ inline void compute_token_gradients(const GradientInputs& x, const ChunkShared& sh,
                                               int slice, int sub_chunk, int lane,
                                               TokenGradients& g) {
  const int c = lane % 4;
  SubChunkSums sums;
  load_sums(sh, slice, sub_chunk, lane, sums);
  const LaneDecays decays(x);
  const LaneFactors factors(x, decays);
  const PairGradients& pairs = sh.pairs[sub_chunk * 32 + lane];
  descend_level<true>(DyadicLevel::make<true>(factors, decays, lane), pairs, lane, sums);
  swap_if(c == 1 || c == 2, sums.active, sums.passive);  // those that change sides
  descend_level<false>(DyadicLevel::make<false>(factors, decays, lane), pairs, lane, sums);
  swap_if(c % 2 == 0, sums.active, sums.passive);  // active: before, passive: after
  const float4 near[2] = {sh.neighbours(sub_chunk, 2 * c), sh.neighbours(sub_chunk, 2 * c + 1)};
  descend_to_pairs(x, decays, sums.active, sums.passive, sums.through, sh.fours(sub_chunk, c), near,
                   g);
}

}  // namespace tidegate::kernels::gla
