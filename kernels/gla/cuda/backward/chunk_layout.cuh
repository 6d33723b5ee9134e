#pragma once

// How the backward pass lays out a chunk of 64 tokens: tiles of operands, in shared and in device
// memory alike, states at chunk boundaries, and the factors that the passes hand on.

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
/// mma_bf16 whose rows are tokens, lane 4r + c then holds tokens 2r and 2r + 1, as dyadic.cuh wants
/// them. Where tokens are its columns, column 8n + 2c + e is token 4c + 2e + n: a lane holds four
/// neighbours. Counted from the chunk's start.
__device__ inline int token_of_row(int row) {
  return (row & ~(kSubChunk - 1)) + ((row & 7) << 1) + (row >> 3 & 1);
}

/// The columns of a K-slice are its channels, the even ones first: where channels are the rows of
/// an accumulator, lane 4r + c holds channels 2r and 2r + 1.
__device__ inline int channel_of_column(int column) { return column % 8 * 2 + column / 8; }

/// A tile: 16 tokens x 16 channels of bf16 in 512 bytes, first columns 0 to 7 of all rows, then
/// columns 8 to 15. It is laid out alike in device and in shared memory.
constexpr int kTileBits = 9, kTileBytes = 1 << kTileBits;
static_assert(kTileBytes == kSubChunk * kSlice * 2);
constexpr int kSliceRowBits = 5, kSliceRowBytes = 1 << kSliceRowBits;  // of one token
static_assert(kSliceRowBits + 4 == kTileBits);

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

/// Calls visit(row, token, column) for each group of eight columns that this one of a block's
/// threads copies.
template <class Visit>
__device__ inline void for_each_pack(int columns, int threads, Visit visit) {
  const int packs = columns / 8, shift = 32 - __clz(packs - 1);
  const auto thread = static_cast<int>(threadIdx.x);
  const int pack = thread & ((1 << shift) - 1), step = threads >> shift;
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
                                       int column0, int columns, int threads) {
  const NearRows from(rows.base + column0 * 2, rows.stride);
  if (tokens == kChunk) {
    for_each_pack(columns, threads, [&](int row, int token, int column) {
      copy_async<16>(tile.at(row, column), from.row(token) + column * 2);
    });
  } else {
    for_each_pack(columns, threads, [&](int row, int token, int column) {
      copy_async_or_zero(tile.at(row, column), from.row(min(token, tokens - 1)) + column * 2,
                         token < tokens);
    });
  }
}

/// Activates what copy_rows_async brought and makes it bf16, each thread its own share. Called once
/// the thread's copies have arrived.
template <class T>
__device__ inline void finish_rows(const RowTile& tile, InputActivation activation, int tokens,
                                   int columns, int threads) {
  if (std::is_same_v<T, __nv_bfloat16> && activation == InputActivation::kNone) {
    return;
  }
  for_each_pack(columns, threads, [&](int row, int token, int column) {
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
/// tile (f16 has three more bits than bf16, which rowsum(S * D) needs, and too small a range
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
    const int divisor = key_slices & -key_slices;
    return kSliceRowBits + (divisor >= 2) + (divisor >= 4) + (divisor >= 8) + (divisor >= 16);
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

}  // namespace tidegate::kernels::gla
