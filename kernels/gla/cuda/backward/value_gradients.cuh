#pragma once

// The gradients of v: dv = K_end D_end + A^T do, where K_end are the keys decayed to the chunk's
// end and D_end is the gradient of the state there. A warp has 16 columns of V of all 64 tokens.

#include "kernels/gla/cuda/backward/chunk_shared.cuh"

namespace tidegate::kernels::gla {

/// D_end of some K-slices and one V-slice, under way while other phases run.
struct StateGradientFetch {
  static constexpr int kSlices = 8;
  uint4 tiles[kSlices];

  __device__ void load(const ChunkBackward& a, const ChunkPlace& at, int first, int column) {
    const uint4* from = a.gradients.tile(at.chunk, at.head, first, column) + at.lane;
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
                                      const MatrixLane& l, const StateGradientFetch& fetch,
                                      ValueSums& sum) {
  const char* tiles = sh.tile(first, 0) + tile_offset(l.row, l.half);
#pragma unroll
  for (int i = 0; i < StateGradientFetch::kSlices; ++i) {
    if (first + i < at.key_slices) {
      const uint4& d = fetch.tiles[i];
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
      add_state_term(at, sh, first, l, fetch, sum);
    }
    add_score_term(at, sh, v, l, across, sum);
    store_value_slice<T>(a, at, v, sum);
  }
}

}  // namespace tidegate::kernels::gla
