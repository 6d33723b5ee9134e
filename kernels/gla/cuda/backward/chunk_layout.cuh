#pragma once

// How the backward pass lays out a chunk of 64 tokens: tiles of operands, in shared and in device
// memory alike, states at chunk boundaries, the factors that the passes hand on, where the rows of
// one chunk and head lie, and the shared memory of the kernel that takes a chunk.

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/gla/cuda/backward/pairs.cuh"
#include "kernels/gla/cuda/dyadic.cuh"
#include "kernels/gla/cuda/head_inputs.cuh"

namespace tidegate::kernels::gla {

// The tiles of the backward pass, and why they are so.
//
//   chunk      64 tokens. Its states take 2 K V bytes each way in memory: shorter chunks have more
//              of them, longer ones more pairs of tokens and more shared memory.
//   sub-chunk  16 tokens, the depth of one mma; within it pairs go down the dyadic levels.
//   K-slice    16 channels, one warp: a token's dq, dk and dgate, its inputs and its slopes then
//              stay with one lane from loading to storing. At most 16 of them, so K is at most 256.
//   V-slice    16 columns of V, the depth of one mma.
//   state pass 128 columns of V a block of threads (kStateColumns): 64 accumulators a lane.
constexpr int kChunk = 64;
constexpr int kSlice = 16;  // channels of a K-slice, columns of a V-slice
constexpr int kSubChunks = kChunk / kSubChunk;
constexpr int kMaxKeySlices = 16;

/// In tiles and rows, a sub-chunk's even tokens come first, then its odd ones: in an accumulator of
/// mma_bf16, lane 4r + c then holds tokens 2r and 2r + 1, as dyadic.cuh wants them. Counted from
/// the chunk's start.
__device__ inline int token_of_row(int row) {
  return (row & ~(kSubChunk - 1)) + ((row & 7) << 1) + (row >> 3 & 1);
}

/// The columns of a K-slice are its channels in the order in which lanes hold them: lane 4r + c has
/// channels 4c .. 4c+3 of its tokens, of which 4c + 2n + e is column 8n + 2c + e. (Columns 2c,
/// 2c+1, 2c+8 and 2c+9 are what it has of two accumulators.)
__device__ inline int channel_of_column(int column) {
  return column % 8 / 2 * 4 + column / 8 * 2 + column % 2;
}

/// A tile: 16 tokens x 16 channels of bf16 in 512 bytes, first columns 0 to 7 of all rows, then
/// columns 8 to 15. It is laid out alike in device and in shared memory.
constexpr int kTileBits = 9, kTileBytes = 1 << kTileBits;
static_assert(kTileBytes == kSubChunk * kSlice * 2);
constexpr int kSliceRowBits = 5, kSliceRowBytes = 1 << kSliceRowBits;  // of one token

/// Where eight columns of a row start, in bytes.
__device__ inline int tile_offset(int row, int half) { return half * (kTileBytes / 2) + row * 16; }

/// Which row (of 16) and which half of it a lane points to in load_matrices, so that m[] becomes
/// A of (rows x columns). Loaded transposed: two B of (rows x columns), {m[0], m[1]} and {m[2],
/// m[3]}.
struct MatrixLane {
  int row, half;

  __device__ explicit MatrixLane(int lane) : row(lane % 16), half(lane / 16) {}
  __device__ MatrixLane(int row, int half) : row(row), half(half) {}

  /// Two B of (columns x rows), likewise. Loaded transposed: A of (columns x rows).
  static __device__ MatrixLane across(int lane) { return {lane % 8 + lane / 16 * 8, lane / 8 % 2}; }
};

/// A matrix of 64 rows of bf16, 16 bytes longer than its columns: eight rows have different banks.
struct RowTile {
  char* data;
  int pitch;  // bytes

  static __host__ __device__ int pitch_of(int columns) { return columns * 2 + 16; }

  __device__ char* at(int row, int column) const { return data + row * pitch + column * 2; }
  __device__ const char* at(int row, int column, const MatrixLane& l) const {
    return at(row + l.row, column + l.half * 8);
  }
};

/// A row and those after it in scan order, cheap to step through: rows are less than 2^31 bytes
/// apart (see in_rows of src/ops/views.h).
struct alignas(16) NearRows {
  char* base;
  int stride;  // bytes

  NearRows() = default;
  __device__ NearRows(char* base, int stride) : base(base), stride(stride) {}
  __device__ NearRows(const HeadRows& rows, int first)
      : base(rows.row(first)), stride(rows.stride_bytes()) {}

  __device__ char* row(int k) const { return base + int64_t{k} * stride; }
};

/// Calls visit(row, token, column) for each group of eight columns that this thread copies.
template <class Visit>
__device__ inline void for_each_pack(int columns, Visit visit) {
  const int packs = columns / 8, shift = 32 - __clz(packs - 1);
  const auto thread = static_cast<int>(threadIdx.x);
  const int pack = thread & ((1 << shift) - 1), step = static_cast<int>(blockDim.x) >> shift;
  if (pack < packs) {
#pragma unroll 4
    for (int row = thread >> shift; row < kChunk; row += step) {
      visit(row, token_of_row(row), pack * 8);
    }
  }
}

/// Starts copying the first `tokens` tokens, at least one, into a tile; what lies past them is
/// zero.
inline __device__ void copy_rows_async(const RowTile& tile, const NearRows& rows, int tokens,
                                       int column0, int columns) {
  const NearRows from(rows.base + column0 * 2, rows.stride);
  if (tokens == kChunk) {
    for_each_pack(columns, [&](int row, int token, int column) {
      copy_async<16>(tile.at(row, column), from.row(token) + column * 2);
    });
  } else {
    for_each_pack(columns, [&](int row, int token, int column) {
      copy_async_or_zero(tile.at(row, column), from.row(min(token, tokens - 1)) + column * 2,
                         token < tokens);
    });
  }
}

/// Activates what copy_rows_async brought and makes it bf16, each thread its own share. Called once
/// the thread's copies have arrived.
template <class T>
__device__ inline void finish_rows(const RowTile& tile, InputActivation activation, int tokens,
                                   int columns) {
  if (std::is_same_v<T, __nv_bfloat16> && activation == InputActivation::kNone) {
    return;
  }
  for_each_pack(columns, [&](int row, int token, int column) {
    if (token < tokens) {
      auto* place = reinterpret_cast<uint4*>(tile.at(row, column));
      const Pack<T, 8> raw = {*place};
      uint32_t out[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        using Math = GateMath<float, true>;
        out[i] = pack_bf16(activate<Math>(activation, raw.get(2 * i)),
                           activate<Math>(activation, raw.get(2 * i + 1)));
      }
      *place = make_uint4(out[0], out[1], out[2], out[3]);
    }
  });
}

/// Columns of a state that a block of threads of the state pass keeps.
constexpr int kStateColumns = 128;

/// States at chunk boundaries, in f16 and in units of a power of two for every channel and column
/// tile (f16 has three more bits than bf16, which the row sums of S o D need, and too small a range
/// without): [chunk][head][K / 16][V / 16][lane], the 16 bytes of a lane as it needs them for two B
/// of (values x K-slice): {x, y} of the slice's columns 0-7, {z, w} of 8-15. As {x, z, y, w} they
/// are A of (K-slice x values).
struct ChunkStates {
  uint4* data = nullptr;
  uint16_t* units = nullptr;  // bf16, [chunk][head][column tile][K], as channel_of_column has them
  int64_t heads = 0;
  int key_slices = 0, value_slices = 0;

  __host__ __device__ static int column_tiles(int value_slices) {
    constexpr int kSlices = kStateColumns / kSlice;
    return (value_slices + kSlices - 1) / kSlices;
  }
  __device__ uint16_t* units_of(int64_t chunk, int64_t head, int column_tile) const {
    return units + ((chunk * heads + head) * column_tiles(value_slices) + column_tile) *
                       int64_t{key_slices * kSlice};
  }

  __device__ uint4* tile(int64_t chunk, int64_t head, int key_slice, int value_slice) const {
    return data + (((chunk * heads + head) * key_slices + key_slice) * value_slices + value_slice) *
                      int64_t{32};
  }
};

/// A lane's part of a state's tile in bf16, still in the units of its two rows...
__device__ inline uint4 state_tile(const uint4& tile) {
  return make_uint4(rounded_bf16(tile.x), rounded_bf16(tile.y), rounded_bf16(tile.z),
                    rounded_bf16(tile.w));
}
/// ... and without, given those of row lane / 4 and of the other.
__device__ inline uint4 state_tile(const uint4& tile, unsigned unit, unsigned higher_unit) {
  const uint32_t lower = unit * 0x10001u, higher = higher_unit * 0x10001u;
  const uint4 x = state_tile(tile);
  return make_uint4(multiply_bf16(x.x, lower), multiply_bf16(x.y, lower),
                    multiply_bf16(x.z, higher), multiply_bf16(x.w, higher));
}

/// The tensors of a call, by the name of a chunk's rows.
enum ChunkTensor : int {
  kRowsQ = 0,
  kRowsK,
  kRowsV,
  kRowsGate,
  kRowsDo,
  kRowsDq,
  kRowsDk,
  kRowsDv,
  kRowsDgate,
  kChunkTensors,
};

/// The two factors of a pair: q times decays, k times decays.
enum FactorSide : int { kQueries = 0, kKeys, kFactorSides };

/// The rows that hold Q or K of one head of a sequence, a tile for every sub-chunk and K-slice.
class FactorRows {
 public:
  __device__ FactorRows(const HeadRows& gradient_rows, char* tail_rows, int row_bytes)
      : gradient_rows_(gradient_rows), tail_rows_(tail_rows), row_bytes_(row_bytes) {}

  /// Those of the chunk that starts at `first`.
  __device__ NearRows of_chunk(int first, int tokens) const {
    return tokens == kChunk ? NearRows(gradient_rows_, first) : NearRows(tail_rows_, row_bytes_);
  }

 private:
  HeadRows gradient_rows_;
  char* tail_rows_;
  int row_bytes_;
};

/// Factors of every chunk, made once for all kernels that follow: with pre(t) and suf(t) as
/// products of the decays of a sub-chunk, Q = scale act(q) pre and K = k suf in bf16, the
/// sub-chunks' decays, and the scores of the pairs of tokens of a sub-chunk.
///
/// Q and K take no memory of their own. A chunk's Q lie in its rows of dq, its K in those of dk, or
/// of dgate where keys come from logits: at least as many bytes (fp32 logits: twice), and
/// chunk_backward_kernel writes gradients there once it has read them. Only a chunk of less than 64
/// tokens, of which a sequence has at most one, has too few rows, and is given tail_rows of its
/// own.
struct ChunkFactors {
  HeadSeries gradient_rows[kFactorSides] = {};
  char* tail_rows = nullptr;  // [sequence][head][side][64][K]
  float* decays = nullptr;    // [chunk][head][K / 16][4][16], as channel_of_column orders them
  uint4* scores = nullptr;    // [chunk][head][4] tiles
  int64_t heads = 0;
  int key_slices = 0;
  int piece_bits = 0;  // find_piece_bits(): the bytes of a piece of a tile, in log2

  static constexpr int kSliceDecays = kSubChunks * kSlice;

  __host__ __device__ int row_bytes() const { return key_slices * kSliceRowBytes; }
  int64_t tail_bytes(const SequenceLayout& layout) const {
    const bool some = layout.offsets != nullptr || layout.time % kChunk != 0;
    return some ? layout.sequences * heads * kFactorSides * kChunk * row_bytes() : 0;
  }
  int64_t decay_bytes(int64_t chunks) const {
    return chunks * heads * key_slices * kSliceDecays * 4;
  }
  int64_t score_bytes(int64_t chunks) const { return chunks * heads * kSubChunks * kTileBytes; }

  __device__ FactorRows rows(FactorSide side, const Sequence& seq, bool backwards, int head) const {
    const int64_t at = (seq.index * heads + head) * kFactorSides + side;
    return {HeadRows(gradient_rows[side], seq, backwards, head),
            tail_rows + at * kChunk * row_bytes(), row_bytes()};
  }
  /// A tile lies in a piece of each of some rows, side by side with none or as long pieces of
  /// other tiles: the largest power of two that divides a row, at most a tile. Its bytes, in log2.
  /// K = 128: rows of 256 bytes, so a tile is two whole rows, 8 slices x 4 sub-chunks x 2 = 64
  /// rows.
  __host__ __device__ int find_piece_bits() const {
    int bits = kSliceRowBits;
    while (bits < kTileBits && row_bytes() % (2 << bits) == 0) {
      ++bits;
    }
    return bits;
  }
  /// How many K-slices' tiles one column of pieces holds, one below the other, in the chunk's 64
  /// rows.
  __device__ int slices_down() const { return 1 << (piece_bits - kSliceRowBits); }
  /// Byte `offset` of a tile.
  __device__ char* tile(const NearRows& rows, int slice, int sub_chunk, int offset) const {
    const int down = piece_bits - kSliceRowBits;
    const int first = ((slice & (slices_down() - 1)) * kSubChunks + sub_chunk)
                      << (kTileBits - piece_bits);
    return rows.row(first + (offset >> piece_bits)) + (slice >> down << piece_bits) +
           (offset & ((1 << piece_bits) - 1));
  }
  __device__ float* slice_decays(int chunk, int head, int slice) const {
    return decays + ((chunk * heads + head) * key_slices + slice) * kSliceDecays;
  }
  __device__ uint4* sub_chunk_scores(int chunk, int head, int sub_chunk) const {
    return scores + ((chunk * heads + head) * kSubChunks + sub_chunk) * (kTileBytes / 16);
  }
};

/// What chunk_factors_kernel and chunk_backward_kernel are told.
struct ChunkBackward {
  GlaBackwardParams backward = {};
  HeadSeries tensors[kChunkTensors] = {};
  TimeTiles chunks = {};
  ChunkFactors factors = {};
  ChunkStates states = {};     // at every chunk's start
  ChunkStates gradients = {};  // of the state at every chunk's end
};

/// Rows behind a row of a RowTile of 64 columns each: the 16 bytes by which that is longer.
struct SpacedRows : NearRows {
  char columns[kChunk * 2];
};

/// Where the chunk's rows lie, found once for the whole block of threads: lane i of the first warp
/// finds those of tensor i.
struct ChunkRows {
  SpacedRows q, k, v, gate, d_o, dq, dk, dv, dgate;
  SpacedRows factors[kFactorSides];
  int tokens;  // of the chunk; 0: nothing to do

  __device__ void find(const ChunkBackward& a, int chunk, int head, int lane) {
    if (lane >= int{kChunkTensors} + int{kFactorSides}) {
      return;
    }
    const TimeTile tile = find_time_tile(a.chunks, chunk);
    const bool backwards = a.chunks.layout.reverse;
    if (lane < kChunkTensors) {
      static_cast<NearRows&>((&q)[lane]) =
          NearRows(HeadRows(a.tensors[lane], tile.sequence, backwards, head), tile.first);
    } else {
      const auto side = static_cast<FactorSide>(lane - kChunkTensors);
      static_cast<NearRows&>(factors[side]) =
          a.factors.rows(side, tile.sequence, backwards, head).of_chunk(tile.first, tile.tokens);
    }
    if (lane == 0) {
      tokens = tile.exists() ? tile.tokens : 0;
    }
  }
};
static_assert(sizeof(ChunkRows) ==  // in the order of ChunkTensor
              (int{kChunkTensors} + int{kFactorSides}) * sizeof(SpacedRows) + alignof(SpacedRows));

/// A chunk, a head, and this thread's place in the block of threads.
struct ChunkPlace {
  int chunk, head;
  const ChunkRows& rows;
  int tokens;
  int lane, warp, warps;
  int key_slices, value_slices;

  __device__ ChunkPlace(const GlaParams& p, int chunk, int head, const ChunkRows& rows)
      : chunk(chunk),
        head(head),
        rows(rows),
        tokens(rows.tokens),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        warps(static_cast<int>(blockDim.x) / 32),
        key_slices(static_cast<int>(p.key_dim) / kSlice),
        value_slices(static_cast<int>(p.value_dim) / kSlice) {}
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
