#pragma once

// What a block of chunk_backward_kernel works on, and where it keeps it.

#include "kernels/gla/cuda/chunk_tiles.cuh"
#include "kernels/gla/cuda/cuts.cuh"

namespace tidegate::kernels {

struct ChunkBackward {
  GlaBackwardParams backward = {};
  Cuts chunks = {};
  ChunkStates states = {};     // at every chunk's start
  ChunkStates gradients = {};  // of the state at every chunk's end
};

/// Warps of a block: a multiple of four, at least one a slice of channels.
inline int chunk_warps(int64_t key_dim) {
  return static_cast<int>((key_dim / kBlock + kBlocks - 1) / kBlocks * kBlocks);
}

/// Where the chunk's rows lie, found once for the whole block: lane i of the first warp finds those
/// of tensor i.
struct ChunkRows {
  NearRows q, k, v, gate, d_o, dq, dk, dv, dgate;
  int tokens;  // of the chunk; 0: nothing to do

  __device__ void find(const ChunkBackward& a, int slot, int head, int lane) {
    const GlaBackwardParams& b = a.backward;
    const Cut cut = find_cut(a.chunks, slot);
    if (lane == 0) {
      tokens = cut.exists() ? cut.tokens : 0;
    }
    const auto locate = [&](int i, NearRows& rows, const HeadSeries& series) {
      if (lane == i) {
        rows = NearRows(HeadRows(series, cut.sequence, a.chunks.layout.reverse, head), cut.first);
      }
    };
    locate(0, q, b.forward.q);
    locate(1, k, b.forward.k);
    locate(2, v, b.forward.v);
    locate(3, gate, b.forward.gate);
    locate(4, d_o, b.d_o);
    locate(5, dq, b.dq);
    locate(6, dk, b.dk);
    locate(7, dv, b.dv);
    locate(8, dgate, b.dgate);
  }
};

/// A chunk, a head, and this thread's place in the block.
struct ChunkPlace {
  int slot, head;
  const ChunkRows& rows;
  int tokens;
  int lane, warp, warps;
  int key_slices, value_slices;  // of 16

  __device__ ChunkPlace(const GlaParams& p, int slot, int head, const ChunkRows& rows)
      : slot(slot),
        head(head),
        rows(rows),
        tokens(rows.tokens),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        warps(static_cast<int>(blockDim.x) / 32),
        key_slices(static_cast<int>(p.key_dim) / kBlock),
        value_slices(static_cast<int>(p.value_dim) / kBlock) {}
};

/// Tiles of a slice of channels. K: k suf, Q: q pre, of each block.
enum ChunkTile : int {
  kKeyTile = 0,       // K of blocks 0 to 3
  kQueryTile = 4,     // Q of blocks 1 to 3
  kQueryFarTile = 7,  // Q of block 3 from block 2's start
  kKeyFarTile = 8,    // K of block 0 to block 1's end
  kKeyEndTile = 9,    // K of blocks 0 to 2 to the chunk's end
  kChunkTiles = 12,
};

/// Bytes of a 16 channels x 64 tokens array of fp32, and where channel c (even) of a token lies.
/// Lanes store pairs of channels of eight tokens, and load one channel pair's half of the same
/// token in four blocks.
constexpr int kSumBytes = kChunk * kBlock * 4;

__device__ inline int sum_offset(int block, int token, int channel) {
  const int row = token ^ block;
  return ((block * kBlock + row) * kBlock + ((channel / 8 ^ row / 2) & 1) * 8 + channel % 8) * 4;
}

/// One channel of a block's tokens in such an array.
class SumColumn {
 public:
  __device__ SumColumn(int block, int channel) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      places_[i] = sum_offset(block, i, channel);
    }
  }
  /// `token` is a compile-time constant wherever this is called.
  __device__ int at(int token) const { return places_[token % 4] + token / 4 * (4 * kBlock * 4); }

 private:
  int places_[4];
};

/// Shared memory of a block. The sums come when values, do and most tiles are no longer needed.
struct ChunkShared {
  RowTile d_o, values;  // [64][V]; then, at the same place, `before` of every slice
  char* tiles;          // [K / 16][kChunkTiles]; then `after` and `through` of every slice
  RowTile scores;       // [64][64]: scores, then their gradients
  float* partials;      // scores' parts, then the gradients of the diagonal blocks
  float* decay;         // [4][K], of each block
  int key_dim;

  static constexpr int kPartialFloats = kBlock * kBlock + 4;  // of a block, each in its own banks

  static __host__ __device__ int row_bytes(int64_t key_dim, int64_t value_dim) {
    const int rows = 2 * kChunk * RowTile::pitch_of(static_cast<int>(value_dim));
    const int sums = static_cast<int>(key_dim) / kBlock * kSumBytes;
    return rows > sums ? rows : sums;
  }
  static __host__ __device__ int tile_bytes(int64_t key_dim) {
    return static_cast<int>(key_dim) / kBlock * kChunkTiles * kTileBytes;
  }
  static __host__ __device__ int partial_parts(int warps) {
    return warps <= 2 * kBlocks ? 1 : warps / kBlocks - 1;
  }
  static int bytes(int64_t key_dim, int64_t value_dim, int warps) {
    return row_bytes(key_dim, value_dim) + tile_bytes(key_dim) +
           kChunk * RowTile::pitch_of(kChunk) +
           partial_parts(warps) * kBlocks * kPartialFloats * 4 +
           static_cast<int>(key_dim) * kBlocks * 4;
  }

  __device__ ChunkShared(char* memory, int64_t key_dim, int64_t value_dim, int warps)
      : key_dim(static_cast<int>(key_dim)) {
    const int pitch = RowTile::pitch_of(static_cast<int>(value_dim));
    d_o = {memory, pitch};
    values = {memory + kChunk * pitch, pitch};
    tiles = memory + row_bytes(key_dim, value_dim);
    scores = {tiles + tile_bytes(key_dim), RowTile::pitch_of(kChunk)};
    partials = reinterpret_cast<float*>(scores.at(kChunk, 0));
    decay = partials + partial_parts(warps) * kBlocks * kPartialFloats;
  }

  __device__ char* tile(int slice, int which) const {
    return tiles + (slice * kChunkTiles + which) * kTileBytes;
  }
  __device__ float* partial(int part, int block, int row) const {
    return partials + (part * kBlocks + block) * kPartialFloats + row * kBlock;
  }
  __device__ float* decays(int block) const { return decay + block * key_dim; }

  __device__ char* before(int slice) const { return d_o.data + slice * kSumBytes; }
  __device__ char* after(int slice) const { return tile(slice, 0); }
  __device__ float* through(int slice) const {  // [4][16]
    return reinterpret_cast<float*>(after(slice) + kSumBytes);
  }
};
static_assert(kSumBytes + kBlocks * kBlock * 4 <= kChunkTiles * kTileBytes);

/// A 16 x 16 block of accumulators (two of 16 x 8) as bf16 into rows of block i, columns of block
/// j.
__device__ inline void store_block(const RowTile& tile, int i, int j, const float (&x)[2][4],
                                   int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      char* to = tile.at(i * kBlock + lane / 4 + 8 * h, j * kBlock + 8 * n + lane % 4 * 2);
      *reinterpret_cast<uint32_t*>(to) = pack_bf16(x[n][2 * h], x[n][2 * h + 1]);
    }
  }
}

/// Transposes an 8 x 8 matrix of 16-bit elements that lies in a warp as mma_bf16's operands do.
__device__ inline uint32_t transpose_matrix(uint32_t m) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
  return transposed;
}

/// Row of a slot and head in the partial sums of dgamma.
__device__ inline float* partial_sums(const ChunkBackward& a, const ChunkPlace& at) {
  const GlaParams& p = a.backward.forward;
  return static_cast<float*>(a.backward.dgamma_partial) + (at.slot * p.heads + at.head) * p.key_dim;
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

}  // namespace tidegate::kernels
