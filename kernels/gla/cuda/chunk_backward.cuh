#pragma once

// Gradients of one chunk of 64 tokens of one head, from its inputs, its factors and the states at
// its two ends. docs/numerics.md derives the sums; docs/kernels/gla_cuda.md says who computes what.

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/gla/cuda/tile_gradients.cuh"
#include "kernels/gla/cuda/value_rows.cuh"

namespace tidegate::kernels::gla {

/// Starts copying what the chunk's steps need; rows past its end are zero.
__device__ inline void copy_inputs(const ChunkBackward& a, const ChunkPlace& at,
                                   const ChunkShared& sh) {
  const auto columns = static_cast<int>(a.backward.forward.value_dim);
  copy_rows_async(sh.d_o, at.rows.d_o, at.tokens, 0, columns);
  copy_rows_async(sh.values, at.rows.v, at.tokens, 0, columns);
  for (int s = at.warp; s < at.key_slices; s += at.warps) {
    const auto copy = [&](int which, FactorSide side, int block) {
      copy_async<16>(sh.tile(s, which) + at.lane * 16,
                     a.factors.tile(at.rows.factors[side], s, block, at.lane * 16));
    };
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      copy(kKeyTile + b, kKeys, b);
    }
#pragma unroll
    for (int b = 1; b < kBlocks; ++b) {
      copy(kQueryTile + b - 1, kQueries, b);
    }
    if (at.lane < kBlocks * 4) {
      copy_async<16>(sh.decays(s, 0) + at.lane * 4,
                     a.factors.slice_decays(at.slot, at.head, s) + at.lane * 4);
    }
  }
  if (at.warp < kBlocks) {
    copy_async<16>(
        sh.scores.at(at.warp * kBlock + at.lane % 16, at.warp * kBlock + at.lane / 16 * 8),
        a.factors.block_scores(at.slot, at.head, at.warp) + at.lane);
  }
  commit_copies();
}

/// Asks for what the later steps load from memory: this warp's slice of the states and of q and the
/// gates.
__device__ inline void prefetch_inputs(const ChunkBackward& a, const ChunkPlace& at) {
  constexpr int kLine = 128;
  const GlaParams& p = a.backward.forward;
  for (int s = at.warp; s < at.key_slices; s += at.warps) {
    for (int line = at.lane; line < at.value_slices * 4; line += 32) {
      prefetch_line(reinterpret_cast<const char*>(a.states.tile(at.slot, at.head, s, 0)) +
                    line * kLine);
    }
  }
  const int width = static_cast<int>(p.key_dim) * 2;
  for (int i = static_cast<int>(threadIdx.x); i < at.tokens * ((width + kLine - 1) / kLine);
       i += static_cast<int>(blockDim.x)) {
    const int row = i % at.tokens, offset = i / at.tokens * kLine;
    prefetch_line(at.rows.q.row(row) + offset);
    prefetch_line(at.rows.gate.row(row) + (p.gate_per_head ? 0 : offset));
  }
}

/// Eight columns of a block's decays.
__device__ inline void load_decays(const float* from, float (&x)[8]) {
  *reinterpret_cast<float4*>(x) = reinterpret_cast<const float4*>(from)[0];
  *reinterpret_cast<float4*>(x + 4) = reinterpret_cast<const float4*>(from)[1];
}

/// A row's half of a tile, times the decays of its columns.
__device__ inline uint4 decayed(const uint4& bits, const float (&d)[8]) {
  const uint32_t in[4] = {bits.x, bits.y, bits.z, bits.w};
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair<__nv_bfloat16>(in[i]);
    out[i] = pack_bf16(pair.x * d[2 * i], pair.y * d[2 * i + 1]);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

/// What needs the decays of several blocks: K up to the chunk's end of blocks 0 to 2, and the
/// factors of the pairs between the chunk's halves that are a block farther apart.
__device__ inline void make_far_factors(const ChunkPlace& at, const ChunkShared& sh) {
  const int columns = at.lane / kBlock * 8;
  for (int s = at.warp; s < at.key_slices; s += at.warps) {
    const auto tile = [&](int which) {
      return reinterpret_cast<uint4*>(sh.tile(s, which)) + at.lane;
    };
    float d[8], more[8];
    load_decays(sh.decays(s, 2) + columns, d);
    *tile(kQueryFarTile) = decayed(*tile(kQueryTile + 2), d);
    load_decays(sh.decays(s, 3) + columns, more);
    *tile(kKeyEndTile + 2) = decayed(*tile(kKeyTile + 2), more);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      d[i] *= more[i];
    }
    *tile(kKeyEndTile + 1) = decayed(*tile(kKeyTile + 1), d);
    load_decays(sh.decays(s, 1) + columns, more);
    const uint4 first = *tile(kKeyTile);
    *tile(kKeyFarTile) = decayed(first, more);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      d[i] *= more[i];
    }
    *tile(kKeyEndTile) = decayed(first, d);
  }
}

/// Scores between two blocks, later i and earlier j, by the factors whose boundary divides them.
__device__ inline void store_far_scores(const ChunkPlace& at, const ChunkShared& sh, int pair) {
  // (1,0) (3,2) (2,0) (2,1) (3,0) (3,1)
  const int i = pair == 0 ? 1 : pair == 2 || pair == 3 ? 2 : 3;
  const int j = pair == 1 ? 2 : pair == 3 || pair == 5 ? 1 : 0;
  const MatrixLane l(at.lane), across = MatrixLane::across(at.lane);
  const char* query =
      sh.tile(0, pair >= 4 ? kQueryFarTile : kQueryTile + i - 1) + tile_offset(l.row, l.half);
  const char* key = sh.tile(0, pair == 2 || pair == 4 ? kKeyFarTile : kKeyTile + j) +
                    tile_offset(across.row, across.half);
  float sum[2][4] = {};
#pragma unroll 4
  for (int s = 0; s < at.key_slices; ++s) {
    uint32_t q[4], k[4];
    load_matrices(q, query + s * (kChunkTiles * kTileBytes));
    load_matrices(k, key + s * (kChunkTiles * kTileBytes));
    mma_bf16(sum[0], q, k[0], k[1]);
    mma_bf16(sum[1], q, k[2], k[3]);
  }
  store_block(sh.scores, i, j, sum, at.lane);
}

/// dA of the tokens of one block: in bf16, pair (t, s) at (s, t) too, and in float where no level
/// of two tokens or more parts them.
__device__ inline void store_block_pairs(const ChunkShared& sh, int block, const float (&dA)[2][4],
                                         int lane) {
  const int r = lane / 4, c = lane % 4;
  const uint32_t below = (r > 2 * c ? 0x0000ffffu : 0) | (r > 2 * c + 1 ? 0xffff0000u : 0);
  uint32_t own[2][2];  // [even or odd t][even or odd s]
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      own[i][j] = pack_bf16(dA[j][2 * i], dA[j][2 * i + 1]);
    }
  }
  uint32_t both[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      both[i][j] = (own[i][j] & below) | (transpose_matrix(own[j][i]) & ~below);
    }
  }
  sh.pairs[block * 32 + lane] = make_uint4(both[0][0], both[1][0], both[0][1], both[1][1]);
  if (r / 2 == c) {
    const bool odd = r % 2 != 0;
    sh.neighbours[block * 8 + r] = make_float4(odd ? dA[0][1] : dA[0][0], odd ? dA[1][3] : dA[1][2],
                                               odd ? dA[0][3] : dA[0][2], 0.0f);
  }
}

/// dA = do v^T of a later block i and an earlier one j, or of one block.
__device__ inline void store_score_gradients(const ChunkPlace& at, const ChunkShared& sh,
                                             int pair) {
  const int i = pair >= 6 ? 3 : pair >= 3 ? 2 : pair >= 1 ? 1 : 0;
  const int j = pair - i * (i + 1) / 2;
  const char* d_o = sh.d_o.at(i * kBlock, 0, MatrixLane(at.lane));
  const char* values = sh.values.at(j * kBlock, 0, MatrixLane::across(at.lane));
  float sum[2][4] = {};
#pragma unroll 4
  for (int v = 0; v < at.value_slices; ++v) {
    uint32_t left[4], right[4];
    load_matrices(left, d_o + v * (kBlock * 2));
    load_matrices(right, values + v * (kBlock * 2));
    mma_bf16(sum[0], left, right[0], right[1]);
    mma_bf16(sum[1], left, right[2], right[3]);
  }
  if (i == j) {
    store_block_pairs(sh, i, sum, at.lane);
  } else {
    store_block(sh.scores, j, i, sum, at.lane);
  }
}

/// Both between all blocks, a pair of blocks at a time.
__device__ inline void make_scores(const ChunkPlace& at, const ChunkShared& sh) {
#pragma unroll 1
  for (int job = at.warp; job < 16; job += at.warps) {
    if (job < 6) {
      store_far_scores(at, sh, job);
    } else {
      store_score_gradients(at, sh, job - 6);
    }
  }
}

/// D_end of some slices of channels and 16 columns, under way while other steps are taken.
struct GradientsAhead {
  static constexpr int kSlices = 8;
  uint4 tiles[kSlices];

  __device__ void load(const ChunkBackward& a, const ChunkPlace& at, int first, int column) {
    const uint4* from = a.gradients.tile(at.slot, at.head, first, column) + at.lane;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      if (first + i < at.key_slices) {
        tiles[i] = __ldg(from);
      }
      from += at.value_slices * 32;
    }
  }
};

/// dv = K_end D_end + A^T do, each warp 16 columns. `ahead` is of this warp's first ones.
template <class T>
__device__ inline void store_value_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                             const ChunkShared& sh, GradientsAhead& ahead) {
  const MatrixLane l(at.lane), across = MatrixLane::across(at.lane);
  for (int v = at.warp; v < at.value_slices; v += at.warps) {
    float sum[kBlocks][2][4] = {};
    for (int first = 0; first < at.key_slices; first += GradientsAhead::kSlices) {
      if (first > 0 || v > at.warp) {
        ahead.load(a, at, first, v);
      }
      const char* tiles = sh.tile(first, 0) + tile_offset(l.row, l.half);
#pragma unroll
      for (int i = 0; i < GradientsAhead::kSlices; ++i) {
        if (first + i < at.key_slices) {
          const uint4& d = ahead.tiles[i];
          const uint32_t b[4] = {transpose_matrix(d.x), transpose_matrix(d.z),
                                 transpose_matrix(d.y), transpose_matrix(d.w)};
#pragma unroll
          for (int j = 0; j < kBlocks; ++j) {
            uint32_t k[4];
            const int which = j < 3 ? kKeyEndTile + j : kKeyTile + 3;
            load_matrices(k, tiles + (i * kChunkTiles + which) * kTileBytes);
            mma_bf16(sum[j][0], k, b[0], b[1]);
            mma_bf16(sum[j][1], k, b[2], b[3]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      uint32_t d_o[4];
      load_matrices_transposed(d_o, sh.d_o.at(i * kBlock, v * kBlock, l));
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        uint32_t score[4];
        load_matrices_transposed(score, sh.scores.at(i * kBlock, j * kBlock, across));
        mma_bf16(sum[j][0], score, d_o[0], d_o[1]);
        mma_bf16(sum[j][1], score, d_o[2], d_o[3]);
      }
    }
    int stride = at.rows.dv.stride, raw_stride = at.rows.v.stride;
    // Offsets of the rows found before the products, and kept meanwhile, would be spilled.
    asm volatile("" : "+r"(stride), "+r"(raw_stride));
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const auto block = [&](const NearRows& rows, int stride) {
        return NearRows(NearRows(rows.base, stride).row(j * kBlock) + v * (kBlock * 2), stride);
      };
      store_value_block<T>(a.backward.forward.v_activation, block(at.rows.v, raw_stride),
                           block(at.rows.dv, stride), at.tokens - j * kBlock, at.lane, sum[j]);
    }
  }
}

/// Accumulators of all blocks of a slice.
struct ChunkSums {
  BlockSum before[kBlocks];  // S do, S the state at the start of what is meant
  BlockSum after[kBlocks];   // D v, D the gradient of the state at its end
};

/// S_start and D_end of this warp's channels, two times 16 columns under way.
struct EndsAhead {
  const uint4 *states, *grads;
  uint4 s[2], d[2];

  __device__ EndsAhead(const ChunkBackward& a, const ChunkPlace& at)
      : states(a.states.tile(at.slot, at.head, at.warp, 0) + at.lane),
        grads(a.gradients.tile(at.slot, at.head, at.warp, 0) + at.lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at.warp < at.key_slices && i < at.value_slices) {
        s[i] = __ldg(states + i * 32);
        d[i] = __ldg(grads + i * 32);
      }
    }
  }
};

/// From the chunk's ends: S_start do^T, D_end v^T, and the row sums of S_start o D_end.
__device__ inline void sum_over_values(const ChunkPlace& at, const ChunkShared& sh,
                                       EndsAhead& ahead, ChunkSums& sums, float (&through)[4]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
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
  const int block_bytes = kBlock * sh.d_o.pitch;
  // S_start D_end^T, of which the diagonal is wanted, by quarters of its rows and columns.
  float ends[2][4] = {}, other_ends[2][4] = {};
#pragma unroll 1
  for (int first = 0; first < at.value_slices; first += 2) {
    ahead.states += 64;
    ahead.grads += 64;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first + i < at.value_slices) {
        uint4 &s = ahead.s[i], &d = ahead.d[i];
        const bool more = first + i + 2 < at.value_slices;
        uint32_t m[4];
        mma_bf16(ends[0], s.x, s.y, d.x);
        mma_bf16(other_ends[0], s.x, s.y, d.y);
        mma_bf16(ends[1], s.z, s.w, d.z);
        mma_bf16(other_ends[1], s.z, s.w, d.w);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          load_matrices(m, d_o + b * block_bytes);
          mma_bf16(sums.before[b][0], m, s.x, s.y);
          mma_bf16(sums.before[b][1], m, s.z, s.w);
        }
        if (more) {
          s = __ldg(ahead.states + i * 32);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          load_matrices(m, values + b * block_bytes);
          mma_bf16(sums.after[b][0], m, d.x, d.y);
          mma_bf16(sums.after[b][1], m, d.z, d.w);
        }
        if (more) {
          d = __ldg(ahead.grads + i * 32);
        }
        d_o += kBlock * 2;
        values += kBlock * 2;
      }
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const bool diagonal = at.lane / 4 == at.lane % 4 * 2 + e;
    through[e] = diagonal ? ends[0][e] + other_ends[0][2 + e] : 0.0f;
    through[2 + e] = diagonal ? ends[1][e] + other_ends[1][2 + e] : 0.0f;
  }
}

/// before += dA K, of a later block and an earlier one's keys.
__device__ inline void add_keys(BlockSum& before, const ChunkPlace& at, const ChunkShared& sh,
                                int later, int earlier, const uint32_t (&keys)[4]) {
  uint32_t grad[4];
  load_matrices(grad, sh.scores.at(earlier * kBlock, later * kBlock, MatrixLane(at.lane)));
  mma_bf16(before[0], grad, keys[0], keys[1]);
  mma_bf16(before[1], grad, keys[2], keys[3]);
}

/// after += dA^T Q.
__device__ inline void add_queries(BlockSum& after, const ChunkPlace& at, const ChunkShared& sh,
                                   int later, int earlier, const uint32_t (&queries)[4]) {
  uint32_t grad[4];
  load_matrices_transposed(
      grad, sh.scores.at(earlier * kBlock, later * kBlock, MatrixLane::across(at.lane)));
  mma_bf16(after[0], grad, queries[0], queries[1]);
  mma_bf16(after[1], grad, queries[2], queries[3]);
}

/// From the chunk to its halves, from those to the blocks: what tile_gradients.cuh does within
/// them.
__device__ inline void hand_on_to_blocks(const ChunkPlace& at, const ChunkShared& sh,
                                         ChunkSums& sums, const float (&chunk_through)[4],
                                         float (&through)[kBlocks][4]) {
  const int slice = at.warp, c = at.lane % 4;
  const MatrixLane l(at.lane);
  const int place = tile_offset(l.row, l.half);
  const auto add = [&](float (&sum)[4], int which, const BlockSum& x) {
    uint32_t m[4];
    load_matrices(m, sh.tile(slice, which) + place);
    add_products(sum, m[0], m[1], m[2], m[3], x);
  };
  const auto load = [&](uint32_t (&m)[4], int which) {
    load_matrices_transposed(m, sh.tile(slice, which) + place);
  };
  float d[kBlocks][4], halves[2][4];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const float2 low = *reinterpret_cast<const float2*>(sh.decays(slice, b) + 2 * c);
    const float2 high = *reinterpret_cast<const float2*>(sh.decays(slice, b) + 8 + 2 * c);
    d[b][0] = low.x;
    d[b][1] = low.y;
    d[b][2] = high.x;
    d[b][3] = high.y;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    halves[0][j] = d[0][j] * d[1][j];
    halves[1][j] = d[2][j] * d[3][j];
  }

  float half_through[2][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    half_through[0][j] = halves[1][j] * chunk_through[j];
    half_through[1][j] = halves[0][j] * chunk_through[j];
  }
  add(half_through[0], kQueryTile + 1, sums.before[2]);
  add(half_through[0], kQueryFarTile, sums.before[3]);
  add(half_through[1], kKeyFarTile, sums.after[0]);
  add(half_through[1], kKeyTile + 1, sums.after[1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    scale_columns(sums.before[2 + i], halves[0]);
    scale_columns(sums.after[i], halves[1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t m[4];
    load(m, i == 0 ? kKeyFarTile : kKeyTile + 1);
    add_keys(sums.before[2], at, sh, 2, i, m);
    add_keys(sums.before[3], at, sh, 3, i, m);
    load(m, i == 0 ? kQueryTile + 1 : kQueryFarTile);
    add_queries(sums.after[0], at, sh, 2 + i, 0, m);
    add_queries(sums.after[1], at, sh, 2 + i, 1, m);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int e = 2 * half, h = e + 1;  // the earlier and the later block
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      through[e][j] = d[h][j] * half_through[half][j];
      through[h][j] = d[e][j] * half_through[half][j];
    }
    add(through[e], kQueryTile + h - 1, sums.before[h]);
    add(through[h], kKeyTile + e, sums.after[e]);
    scale_columns(sums.before[h], d[e]);
    scale_columns(sums.after[e], d[h]);
    uint32_t m[4];
    load(m, kKeyTile + e);
    add_keys(sums.before[h], at, sh, h, e, m);
    load(m, kQueryTile + h - 1);
    add_queries(sums.after[e], at, sh, h, e, m);
  }
}

/// Leaves the sums where the lane finds them again.
__device__ inline void store_sums(const ChunkPlace& at, const ChunkShared& sh,
                                  const ChunkSums& sums, const float (&through)[kBlocks][4]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float4* to = sh.sums(at.warp, b, at.lane);
    const float (&x)[2][4] = sums.before[b];
    const float (&y)[2][4] = sums.after[b];
    to[0] = make_float4(x[0][0], x[0][1], x[0][2], x[0][3]);
    to[32] = make_float4(x[1][0], x[1][1], x[1][2], x[1][3]);
    to[64] = make_float4(y[0][0], y[0][1], y[0][2], y[0][3]);
    to[96] = make_float4(y[1][0], y[1][1], y[1][2], y[1][3]);
    to[128] = make_float4(through[b][0], through[b][1], through[b][2], through[b][3]);
  }
}

__device__ inline void load_sums(const float4* from, bool later, BlockSums& sums) {
  const float4* active = from + (later ? 0 : 64);
  const float4* passive = from + (later ? 64 : 0);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    *reinterpret_cast<float4*>(sums.active[n]) = active[n * 32];
    *reinterpret_cast<float4*>(sums.passive[n]) = passive[n * 32];
  }
  *reinterpret_cast<float4*>(sums.through) = from[128];
}

/// Four adjacent channels of a token, in the data's type.
template <class T>
__device__ inline void store_four(char* to, const float (&x)[4]) {
  const float low[2] = {x[0], x[1]}, high[2] = {x[2], x[3]};
  *reinterpret_cast<uint2*>(to) = make_uint2(pack<T, 2>(low).bits, pack<T, 2>(high).bits);
}

/// The gradients of this warp's slice, a block at a time; the first one's inputs are under way.
template <class T, GateKind kKind>
__device__ inline void store_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                       const ChunkShared& sh, QuadInputs<T, kKind>& inputs) {
  const GlaParams& p = a.backward.forward;
  const int r = at.lane / 4, c = at.lane % 4, channel = at.warp * kBlock + 4 * c;
  const bool wide = p.gate.dtype == DType::kFloat32;
  float gamma[4];
  load_bounds(p, at.head, channel, gamma);
  // Sum of k (dL/df - dk): (1 - gamma) dgamma; where the first block's sums have been.
  float4* opened = sh.sums(at.warp, 0, at.lane);
#pragma unroll 1
  for (int b = 0; b < kBlocks && b * kBlock < at.tokens; ++b) {
    const int token = b * kBlock + 2 * r;
    Quad x;
    QuadSlopes slopes;
    inputs.get(gamma, at.tokens - token, x, slopes);
    BlockSums sums;
    load_sums(sh.sums(at.warp, b, at.lane), at.lane >= 16, sums);
    TileGradients g;
    find_tile_gradients(x, sums, sh.pairs[b * 32 + at.lane], sh.neighbours[b * 8 + r], at.lane, g);
    if (b + 1 < kBlocks) {
      inputs.move_to(token + kBlock);
      inputs.load(channel);
    }
    float4 sum = b == 0 ? make_float4(0, 0, 0, 0) : *opened;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool live = token + i < at.tokens;
      const float exists = live ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        g.q[i][j] *= slopes.q[i][j];
        if constexpr (kKind == GateKind::kLogit) {
          g.f[i][j] = x.k[i][j] * (g.f[i][j] - g.k[i][j]);
          (&sum.x)[j] = fmaf(exists, g.f[i][j], (&sum.x)[j]);
          g.f[i][j] *= slopes.open[i][j];
        } else {
          g.f[i][j] *= x.f[i][j];
        }
      }
      if (p.gate_per_head) {
        float of_head = g.f[i][0] + g.f[i][1] + g.f[i][2] + g.f[i][3];
        of_head += __shfl_xor_sync(~0u, of_head, 1);
        of_head += __shfl_xor_sync(~0u, of_head, 2);
        if (c == 0) {
          sh.head_sums(at.warp)[token + i] = of_head;
        }
      }
      if (live) {
        store_four<T>(at.rows.dq.row(token + i) + channel * 2, g.q[i]);
        if constexpr (kKind == GateKind::kLogDecay) {
          store_four<T>(at.rows.dk.row(token + i) + channel * 2, g.k[i]);
        }
        if (!p.gate_per_head) {
          char* to = at.rows.dgate.row(token + i);
          if (wide) {
            *reinterpret_cast<float4*>(to + channel * 4) =
                make_float4(g.f[i][0], g.f[i][1], g.f[i][2], g.f[i][3]);
          } else {
            store_four<T>(to + channel * 2, g.f[i]);
          }
        }
      }
    }
    if constexpr (kKind == GateKind::kLogit) {
      *opened = sum;
    }
  }
  if (kKind == GateKind::kLogit && a.backward.dgamma_partial != nullptr) {
    __syncwarp();
    if (r < 4) {  // lane 4j + c adds up channel j of the lanes of its column
      float sum = 0;
#pragma unroll
      for (int row = 0; row < 8; ++row) {
        sum += reinterpret_cast<const float*>(opened - at.lane + row * 4 + c)[r];
      }
      const float bound =
          p.gamma == nullptr
              ? 0.0f
              : static_cast<const float*>(p.gamma)[at.head * p.key_dim + channel + r];
      partial_sums(a, at)[channel + r] = sum / (1.0f - bound);
    }
  }
}

/// One gate a head: the sum of its gradients over the channels, a thread a token.
template <class T>
__device__ inline void store_head_gate_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                                 const ChunkShared& sh) {
  for (int token = static_cast<int>(threadIdx.x); token < at.tokens;
       token += static_cast<int>(blockDim.x)) {
    float sum = 0;
#pragma unroll 1
    for (int s = 0; s < at.key_slices; ++s) {
      sum += sh.head_sums(s)[token];
    }
    char* to = at.rows.dgate.row(token);
    if (a.backward.dgate.dtype == DType::kFloat32) {
      *reinterpret_cast<float*>(to) = sum;
    } else {
      *reinterpret_cast<T*>(to) = narrow<T>(sum);
    }
  }
}

template <class T, GateKind kKind>
__global__ void __launch_bounds__(kMaxSlices * 32, 1)
    chunk_backward_kernel(const __grid_constant__ ChunkBackward a) {
  extern __shared__ __align__(16) char memory[];
  const GlaParams& p = a.backward.forward;
  __shared__ ChunkRows rows;
  const auto index = static_cast<int>(blockIdx.x), heads = static_cast<int>(p.heads);
  const int slot = index / heads, head = index % heads;
  if (threadIdx.x < 32) {
    rows.find(a, slot, head, static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  const ChunkPlace at(p, slot, head, rows);
  if (at.tokens == 0) {
    clear_partial_sums(a, at);
    return;
  }
  const ChunkShared sh(memory, p.key_dim, p.value_dim);
  const auto columns = static_cast<int>(p.value_dim);
  copy_inputs(a, at, sh);
  GradientsAhead gradients;
  if (at.warp < at.value_slices) {
    gradients.load(a, at, 0, at.warp);
  }
  prefetch_inputs(a, at);
  wait_for_copies<0>();
  finish_rows<T>(sh.d_o, InputActivation::kNone, at.tokens, columns);
  finish_rows<T>(sh.values, p.v_activation, at.tokens, columns);
  __syncthreads();
  make_far_factors(at, sh);
  __syncthreads();
  make_scores(at, sh);
  __syncthreads();
  EndsAhead ends(a, at);
  store_value_gradients<T>(a, at, sh, gradients);
  ChunkSums sums;
  float through[kBlocks][4];
  QuadInputs<T, kKind> inputs(p, rows);
  if (at.warp < at.key_slices) {
    float chunk_through[4];
    sum_over_values(at, sh, ends, sums, chunk_through);
    hand_on_to_blocks(at, sh, sums, chunk_through, through);
    inputs.move_to(at.lane / 4 * 2);
    inputs.load(at.warp * kBlock + at.lane % 4 * 4);
  }
  __syncthreads();  // rows and tiles give way to the sums
  if (at.warp < at.key_slices) {
    store_sums(at, sh, sums, through);
    store_gradients<T, kKind>(a, at, sh, inputs);
  }
  if (p.gate_per_head) {
    __syncthreads();
    store_head_gate_gradients<T>(a, at, sh);
  }
}

}  // namespace tidegate::kernels::gla
