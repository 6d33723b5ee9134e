#pragma once

// How the tensor-core kernels lay out a chunk of 64 tokens in shared memory, and states in device
// memory.

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/common/cuda/mma.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/gla/cuda/gates.cuh"
#include "kernels/gla/cuda/head_rows.cuh"

namespace tidegate::kernels::gla {

constexpr int kChunk = 64;
constexpr int kBlock = 16;  // tokens of a block, channels of a slice, columns of a value slice
constexpr int kBlocks = kChunk / kBlock;
constexpr int kMaxSlices = 16;  // of channels, one a warp

/// In tiles and rows, a block's even tokens come first, then its odd ones: in an accumulator of
/// mma_bf16, lane 4r + c then holds tokens 2r and 2r + 1, as dyadic.cuh wants them. Counted from
/// the chunk's start.
__device__ inline int token_of_row(int row) {
  return (row & ~(kBlock - 1)) + ((row & 7) << 1) + (row >> 3 & 1);
}

/// The columns of a slice are its channels in the order in which lanes hold them: lane 4r + c has
/// channels 4c .. 4c+3 of its tokens, of which 4c + 2n + e is column 8n + 2c + e. (Columns 2c,
/// 2c+1, 2c+8 and 2c+9 are what it has of two accumulators.)
__device__ inline int channel_of_column(int column) {
  return column % 8 / 2 * 4 + column / 8 * 2 + column % 2;
}

/// A tile: 16 tokens x 16 channels of bf16 in 512 bytes, first columns 0 to 7 of all rows, then 8
/// to
/// 15. In memory as in shared memory.
constexpr int kTileBits = 9, kTileBytes = 1 << kTileBits;
static_assert(kTileBytes == kBlock * kBlock * 2);
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

/// One of a walk's rows and those after it, cheap to step through: rows are less than 2^31 bytes
/// apart (see gla_unsupported).
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

/// States at chunk boundaries, in bf16: [slot][head][K / 16][V / 16][lane], the 16 bytes of a lane
/// as it needs them for two B of (values x slice): {x, y} of the slice's columns 0-7, {z, w} of
/// 8-15. As {x, z, y, w} they are A of (slice x values).
struct ChunkStates {
  uint4* data = nullptr;
  int64_t heads = 0;
  int key_slices = 0, value_slices = 0;

  __device__ uint4* tile(int64_t slot, int64_t head, int key_slice, int value_slice) const {
    return data + (((slot * heads + head) * key_slices + key_slice) * value_slices + value_slice) *
                      int64_t{32};
  }
};

/// Two elements of type T in a register.
template <class T>
__device__ inline float2 unpack_pair(uint32_t bits) {
  const Pack<T, 2> both = {bits};
  return {both.get(0), both.get(1)};
}

}  // namespace tidegate::kernels::gla
