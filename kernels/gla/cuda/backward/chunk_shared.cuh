#pragma once

// The shared memory of a block of threads of chunk_backward_kernel: 96 KB at K = V = 128, so that
// 99 KB suffice and 227 KB hold two blocks. Values, do and tiles give way to the sums.

#include "kernels/gla/cuda/backward/chunk_layout.cuh"

namespace tidegate::kernels::gla {

/// Warps of a block of threads: a multiple of four, at least one a K-slice.
inline int chunk_warps(int64_t key_dim) {
  return static_cast<int>((key_dim / kSlice + kSubChunks - 1) / kSubChunks * kSubChunks);
}

/// Tiles of a K-slice. K is k suf, Q is q pre, of each sub-chunk.
enum ChunkTile : int {
  kKeyFactor = 0,        // K of sub-chunks 0 to 3
  kQueryFactor = 4,      // Q of sub-chunks 1 to 3
  kQueryHalfFactor = 7,  // Q of sub-chunk 3 from sub-chunk 2's start
  kKeyHalfFactor = 8,    // K of sub-chunk 0 to sub-chunk 1's end
  kKeyEndFactor = 9,     // K of sub-chunks 0 to 2 to the chunk's end
  kChunkTiles = 12,
};

/// What a lane has of a sub-chunk's sums over V and over other sub-chunks, on their way from the
/// phase that makes them to the one that uses them: five times four floats.
constexpr int kSumParts = 5;
constexpr int kSumBytes = kSubChunks * kSumParts * 32 * 16;  // of a K-slice

struct ChunkShared {
  RowTile d_o, values;  // [64][V]
  char* tiles;          // [K / 16][kChunkTiles]; then everything up to here gives way to the sums
  // [64][64] in blocks of two sub-chunks: scores of (i, j), i >= j, in block (i, j); dA of later i
  // and earlier j in block (j, i), not transposed: its rows are tokens of i.
  RowTile scores;
  uint4* pairs;  // [4][32]: dA of a sub-chunk's pairs as A of mma_bf16, pair (t, s) also at (s, t)
  float4* neighbours;  // [4][8]: dA of (2r, 2r), (2r+1, 2r+1) and (2r+1, 2r), in float
  float* decay;        // [K / 16][4][16], of each sub-chunk

  static __host__ __device__ int row_bytes(int64_t value_dim) {
    return 2 * kChunk * RowTile::pitch_of(static_cast<int>(value_dim));
  }
  static __host__ __device__ int front_bytes(int64_t key_dim, int64_t value_dim) {
    const int slices = static_cast<int>(key_dim) / kSlice;
    const int inputs = row_bytes(value_dim) + slices * kChunkTiles * kTileBytes;
    const int sums = slices * kSumBytes;
    return inputs > sums ? inputs : sums;
  }
  static int bytes(int64_t key_dim, int64_t value_dim) {
    return front_bytes(key_dim, value_dim) + kChunk * RowTile::pitch_of(kChunk) +
           kSubChunks * (kTileBytes + 8 * 16) + static_cast<int>(key_dim) * kSubChunks * 4;
  }

  __device__ ChunkShared(char* memory, int64_t key_dim, int64_t value_dim) {
    const int pitch = RowTile::pitch_of(static_cast<int>(value_dim));
    d_o = {memory, pitch};
    values = {memory + kChunk * pitch, pitch};
    tiles = memory + row_bytes(value_dim);
    scores = {memory + front_bytes(key_dim, value_dim), RowTile::pitch_of(kChunk)};
    pairs = reinterpret_cast<uint4*>(scores.at(kChunk, 0));
    neighbours = reinterpret_cast<float4*>(pairs + kSubChunks * 32);
    decay = reinterpret_cast<float*>(neighbours + kSubChunks * 8);
  }

  __device__ char* tile(int slice, int which) const {
    return tiles + (slice * kChunkTiles + which) * kTileBytes;
  }
  __device__ float* decays(int slice, int sub_chunk) const {
    return decay + (slice * kSubChunks + sub_chunk) * kSlice;
  }
  /// Once the decays are no longer needed: sums over a K-slice, [64] tokens.
  __device__ float* head_sums(int slice) const { return decays(slice, 0); }
  /// A lane's own place; part i lies 32 float4 further.
  __device__ float4* sums(int slice, int sub_chunk, int lane) const {
    return reinterpret_cast<float4*>(d_o.data + slice * kSumBytes) + sub_chunk * kSumParts * 32 +
           lane;
  }
};

/// Accumulators of 16 x 16 (two of 16 x 8) as bf16 into rows of sub-chunk i, columns of sub-chunk
/// j.
__device__ inline void store_tile(const RowTile& tile, int i, int j, const float (&x)[2][4],
                                  int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      char* to = tile.at(i * kSubChunk + lane / 4 + 8 * h, j * kSubChunk + 8 * n + lane % 4 * 2);
      *reinterpret_cast<uint32_t*>(to) = pack_bf16(x[n][2 * h], x[n][2 * h + 1]);
    }
  }
}

/// Row of a chunk and head in the partial sums of dgamma.
__device__ inline float* partial_sums(const ChunkBackward& a, const ChunkPlace& at) {
  const GlaParams& p = a.backward.forward;
  return static_cast<float*>(a.backward.dgamma_partial) +
         (at.chunk * p.heads + at.head) * p.key_dim;
}

__device__ inline void clear_partial_sums(const ChunkBackward& a, const ChunkPlace& at) {
  if (a.backward.dgamma_partial == nullptr) {
    return;
  }
  for (int i = static_cast<int>(threadIdx.x); i < a.backward.forward.key_dim;
       i += static_cast<int>(blockDim.x)) {
    partial_sums(a, at)[i] = 0;
  }
}

}  // namespace tidegate::kernels::gla
