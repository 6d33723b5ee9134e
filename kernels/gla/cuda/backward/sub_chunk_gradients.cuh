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

// ---- What reaches the sub-chunks ----
//
// From outside of the chunk. Its boundaries give S_start do^T, D_end v^T and the row sums of the
// element-wise product of S_start and D_end; they are handed on to the chunk's halves, and from
// those to the sub-chunks, by the rule above. A warp has a K-slice, 16 channels, of all 64 tokens.

/// Accumulators of all sub-chunks of a K-slice.
struct ChunkSums {
  SubChunkSum before[kSubChunks];  // S do, S the state at the start of the chunk, half or sub-chunk
  SubChunkSum after[kSubChunks];   // D v, D the gradient of the state at its end
};

/// S_start and D_end of this warp's channels, two V-slices under way while others are used.
struct BoundaryFetch {
  const uint4 *states, *grads;
  uint4 s[2], d[2];

  __device__ BoundaryFetch(const ChunkBackward& a, const ChunkPlace& at)
      : states(a.states.tile(at.chunk, at.head, at.warp, 0) + at.lane),
        grads(a.gradients.tile(at.chunk, at.head, at.warp, 0) + at.lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at.warp < at.key_slices && i < at.value_slices) {
        s[i] = __ldg(states + i * 32);
        d[i] = __ldg(grads + i * 32);
      }
    }
  }
};

/// Multiplies column by column with the units of a K-slice.
__device__ inline void scale_by_units(SubChunkSum (&x)[kSubChunks], const char* units, int pitch,
                                      int lane) {
  units += lane % 4 * 4;
  const float2 low = unpack_pair<__nv_bfloat16>(*reinterpret_cast<const uint32_t*>(units));
  const float2 high = unpack_pair<__nv_bfloat16>(*reinterpret_cast<const uint32_t*>(units + pitch));
  const float all[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
  for (int b = 0; b < kSubChunks; ++b) {
    scale_columns(x[b], all);
  }
}

/// At the chunk's boundaries: S_start do^T, D_end v^T, and the row sums of S_start * D_end, element
/// by element. kOneTile: V is one column tile.
template <bool kOneTile>
__device__ inline void accumulate_boundaries(const ChunkPlace& at, const ChunkShared& sh,
                                             BoundaryFetch& fetch, ChunkSums& sums,
                                             float (&through)[4]) {
#pragma unroll
  for (int b = 0; b < kSubChunks; ++b) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums.before[b][n][e] = sums.after[b][n][e] = 0;
      }
    }
  }
  const MatrixLane l(at.lane);
  const char* d_o = sh.d_o.at(0, 0, l);
  const char* values = sh.values.at(0, 0, l);
  const int sub_chunk_bytes = kSubChunk * sh.d_o.pitch;
  // S_start D_end^T, of which the diagonal is wanted, of the slice's columns 0-7 and 8-15.
  constexpr int kTileSlices = kStateColumns / kSlice;
  float ends[2][4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    through[j] = 0;
  }
#pragma unroll 1
  for (int tile = 0; tile < (kOneTile ? 1 : at.value_slices); tile += kTileSlices) {
    const uint2 units = sh.row_units(sh.slice_units(at, false, tile, at.warp), at.lane);
    const uint2 gradient_units = sh.row_units(sh.slice_units(at, true, tile, at.warp), at.lane);
    const int end = min(at.value_slices, tile + kTileSlices);
#pragma unroll 1
    for (int first = tile; first < end; first += 2) {
      fetch.states += 64;
      fetch.grads += 64;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (first + i < end) {
          uint4 &next_s = fetch.s[i], &next_d = fetch.d[i];
          const bool more = first + i + 2 < at.value_slices;
          uint32_t m[4];
          const uint32_t rows[4] = {next_s.x, next_s.z, next_s.y, next_s.w};
          mma_f16(ends[0], rows, next_d.x, next_d.y);
          mma_f16(ends[1], rows, next_d.z, next_d.w);
          const uint4 s = kOneTile ? state_tile(next_s) : state_tile(next_s, units.x, units.y);
          if (more) {
            next_s = __ldg(fetch.states + i * 32);
          }
#pragma unroll
          for (int b = 0; b < kSubChunks; ++b) {
            load_matrices(m, d_o + b * sub_chunk_bytes);
            mma_bf16(sums.before[b][0], m, s.x, s.y);
            mma_bf16(sums.before[b][1], m, s.z, s.w);
          }
          const uint4 d = kOneTile ? state_tile(next_d)
                                   : state_tile(next_d, gradient_units.x, gradient_units.y);
          if (more) {
            next_d = __ldg(fetch.grads + i * 32);
          }
#pragma unroll
          for (int b = 0; b < kSubChunks; ++b) {
            load_matrices(m, values + b * sub_chunk_bytes);
            mma_bf16(sums.after[b][0], m, d.x, d.y);
            mma_bf16(sums.after[b][1], m, d.z, d.w);
          }
          d_o += kSlice * 2;
          values += kSlice * 2;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float unit = __uint_as_float((n == 0 ? units.x : units.y) << 16);
      const float gradient_unit =
          __uint_as_float((n == 0 ? gradient_units.x : gradient_units.y) << 16);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool diagonal = at.lane / 4 == at.lane % 4 * 2 + e;
        float& sum = ends[n][2 * n + e];
        through[2 * n + e] += diagonal ? sum * unit * gradient_unit : 0.0f;
        sum = 0;
      }
    }
  }
  if constexpr (kOneTile) {
    scale_by_units(sums.before, sh.slice_units(at, false, 0, at.warp), sh.d_o.pitch, at.lane);
    scale_by_units(sums.after, sh.slice_units(at, true, 0, at.warp), sh.d_o.pitch, at.lane);
  }
}

/// before += dA K, of a later sub-chunk and an earlier one's keys.
__device__ inline void add_keys(SubChunkSum& before, const ChunkPlace& at, const ChunkShared& sh,
                                int later, int earlier, const uint32_t (&keys)[4]) {
  uint32_t grad[4];
  load_matrices(grad, sh.scores.at(earlier * kSubChunk, later * kSubChunk, MatrixLane(at.lane)));
  mma_bf16(before[0], grad, keys[0], keys[1]);
  mma_bf16(before[1], grad, keys[2], keys[3]);
}

/// after += dA^T Q.
__device__ inline void add_queries(SubChunkSum& after, const ChunkPlace& at, const ChunkShared& sh,
                                   int later, int earlier, const uint32_t (&queries)[4]) {
  uint32_t grad[4];
  load_matrices_transposed(
      grad, sh.scores.at(earlier * kSubChunk, later * kSubChunk, MatrixLane::across(at.lane)));
  mma_bf16(after[0], grad, queries[0], queries[1]);
  mma_bf16(after[1], grad, queries[2], queries[3]);
}

/// The tiles of one K-slice of a chunk, and what a warp does with them.
class SliceTiles {
 public:
  __device__ SliceTiles(const ChunkPlace& at, const ChunkShared& sh)
      : at_(at), sh_(sh), place_(tile_offset(MatrixLane(at.lane).row, MatrixLane(at.lane).half)) {}

  /// sum += the column sums of a tile times x.
  __device__ void add_through(float (&sum)[4], int which, const SubChunkSum& x) const {
    uint32_t m[4];
    load_matrices(m, sh_.tile(at_.warp, which) + place_);
    add_products(sum, m[0], m[1], m[2], m[3], x);
  }
  /// A tile as two B operands.
  __device__ void load(uint32_t (&m)[4], int which) const {
    load_matrices_transposed(m, sh_.tile(at_.warp, which) + place_);
  }

 private:
  const ChunkPlace& at_;
  const ChunkShared& sh_;
  const int place_;
};

/// The decays of every sub-chunk, of this lane's four channels.
__device__ inline void load_sub_chunk_decays(const ChunkPlace& at, const ChunkShared& sh,
                                             float (&d)[kSubChunks][4]) {
  const int c = at.lane % 4;
#pragma unroll
  for (int b = 0; b < kSubChunks; ++b) {
    const float2 low = *reinterpret_cast<const float2*>(sh.decays(at.warp, b) + 2 * c);
    const float2 high = *reinterpret_cast<const float2*>(sh.decays(at.warp, b) + 8 + 2 * c);
    d[b][0] = low.x;
    d[b][1] = low.y;
    d[b][2] = high.x;
    d[b][3] = high.y;
  }
}

/// From the chunk to its halves, sub-chunks 0 and 1 and sub-chunks 2 and 3.
__device__ inline void descend_to_halves(const ChunkPlace& at, const ChunkShared& sh,
                                         const SliceTiles& tiles, const float (&d)[kSubChunks][4],
                                         ChunkSums& sums, const float (&chunk_through)[4],
                                         float (&half_through)[2][4]) {
  float halves[2][4];  // decays
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    halves[0][j] = d[0][j] * d[1][j];
    halves[1][j] = d[2][j] * d[3][j];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    half_through[0][j] = halves[1][j] * chunk_through[j];
    half_through[1][j] = halves[0][j] * chunk_through[j];
  }
  // The factors across the halves are rounded twice; here their decays are applied in fp32.
  float from_last[4] = {}, from_first[4] = {};
  tiles.add_through(from_last, kQueryFactor + 2, sums.before[3]);
  tiles.add_through(from_first, kKeyFactor, sums.after[0]);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    half_through[0][j] = fmaf(d[2][j], from_last[j], half_through[0][j]);
    half_through[1][j] = fmaf(d[1][j], from_first[j], half_through[1][j]);
  }
  tiles.add_through(half_through[0], kQueryFactor + 1, sums.before[2]);
  tiles.add_through(half_through[1], kKeyFactor + 1, sums.after[1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    scale_columns(sums.before[2 + i], halves[0]);
    scale_columns(sums.after[i], halves[1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t m[4];
    tiles.load(m, i == 0 ? kKeyHalfFactor : kKeyFactor + 1);
    add_keys(sums.before[2], at, sh, 2, i, m);
    add_keys(sums.before[3], at, sh, 3, i, m);
    tiles.load(m, i == 0 ? kQueryFactor + 1 : kQueryHalfFactor);
    add_queries(sums.after[0], at, sh, 2 + i, 0, m);
    add_queries(sums.after[1], at, sh, 2 + i, 1, m);
  }
}

/// From the chunk to its halves, from those to the sub-chunks.
__device__ inline void descend_to_sub_chunks(const ChunkPlace& at, const ChunkShared& sh,
                                             ChunkSums& sums, const float (&chunk_through)[4],
                                             float (&through)[kSubChunks][4]) {
  const SliceTiles tiles(at, sh);
  float d[kSubChunks][4], half_through[2][4];
  load_sub_chunk_decays(at, sh, d);
  descend_to_halves(at, sh, tiles, d, sums, chunk_through, half_through);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int e = 2 * half, h = e + 1;  // the earlier and the later sub-chunk
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      through[e][j] = d[h][j] * half_through[half][j];
      through[h][j] = d[e][j] * half_through[half][j];
    }
    tiles.add_through(through[e], kQueryFactor + h - 1, sums.before[h]);
    tiles.add_through(through[h], kKeyFactor + e, sums.after[e]);
    scale_columns(sums.before[h], d[e]);
    scale_columns(sums.after[e], d[h]);
    uint32_t m[4];
    tiles.load(m, kKeyFactor + e);
    add_keys(sums.before[h], at, sh, h, e, m);
    tiles.load(m, kQueryFactor + h - 1);
    add_queries(sums.after[e], at, sh, h, e, m);
  }
}

}  // namespace tidegate::kernels::gla
