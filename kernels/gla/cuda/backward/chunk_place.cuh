#pragma once

// One chunk of one head, for the kernels that take it as a block of threads: where its rows lie, a
// thread's place in it, and the shared memory of chunk_backward_kernel.

#include "kernels/gla/cuda/backward/chunk_layout.cuh"

namespace tidegate::kernels::gla {

/// Rows behind a row of a RowTile of 64 columns each: the 16 bytes by which that is longer.
struct SpacedRows : NearRows {
  char columns[kChunk * 2];
};

/// Where the chunk's rows lie, found once for the whole block of threads: lane i of the first warp
/// finds those of tensor i, lanes of the second those of the factors.
struct ChunkRows {
  SpacedRows q, k, v, gate, d_o, dq, dk, dv, dgate;
  SpacedRows factors[kFactorSides];
  int tokens;  // of the chunk; 0: nothing to do
  int chunk, head;

  __device__ void find(const ChunkBackward& a, int thread) {
    const int lane = thread % kWarpSize;
    const bool of_factors = thread >= kWarpSize;
    if (lane >= (of_factors ? int{kFactorSides} : int{kChunkTensors}) || thread >= 2 * kWarpSize) {
      return;
    }
    const auto index = static_cast<int>(blockIdx.x);
    const auto heads = static_cast<int>(a.backward.forward.heads);
    const int its_chunk = index / heads, its_head = index % heads;
    const TimeTile tile = find_time_tile(a.chunks, its_chunk);
    const bool backwards = a.chunks.layout.reverse;
    if (of_factors) {
      static_cast<NearRows&>(factors[lane]) =
          a.factors.rows(static_cast<FactorSide>(lane), tile.sequence, backwards, its_head)
              .of_chunk(tile.first, tile.tokens);
      return;
    }
    static_cast<NearRows&>((&q)[lane]) =
        NearRows(HeadRows(a.tensors[lane], tile.sequence, backwards, its_head), tile.first);
    if (lane == 0) {
      tokens = tile.exists() ? tile.tokens : 0;
      chunk = its_chunk;
      head = its_head;
    }
  }
};
static_assert(sizeof(ChunkRows) ==  // in the order of ChunkTensor
              (int{kChunkTensors} + int{kFactorSides}) * sizeof(SpacedRows) + alignof(SpacedRows));

/// Warps of a block of threads of chunk_backward_kernel: a multiple of four, at least one a
/// K-slice.
__host__ __device__ constexpr int chunk_warps(int64_t key_dim) {
  return static_cast<int>((key_dim / kSlice + kSubChunks - 1) / kSubChunks * kSubChunks);
}

/// A chunk, a head, and this thread's place in the block of threads. Every phase makes its own:
/// what a thread kept from one to the next would be spilled, and read from L2.
struct ChunkPlace {
  const ChunkRows& rows;
  int tokens;
  int lane, warp, warps;
  int key_slices, value_slices;

  __device__ ChunkPlace(int64_t key_dim, int64_t value_dim, const ChunkRows& rows)
      : rows(rows),
        tokens(rows.tokens),
        lane(fresh_thread_index() % 32),
        warp(fresh_thread_index() / 32),
        warps(chunk_warps(key_dim)),
        key_slices(static_cast<int>(key_dim) / kSlice),
        value_slices(static_cast<int>(value_dim) / kSlice) {}

  /// Works this place out anew, so that the compiler keeps no part of it in registers.
  __device__ ChunkPlace again() const {
    return ChunkPlace(key_slices * kSlice, value_slices * kSlice, rows);
  }

  /// With the sizes that the compiler may know.
  __device__ ChunkStates sized(ChunkStates states) const {
    states.key_slices = key_slices;
    states.value_slices = value_slices;
    return states;
  }
  __device__ ChunkFactors sized(ChunkFactors factors) const {
    factors.key_slices = key_slices;
    factors.piece_bits = factors.find_piece_bits();
    return factors;
  }

  __device__ int chunk() const { return rows.chunk; }
  __device__ int head() const { return rows.head; }
  __device__ bool has_slice() const { return warp < key_slices; }
  __device__ int thread() const { return warp * 32 + lane; }
  __device__ int threads() const { return warps * 32; }
  __device__ int columns() const { return value_slices * kSlice; }
};

__device__ inline bool has_one_column_tile(const ChunkPlace& at) {
  return at.value_slices <= kStateColumns / kSlice;
}

// ---- Shared memory ----
//
// That of a block of threads of chunk_backward_kernel: 97 KB at K = V = 128, so that 99 KB suffice,
// and two blocks take no more than 196 KB of a multiprocessor of compute capability 9.0, of which
// 60 KB remain for its L1 cache: with a few bytes more, and 28 KB of L1, all took 3 % longer. So
// what is small lies where rows are 16 bytes longer than their columns (RowTile). Values, do and
// tiles give way to the sums.

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
/// phase that makes them to the one that uses them: four times four floats, and two more.
constexpr int kSumParts = 4;
constexpr int kSumBytes = kSubChunks * 32 * (kSumParts * 16 + 8);  // of a K-slice

/// A lane's part of an operand that is the sum of two of bf16, of which the second is what rounding
/// left of the first.
struct PairGradients {
  uint4 high, low;
};

struct ChunkShared {
  RowTile d_o, values;  // [64][V]
  char* tiles;          // [K / 16][kChunkTiles]; then everything up to here gives way to the sums
  // [64][64] in blocks of two sub-chunks: scores of (i, j), i >= j, in block (i, j); dA of later i
  // and earlier j in block (j, i), not transposed: its rows are tokens of i.
  RowTile scores;
  // [4][32]: dA of a sub-chunk's pairs as A of mma_bf16, pair (t, s) also at (s, t)
  PairGradients* pairs;
  float* decay;  // [K / 16][4][16], of each sub-chunk

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
           kSubChunks * 2 * kTileBytes + static_cast<int>(key_dim) * kSubChunks * 4;
  }
  static __host__ __device__ int column_tiles(int64_t value_dim) {
    return ChunkStates::column_tiles(static_cast<int>(value_dim) / kSlice);
  }

  __device__ ChunkShared(char* memory, int64_t key_dim, int64_t value_dim) {
    const int pitch = RowTile::pitch_of(static_cast<int>(value_dim));
    d_o = {memory, pitch};
    values = {memory + kChunk * pitch, pitch};
    tiles = memory + row_bytes(value_dim);
    scores = {memory + front_bytes(key_dim, value_dim), RowTile::pitch_of(kChunk)};
    pairs = reinterpret_cast<PairGradients*>(scores.at(kChunk, 0));
    decay = reinterpret_cast<float*>(pairs + kSubChunks * 32);
  }

  /// Behind the rows of scores: dA of (2r, 2r), (2r+1, 2r+1) and (2r+1, 2r), in float...
  __device__ float4& neighbours(int sub_chunk, int r) const {
    return *reinterpret_cast<float4*>(scores.at(sub_chunk * 8 + r, kChunk));
  }
  /// ... that of tokens 4g+2, 4g+3 with 4g, 4g+1, in float...
  __device__ float4& fours(int sub_chunk, int g) const {
    return *reinterpret_cast<float4*>(scores.at(kFirstFours + sub_chunk * 4 + g, kChunk));
  }
  /// ... and where the chunk's rows lie.
  __device__ ChunkRows& rows() const {
    return *reinterpret_cast<ChunkRows*>(scores.at(kFirstRows, kChunk));
  }
  static constexpr int kFirstFours = kSubChunks * 8, kFirstRows = kFirstFours + kSubChunks * 4;
  static_assert(kFirstRows + sizeof(ChunkRows) / sizeof(SpacedRows) + 1 <= kChunk);

  __device__ char* tile(int slice, int which) const {
    return tiles + (slice * kChunkTiles + which) * kTileBytes;
  }
  __device__ float* decays(int slice, int sub_chunk) const {
    return decay + (slice * kSubChunks + sub_chunk) * kSlice;
  }
  /// Behind the rows of do and of values, eight in each: the units of ChunkStates, [state, its
  /// gradient][column tile][K], in bf16. Where there is one column tile, sums over V are made in
  /// units and multiplied in the end, and K_end holds those of D.
  __device__ char* eight_units(int index) const { return d_o.at(index, 0) + d_o.pitch - 16; }
  /// A K-slice's first eight in the column tile of a V-slice; the other eight are a row further.
  __device__ const char* slice_units(const ChunkPlace& at, bool of_gradient, int value_slice,
                                     int key_slice) const {
    const int tile = value_slice / (kStateColumns / kSlice) +
                     (of_gradient ? ChunkStates::column_tiles(at.value_slices) : 0);
    return eight_units((tile * at.key_slices + key_slice) * 2);
  }
  /// A slice's units in bf16, of the row of a state's tile that the lane has, and of the other.
  __device__ uint2 row_units(const char* units, int lane) const {
    units += lane / 4 * 2;
    return make_uint2(*reinterpret_cast<const uint16_t*>(units),
                      *reinterpret_cast<const uint16_t*>(units + d_o.pitch));
  }
  /// Once the decays are no longer needed: sums over a K-slice, [64] tokens.
  __device__ float* head_sums(int slice) const { return decays(slice, 0); }
  /// A lane's own place; part i lies 32 float4 further.
  __device__ float4* sums(int slice, int sub_chunk, int lane) const {
    return reinterpret_cast<float4*>(d_o.data + slice * kSumBytes) + sub_chunk * kSumParts * 32 +
           lane;
  }
  /// ... and that of what passes through.
  __device__ float2* through_sums(int slice, int sub_chunk, int lane) const {
    return reinterpret_cast<float2*>(sums(slice, kSubChunks, 0)) + sub_chunk * 32 + lane;
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
         (at.chunk() * p.heads + at.head()) * p.key_dim;
}

__device__ inline void clear_partial_sums(const ChunkBackward& a, const ChunkPlace& at) {
  if (a.backward.dgamma_partial == nullptr) {
    return;
  }
  for (int i = at.thread(); i < at.key_slices * kSlice; i += at.threads()) {
    partial_sums(a, at)[i] = 0;
  }
}

}  // namespace tidegate::kernels::gla
