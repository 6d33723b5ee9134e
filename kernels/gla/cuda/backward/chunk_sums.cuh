#pragma once

// What reaches the sub-chunks from outside, the SubChunkSums of all of them. The chunk's boundaries
// give S_start do^T, D_end v^T and the row sums of the element-wise product of S_start and D_end;
// they are handed on to the chunk's halves, and from those to the sub-chunks, by the rule of
// sub_chunk_gradients.cuh. A warp has a K-slice, 16 channels, of all 64 tokens.

#include "kernels/gla/cuda/backward/chunk_layout.cuh"
#include "kernels/gla/cuda/backward/sub_chunk_gradients.cuh"

namespace tidegate::kernels::gla {

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
