#pragma once

// The first phases of chunk_backward_kernel: everything up to what reaches single sub-chunks, which
// is scores between sub-chunks with their gradients, and the gradients of v.

#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/gla/cuda/backward/chunk_place.cuh"

namespace tidegate::kernels::gla {

// ---- Inputs, factors and scores ----
//
// Inputs into shared memory, the factors that need the decays of several sub-chunks, and between
// all pairs of sub-chunks the scores A(t, s) and their gradients dA(t, s) = do_t . v_s.

/// Starts copying what the chunk's phases need; rows past its end are zero.
__device__ inline void copy_inputs(const ChunkBackward& a, const ChunkPlace& at,
                                   const ChunkShared& sh) {
  copy_rows_async(sh.d_o, at.rows.d_o, at.tokens, 0, at.columns(), at.threads());
  copy_rows_async(sh.values, at.rows.v, at.tokens, 0, at.columns(), at.threads());
  const ChunkFactors factors = at.sized(a.factors);
  for (int s = at.warp; s < at.key_slices; s += at.warps) {
    const auto copy = [&](int which, FactorSide side, int sub_chunk) {
      copy_async<16>(sh.tile(s, which) + at.lane * 16,
                     factors.tile(at.rows.factors[side], s, sub_chunk, at.lane * 16));
    };
#pragma unroll
    for (int b = 0; b < kSubChunks; ++b) {
      copy(kKeyFactor + b, kKeys, b);
    }
#pragma unroll
    for (int b = 1; b < kSubChunks; ++b) {
      copy(kQueryFactor + b - 1, kQueries, b);
    }
    if (at.lane < kSubChunks * 4) {
      copy_async<16>(sh.decays(s, 0) + at.lane * 4,
                     factors.slice_decays(at.chunk(), at.head(), s) + at.lane * 4);
    }
  }
  const int eights = ChunkStates::column_tiles(at.value_slices) * at.key_slices * 2;
  for (int i = at.thread(); i < 2 * eights; i += at.threads()) {
    const bool of_gradient = i >= eights;
    const ChunkStates states = at.sized(of_gradient ? a.gradients : a.states);
    copy_async<16>(sh.eight_units(i), states.units_of(at.chunk(), at.head(), 0) +
                                          (i - (of_gradient ? eights : 0)) * 8);
  }
  if (at.warp < kSubChunks) {
    copy_async<16>(
        sh.scores.at(at.warp * kSubChunk + at.lane % 16, at.warp * kSubChunk + at.lane / 16 * 8),
        factors.sub_chunk_scores(at.chunk(), at.head(), at.warp) + at.lane);
  }
  commit_copies();
}

/// Asks for what the later phases load from memory: this warp's K-slice of the states, q and the
/// gates.
__device__ inline void prefetch_inputs(const ChunkBackward& a, const ChunkPlace& at) {
  constexpr int kLine = 128;
  const GlaParams& p = a.backward.forward;
  for (int s = at.warp; s < at.key_slices; s += at.warps) {
    for (int line = at.lane; line < at.value_slices * 4; line += 32) {
      prefetch_line(
          reinterpret_cast<const char*>(at.sized(a.states).tile(at.chunk(), at.head(), s, 0)) +
          line * kLine);
    }
  }
  const int lines = (at.key_slices * kSlice * 2 + kLine - 1) / kLine;
  for (int i = at.thread(); i < kChunk * lines; i += at.threads()) {
    const int row = i % kChunk, offset = i / kChunk * kLine;
    if (row < at.tokens) {
      prefetch_line(at.rows.q.row(row) + offset);
      prefetch_line(at.rows.gate.row(row) + (p.gate_per_head ? 0 : offset));
    }
  }
}

/// Eight columns of a sub-chunk's decays.
__device__ inline void load_decays(const float* from, float (&x)[8]) {
  *reinterpret_cast<float4*>(x) = reinterpret_cast<const float4*>(from)[0];
  *reinterpret_cast<float4*>(x + 4) = reinterpret_cast<const float4*>(from)[1];
}

/// Eight of their units.
__device__ inline void load_units(const char* from, float (&x)[8]) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair<__nv_bfloat16>(pairs[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
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

/// The factors that need the decays of several sub-chunks: K of sub-chunks 0 to 2 up to the chunk's
/// end, and across the boundary of the chunk's halves Q of sub-chunk 3 and K of sub-chunk 0. In
/// K_end, which is K of sub-chunk 3 as well, the units of D are included, if there is one column
/// tile.
__device__ inline void compute_half_factors(const ChunkPlace& at, const ChunkShared& sh) {
  const int columns = at.lane / kSubChunk * 8;
  const bool in_units = has_one_column_tile(at);
  for (int s = at.warp; s < at.key_slices; s += at.warps) {
    const auto tile = [&](int which) {
      return reinterpret_cast<uint4*>(sh.tile(s, which)) + at.lane;
    };
    float d[8], more[8];
    load_decays(sh.decays(s, 2) + columns, d);
    *tile(kQueryHalfFactor) = decayed(*tile(kQueryFactor + 2), d);
    float unit[8] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    if (in_units) {
      load_units(sh.slice_units(at, true, 0, s) + at.lane / kSubChunk * sh.d_o.pitch, unit);
    }
    load_decays(sh.decays(s, 3) + columns, more);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      more[i] *= unit[i];
    }
    *tile(kKeyFactor + 3) = decayed(*tile(kKeyFactor + 3), unit);
    *tile(kKeyEndFactor + 2) = decayed(*tile(kKeyFactor + 2), more);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      d[i] *= more[i];
    }
    *tile(kKeyEndFactor + 1) = decayed(*tile(kKeyFactor + 1), d);
    load_decays(sh.decays(s, 1) + columns, more);
    const uint4 first = *tile(kKeyFactor);
    *tile(kKeyHalfFactor) = decayed(first, more);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      d[i] *= more[i];
    }
    *tile(kKeyEndFactor) = decayed(first, d);
  }
}

/// Scores between two sub-chunks, later i and earlier j, by the factors that refer to the dyadic
/// boundary between them.
__device__ inline void compute_scores(const ChunkPlace& at, const ChunkShared& sh, int pair) {
  // (1,0) (3,2) (2,0) (2,1) (3,0) (3,1)
  const int i = pair == 0 ? 1 : pair == 2 || pair == 3 ? 2 : 3;
  const int j = pair == 1 ? 2 : pair == 3 || pair == 5 ? 1 : 0;
  const MatrixLane l(at.lane), across = MatrixLane::across(at.lane);
  const char* query =
      sh.tile(0, pair >= 4 ? kQueryHalfFactor : kQueryFactor + i - 1) + tile_offset(l.row, l.half);
  const char* key = sh.tile(0, pair == 2 || pair == 4 ? kKeyHalfFactor : kKeyFactor + j) +
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
  store_tile(sh.scores, i, j, sum, at.lane);
}

/// A sub-chunk's dA at (t, s) and at (s, t), from that at (t, s): registers of a 16 x 16 operand,
/// [even or odd t][even or odd s].
__device__ inline uint4 on_both_sides(const uint32_t (&own)[2][2], int lane) {
  const int r = lane / 4, c = lane % 4;
  const uint32_t below = (r > 2 * c ? 0x0000ffffu : 0) | (r > 2 * c + 1 ? 0xffff0000u : 0);
  uint32_t both[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      both[i][j] = (own[i][j] & below) | (transpose_matrix(own[j][i]) & ~below);
    }
  }
  return make_uint4(both[0][0], both[1][0], both[0][1], both[1][1]);
}

/// dA of the tokens of one sub-chunk: as a sum of two of bf16, pair (t, s) at (s, t) too, and in
/// float what no level of four tokens or more parts.
__device__ inline void store_own_pairs(const ChunkShared& sh, int sub_chunk,
                                       const float (&dA)[2][4], int lane) {
  const int r = lane / 4, c = lane % 4;
  uint32_t high[2][2], low[2][2];  // [even or odd t][even or odd s]
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const SplitPair split = split_bf16(dA[j][2 * i], dA[j][2 * i + 1]);
      high[i][j] = split.high;
      low[i][j] = split.low;
    }
  }
  sh.pairs[sub_chunk * 32 + lane] = {on_both_sides(high, lane), on_both_sides(low, lane)};
  if (r / 2 == c) {
    const bool odd = r % 2 != 0;
    sh.neighbours(sub_chunk, r) = make_float4(odd ? dA[0][1] : dA[0][0], odd ? dA[1][3] : dA[1][2],
                                              odd ? dA[0][3] : dA[0][2], 0.0f);
    if (odd) {
      sh.fours(sub_chunk, c) = make_float4(dA[0][0], dA[1][0], dA[0][2], dA[1][2]);
    }
  }
}

/// dA = do v^T of a later sub-chunk i and an earlier one j, or of one sub-chunk.
__device__ inline void compute_score_gradients(const ChunkPlace& at, const ChunkShared& sh,
                                               int pair) {
  const int i = pair >= 6 ? 3 : pair >= 3 ? 2 : pair >= 1 ? 1 : 0;
  const int j = pair - i * (i + 1) / 2;
  const char* d_o = sh.d_o.at(i * kSubChunk, 0, MatrixLane(at.lane));
  const char* values = sh.values.at(j * kSubChunk, 0, MatrixLane::across(at.lane));
  float sum[2][4] = {};
#pragma unroll 4
  for (int v = 0; v < at.value_slices; ++v) {
    uint32_t left[4], right[4];
    load_matrices(left, d_o + v * (kSlice * 2));
    load_matrices(right, values + v * (kSlice * 2));
    mma_bf16(sum[0], left, right[0], right[1]);
    mma_bf16(sum[1], left, right[2], right[3]);
  }
  if (i == j) {
    store_own_pairs(sh, i, sum, at.lane);
  } else {
    store_tile(sh.scores, j, i, sum, at.lane);
  }
}

/// Scores and their gradients between all sub-chunks, a pair of sub-chunks at a time.
__device__ inline void compute_all_scores(const ChunkPlace& at, const ChunkShared& sh) {
#pragma unroll 1
  for (int job = at.warp; job < 16; job += at.warps) {
    if (job < 6) {
      compute_scores(at, sh, job);
    } else {
      compute_score_gradients(at, sh, job - 6);
    }
  }
}

// ---- The gradients of v ----
//
// dv = K_end D_end + A^T do, where K_end are the keys decayed to the chunk's end and D_end is the
// gradient of the state there. A warp has 16 columns of V of all 64 tokens.

/// D_end of some K-slices and one V-slice, under way while other phases run.
struct StateGradientFetch {
  static constexpr int kSlices = 8;
  uint4 tiles[kSlices];

  __device__ void load(const ChunkBackward& a, const ChunkPlace& at, int first, int column) {
    const uint4* from = at.sized(a.gradients).tile(at.chunk(), at.head(), first, column) + at.lane;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      if (first + i < at.key_slices) {
        tiles[i] = __ldg(from);
      }
      from += at.value_slices * 32;
    }
  }
};

/// The gradients of the activated v of a sub-chunk and a V-slice, through the activation:
/// x[n][2h + e] is of token 2r + h and column 8n + 2c + e. `raw` and `out` start at the sub-chunk's
/// first token and the slice's first column; `tokens` of them exist.
template <class T>
__device__ inline void store_value_tile(InputActivation activation, const NearRows& raw,
                                        const NearRows& out, int tokens, int lane,
                                        const float (&x)[2][4]) {
  const int first = lane / 4 * 2, c = lane % 4;
  const bool odd = c % 2 != 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool exists = first + h < tokens;
    uint32_t pairs[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float pair[2] = {x[n][2 * h], x[n][2 * h + 1]};
      if (activation != InputActivation::kNone && exists) {
        using Math = GateMath<float, true>;
        const float2 value =
            unpack_pair<T>(*reinterpret_cast<const uint32_t*>(raw.row(first + h) + 4 * c + 16 * n));
        pair[0] *= activation_slope<Math>(activation, value.x);
        pair[1] *= activation_slope<Math>(activation, value.y);
      }
      pairs[n] = pack<T, 2>(pair).bits;
    }
    // Two lanes exchange halves, so that each has four adjacent columns.
    const uint32_t got = __shfl_xor_sync(~0u, odd ? pairs[0] : pairs[1], 1);
    if (exists) {
      *reinterpret_cast<uint2*>(out.row(first + h) + (odd ? 16 + 4 * (c - 1) : 4 * c)) =
          odd ? make_uint2(got, pairs[1]) : make_uint2(pairs[0], got);
    }
  }
}

/// Accumulators of mma_bf16 of all sub-chunks: [sub-chunk][8 columns][element].
using ValueSums = float[kSubChunks][2][4];

/// sum += K_end D_end over some K-slices from `first` on, whose D_end is in registers.
__device__ inline void add_state_term(const ChunkPlace& at, const ChunkShared& sh, int first,
                                      int value_slice, const MatrixLane& l,
                                      const StateGradientFetch& fetch, ValueSums& sum) {
  const bool in_units = has_one_column_tile(at);
  const char* tiles = sh.tile(first, 0) + tile_offset(l.row, l.half);
#pragma unroll
  for (int i = 0; i < StateGradientFetch::kSlices; ++i) {
    if (first + i < at.key_slices) {
      uint4 d;
      if (in_units) {
        d = state_tile(fetch.tiles[i]);
      } else {
        const uint2 units = sh.row_units(sh.slice_units(at, true, value_slice, first + i), at.lane);
        d = state_tile(fetch.tiles[i], units.x, units.y);
      }
      const uint32_t b[4] = {transpose_matrix(d.x), transpose_matrix(d.z), transpose_matrix(d.y),
                             transpose_matrix(d.w)};
#pragma unroll
      for (int j = 0; j < kSubChunks; ++j) {
        uint32_t k[4];
        const int which = j < 3 ? kKeyEndFactor + j : kKeyFactor + 3;
        load_matrices(k, tiles + (i * kChunkTiles + which) * kTileBytes);
        mma_bf16(sum[j][0], k, b[0], b[1]);
        mma_bf16(sum[j][1], k, b[2], b[3]);
      }
    }
  }
}

/// sum += A^T do, over the pairs of sub-chunks on and below the diagonal.
__device__ inline void add_score_term(const ChunkPlace& at, const ChunkShared& sh, int value_slice,
                                      const MatrixLane& l, const MatrixLane& across,
                                      ValueSums& sum) {
#pragma unroll
  for (int i = 0; i < kSubChunks; ++i) {
    uint32_t d_o[4];
    load_matrices_transposed(d_o, sh.d_o.at(i * kSubChunk, value_slice * kSlice, l));
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      uint32_t score[4];
      load_matrices_transposed(score, sh.scores.at(i * kSubChunk, j * kSubChunk, across));
      mma_bf16(sum[j][0], score, d_o[0], d_o[1]);
      mma_bf16(sum[j][1], score, d_o[2], d_o[3]);
    }
  }
}

/// Stores a V-slice of dv, through the activation of v.
template <class T>
__device__ inline void store_value_slice(const ChunkBackward& a, const ChunkPlace& at,
                                         int value_slice, const ValueSums& sum) {
  int stride = at.rows.dv.stride, raw_stride = at.rows.v.stride;
  // Offsets of the rows found before the products, and kept meanwhile, would be spilled.
  asm volatile("" : "+r"(stride), "+r"(raw_stride));
#pragma unroll
  for (int j = 0; j < kSubChunks; ++j) {
    const auto sub_chunk = [&](const NearRows& rows, int stride) {
      return NearRows(NearRows(rows.base, stride).row(j * kSubChunk) + value_slice * (kSlice * 2),
                      stride);
    };
    store_value_tile<T>(a.backward.forward.v_activation, sub_chunk(at.rows.v, raw_stride),
                        sub_chunk(at.rows.dv, stride), at.tokens - j * kSubChunk, at.lane, sum[j]);
  }
}

/// dv of the warp's V-slices. `fetch` has been started for the first of them.
template <class T>
__device__ inline void store_value_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                             const ChunkShared& sh, StateGradientFetch& fetch) {
  const MatrixLane l(at.lane), across = MatrixLane::across(at.lane);
  for (int v = at.warp; v < at.value_slices; v += at.warps) {
    ValueSums sum = {};
    for (int first = 0; first < at.key_slices; first += StateGradientFetch::kSlices) {
      if (first > 0 || v > at.warp) {
        fetch.load(a, at, first, v);
      }
      add_state_term(at, sh, first, v, l, fetch, sum);
    }
    add_score_term(at, sh, v, l, across, sum);
    store_value_slice<T>(a, at, v, sum);
  }
}

}  // namespace tidegate::kernels::gla
