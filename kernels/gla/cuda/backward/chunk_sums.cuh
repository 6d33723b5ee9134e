#pragma once

// What reaches the sub-chunks from outside, the SubChunkSums of all of them. The chunk's boundaries
// give S_start do^T, D_end v^T and the row sums of the element-wise product of S_start and D_end;
// they are handed on to the chunk's halves, and from those to the sub-chunks, by the rule of
// sub_chunk_gradients.cuh. A warp has a K-slice, 16 channels, of all 64 tokens.

#include "kernels/gla/cuda/backward/chunk_place.cuh"
#include "kernels/gla/cuda/backward/sub_chunk_gradients.cuh"

namespace tidegate::kernels::gla {

/// Accumulators of all sub-chunks of a K-slice.
struct ChunkSums {
  SubChunkSum before[kSubChunks];  // S do, S the state at the start of the chunk, half or sub-chunk
  SubChunkSum after[kSubChunks];   // D v, D the gradient of the state at its end
  float through[kSubChunks][2];    // rowsum(S * D), of the chunk in the first place alone
};

/// S_start and D_end of this warp's channels, two V-slices under way while others are used.
struct BoundaryFetch {
  const uint4 *states, *grads;
  uint4 s[2], d[2];

  __device__ BoundaryFetch(const ChunkBackward& a, const ChunkPlace& at)
      : states(at.sized(a.states).tile(at.chunk(), at.head(), at.warp, 0) + at.lane),
        grads(at.sized(a.gradients).tile(at.chunk(), at.head(), at.warp, 0) + at.lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at.warp < at.key_slices && i < at.value_slices) {
        s[i] = __ldg(states + i * 32);
        d[i] = __ldg(grads + i * 32);
      }
    }
  }
};

/// Multiplies channel by channel with units as row_units has them.
__device__ inline void scale_by_units(SubChunkSum (&x)[kSubChunks], const float (&units)[2]) {
#pragma unroll
  for (int b = 0; b < kSubChunks; ++b) {
    scale_channels(x[b], units);
  }
}

/// sums += a tile of states, or of their gradients, times every sub-chunk's rows of a V-slice.
__device__ inline void accumulate_slice(const uint4& tile, const char* rows, int sub_chunk_bytes,
                                        SubChunkSum (&sums)[kSubChunks]) {
#pragma unroll
  for (int b = 0; b < kSubChunks; ++b) {
    uint32_t m[4];
    load_matrices(m, rows + b * sub_chunk_bytes);
    mma_bf16(sums[b][0], tile.x, tile.z, tile.y, tile.w, m[0], m[1]);
    mma_bf16(sums[b][1], tile.x, tile.z, tile.y, tile.w, m[2], m[3]);
  }
}

/// through += the diagonal of S_start D_end^T, of the slice's columns 0-7 and 8-15, which becomes
/// zero.
__device__ inline void take_diagonal(float (&ends)[2][4], int lane, const float (&unit)[2],
                                     const float (&gradient_unit)[2], float (&through)[2]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool diagonal = lane / 4 == lane % 4 * 2 + e;
      float& sum = ends[j][2 * j + e];
      through[j] += diagonal ? sum * unit[j] * gradient_unit[j] : 0.0f;
      sum = 0;
    }
  }
}

/// At the chunk's boundaries: S_start do^T, D_end v^T, and the row sums of S_start * D_end, element
/// by element. kOneTile: V is one column tile.
template <bool kOneTile>
__device__ inline void accumulate_boundaries(const ChunkPlace& at, const ChunkShared& sh,
                                             BoundaryFetch& fetch, ChunkSums& sums) {
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
  const MatrixLane across = MatrixLane::across(at.lane);
  const char* d_o = sh.d_o.at(0, 0, across);
  const char* values = sh.values.at(0, 0, across);
  const int sub_chunk_bytes = kSubChunk * sh.d_o.pitch;
  constexpr int kTileSlices = kStateColumns / kSlice;
  float ends[2][4] = {};  // S_start D_end^T, of which the diagonal is wanted
  float (&through)[2] = sums.through[0];
  through[0] = through[1] = 0;
#pragma unroll 1
  for (int tile = 0; tile < (kOneTile ? 1 : at.value_slices); tile += kTileSlices) {
    uint2 units, gradient_units;
    const auto load_units = [&] {
      units = sh.row_units(sh.slice_units(at, false, tile, at.warp), at.lane);
      gradient_units = sh.row_units(sh.slice_units(at, true, tile, at.warp), at.lane);
    };
    if (!kOneTile) {
      load_units();
    }
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
          const uint32_t rows[4] = {next_s.x, next_s.z, next_s.y, next_s.w};
          mma_f16(ends[0], rows, next_d.x, next_d.y);
          mma_f16(ends[1], rows, next_d.z, next_d.w);
          const uint4 s = kOneTile ? state_tile(next_s) : state_tile(next_s, units.x, units.y);
          if (more) {
            next_s = __ldg(fetch.states + i * 32);
          }
          accumulate_slice(s, d_o, sub_chunk_bytes, sums.before);
          const uint4 d = kOneTile ? state_tile(next_d)
                                   : state_tile(next_d, gradient_units.x, gradient_units.y);
          if (more) {
            next_d = __ldg(fetch.grads + i * 32);
          }
          accumulate_slice(d, values, sub_chunk_bytes, sums.after);
          d_o += kSlice * 2;
          values += kSlice * 2;
        }
      }
    }
    if (kOneTile) {  // not before, to save registers
      load_units();
    }
    const float unit[2] = {__uint_as_float(units.x << 16), __uint_as_float(units.y << 16)};
    const float gradient_unit[2] = {__uint_as_float(gradient_units.x << 16),
                                    __uint_as_float(gradient_units.y << 16)};
    take_diagonal(ends, at.lane, unit, gradient_unit, through);
    if constexpr (kOneTile) {
      scale_by_units(sums.before, unit);
      scale_by_units(sums.after, gradient_unit);
    }
  }
}

__device__ inline void accumulate_boundaries(const ChunkPlace& at, const ChunkShared& sh,
                                             BoundaryFetch& fetch, ChunkSums& sums) {
  if (has_one_column_tile(at)) {
    accumulate_boundaries<true>(at, sh, fetch, sums);
  } else {
    accumulate_boundaries<false>(at, sh, fetch, sums);
  }
}

/// before += K^T dA^T, of an earlier sub-chunk's keys, as A, and a later one.
__device__ inline void add_keys(SubChunkSum& before, const ChunkPlace& at, const ChunkShared& sh,
                                int later, int earlier, const uint32_t (&keys)[4]) {
  uint32_t grad[4];
  load_matrices(grad,
                sh.scores.at(earlier * kSubChunk, later * kSubChunk, MatrixLane::across(at.lane)));
  mma_bf16(before[0], keys, grad[0], grad[1]);
  mma_bf16(before[1], keys, grad[2], grad[3]);
}

/// after += Q^T dA.
__device__ inline void add_queries(SubChunkSum& after, const ChunkPlace& at, const ChunkShared& sh,
                                   int later, int earlier, const uint32_t (&queries)[4]) {
  uint32_t grad[4];
  load_matrices_transposed(
      grad, sh.scores.at(earlier * kSubChunk, later * kSubChunk, MatrixLane(at.lane)));
  mma_bf16(after[0], queries, grad[0], grad[1]);
  mma_bf16(after[1], queries, grad[2], grad[3]);
}

/// A tile of the warp's K-slice as A of (channels x tokens).
__device__ inline void load_tile(uint32_t (&m)[4], const ChunkPlace& at, const ChunkShared& sh,
                                 int which) {
  const MatrixLane across = MatrixLane::across(at.lane);
  load_matrices_transposed(m, sh.tile(at.warp, which) + tile_offset(across.row, across.half));
}

/// The decays of every sub-chunk, of this lane's two channels.
__device__ inline void load_sub_chunk_decays(const ChunkPlace& at, const ChunkShared& sh,
                                             float (&d)[kSubChunks][2]) {
#pragma unroll
  for (int b = 0; b < kSubChunks; ++b) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      d[b][j] = sh.decays(at.warp, b)[at.lane / 4 + 8 * j];
    }
  }
}

/// From the chunk to its halves, sub-chunks 0 and 1 and sub-chunks 2 and 3.
__device__ inline void descend_to_halves(const ChunkPlace& at, const ChunkShared& sh,
                                         const float (&d)[kSubChunks][2], ChunkSums& sums,
                                         float (&half_through)[2][2]) {
  const float (&chunk_through)[2] = sums.through[0];
  float halves[2][2];  // decays
  float from_last[2] = {}, from_first[2] = {};
  uint32_t m[4];
  // The factors across the halves are rounded twice; here their decays are applied in fp32.
  load_tile(m, at, sh, kQueryFactor + 2);
  add_products(from_last, m, sums.before[3]);
  load_tile(m, at, sh, kKeyFactor);
  add_products(from_first, m, sums.after[0]);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    halves[0][j] = d[0][j] * d[1][j];
    halves[1][j] = d[2][j] * d[3][j];
    half_through[0][j] = fmaf(d[2][j], from_last[j], halves[1][j] * chunk_through[j]);
    half_through[1][j] = fmaf(d[1][j], from_first[j], halves[0][j] * chunk_through[j]);
  }
  uint32_t keys[4], queries[4];
  load_tile(queries, at, sh, kQueryFactor + 1);
  add_products(half_through[0], queries, sums.before[2]);
  load_tile(keys, at, sh, kKeyFactor + 1);
  add_products(half_through[1], keys, sums.after[1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    scale_channels(sums.before[2 + i], halves[0]);
    scale_channels(sums.after[i], halves[1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    add_queries(sums.after[i], at, sh, 2, i, queries);
    add_keys(sums.before[2 + i], at, sh, 2 + i, 1, keys);
  }
  load_tile(queries, at, sh, kQueryHalfFactor);
  load_tile(keys, at, sh, kKeyHalfFactor);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    add_queries(sums.after[i], at, sh, 3, i, queries);
    add_keys(sums.before[2 + i], at, sh, 2 + i, 0, keys);
  }
}

/// From the chunk to its halves, from those to the sub-chunks.
__device__ inline void descend_to_sub_chunks(const ChunkPlace& at, const ChunkShared& sh,
                                             ChunkSums& sums) {
  float (&through)[kSubChunks][2] = sums.through;
  float d[kSubChunks][2], half_through[2][2];
  load_sub_chunk_decays(at, sh, d);
  descend_to_halves(at, sh, d, sums, half_through);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int e = 2 * half, h = e + 1;  // the earlier and the later sub-chunk
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      through[e][j] = d[h][j] * half_through[half][j];
      through[h][j] = d[e][j] * half_through[half][j];
    }
    uint32_t queries[4], keys[4];
    load_tile(queries, at, sh, kQueryFactor + h - 1);
    load_tile(keys, at, sh, kKeyFactor + e);
    add_products(through[e], queries, sums.before[h]);
    add_products(through[h], keys, sums.after[e]);
    scale_channels(sums.before[h], d[e]);
    scale_channels(sums.after[e], d[h]);
    add_keys(sums.before[h], at, sh, h, e, keys);
    add_queries(sums.after[e], at, sh, h, e, queries);
  }
}

}  // namespace tidegate::kernels::gla
