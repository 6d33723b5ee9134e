#pragma once

// Tiles of 16-bit elements in shared memory, and how a warp reads operands of mma from them.
//
// A row is kColumns elements, in pieces of 16 bytes whose order within the row is permuted so that
// eight rows' pieces of one column lie in different banks: ldmatrix, in either orientation, and the
// stores of accumulators then have no conflicts.

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::attention {

template <class T>
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, __half>) {
    mma_f16(d, a, b0, b1);
  } else {
    mma_bf16(d, a, b0, b1);
  }
}

template <class T>
__device__ inline uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    return pack_f16(low, high);
  } else {
    return pack_bf16(low, high);
  }
}

/// Where the elements of a tile lie, in bytes.
template <int kColumns>
struct Tile16Bit {
  static_assert(kColumns % 32 == 0);
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kPieces = kColumns / 8;
  static constexpr __host__ __device__ int bytes(int rows) { return rows * kRowBytes; }

  /// What is xored onto the numbers of a row's pieces.
  static __device__ int permutation(int row) { return kPieces % 8 == 0 ? row & 7 : (row >> 1) & 3; }
  /// Bytes from the tile's start.
  static __device__ int offset(int row, int piece) {
    return row * kRowBytes + ((piece ^ permutation(row)) << 4);
  }
};

/// A lane's row and permuted piece of the operands that start at row 0 of a tile; any other start
/// (a multiple of 16 rows and of 16 columns) is reached by at(). There are four operands, in two
/// orders of the four 8 x 8 matrices that ldmatrix takes at once.
template <int kColumns>
class OperandReader {
 public:
  using Tile = Tile16Bit<kColumns>;

  /// A of 16 rows x 16 inner: rows of the tile are rows of A.
  static __device__ OperandReader a(unsigned tile, int lane) {
    return {tile, lane & 15, lane >> 4};
  }
  /// A of 16 x 16: columns of the tile are rows of A (take transposed()).
  static __device__ OperandReader a_transposed(unsigned tile, int lane) {
    return {tile, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1};
  }
  /// Two B of 16 inner x 8 columns: rows of the tile are columns of B. [0..1], [2..3].
  static __device__ OperandReader b(unsigned tile, int lane) {
    return {tile, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1};
  }
  /// Two B of 16 inner x 8 columns: rows of the tile are the inner index (take transposed()).
  static __device__ OperandReader b_transposed(unsigned tile, int lane) {
    return {tile, lane & 15, lane >> 4};
  }

  /// Loads the operand that begins at row `row` and column 16 * `step`.
  __device__ void load(uint32_t (&m)[4], int row, int step) const {
    load_matrices(m, at(row, step));
  }
  __device__ void transposed(uint32_t (&m)[4], int row, int step) const {
    load_matrices_transposed(m, at(row, step));
  }
  /// A reader from column 16 * `step` on, of which `kSteps` steps will be read; `step` is a
  /// multiple of that.
  template <int kSteps>
  __device__ OperandReader from_step(int step) const {
    OperandReader r = *this;
    if constexpr (kGroup % kSteps == 0) {
      r.base_ += step / kGroup * (kGroup * 32);
      r.lane_ ^= step % kGroup * 32;
    } else if constexpr (kSteps % kGroup == 0) {
      r.base_ += step * 32;
    } else {
      r.first_ = step;
    }
    return r;
  }

 private:
  // Steps within a permuted group of pieces are xored, groups are added.
  static constexpr int kGroup = Tile::kPieces % 8 == 0 ? 4 : 2;

  __device__ OperandReader(unsigned tile, int row, int half)
      : base_(tile + row * Tile::kRowBytes), lane_((half ^ Tile::permutation(row)) << 4) {}

  __device__ unsigned at(int row, int step) const {
    step += first_;
    return base_ + (lane_ ^ (step % kGroup * 32)) + step / kGroup * (kGroup * 32) +
           row * Tile::kRowBytes;
  }

  unsigned base_;
  int lane_;
  int first_ = 0;
};

/// An A that is kept in registers, as OperandReader::a reads it.
template <int kRowTiles, int kSteps>
struct RegisterOperand {
  uint32_t x[kSteps][kRowTiles][4];

  template <class Tile>
  __device__ __forceinline__ void fill(const Tile& tile) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        tile.load(x[step][i], 16 * i, step);
      }
    }
  }
  __device__ __forceinline__ void load(uint32_t (&m)[4], int row, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      m[i] = x[step][row / 16][i];
    }
  }
};

/// What the sums of a product start from, the same in a lane's row 8 i + lane / 4, however many
/// columns: zero, or given values.
struct FromZero {
  __device__ float operator()(int) const { return 0; }
};
template <int kCount>
struct FromRows {
  float x[kCount];
  __device__ float operator()(int i) const { return x[i]; }
};

/// Nothing to do between the steps of a product.
struct Nothing {
  __device__ void operator()(int) const {}
};

/// d += A B for 16 * kRowTiles rows, 8 * kColumnTiles columns and 16 * kSteps inner, with operands
/// read from tiles, transposed or not (see OperandReader). `between(i)`, i < kSteps, is done
/// after the products of step i have been issued. With kFresh, d starts from `start`.
template <class T, bool kTransposedA, bool kTransposedB, int kSteps, bool kFresh, int kRowTiles,
          int kColumnTiles, class TileA, class TileB, class Between = Nothing,
          class Start = FromZero>
__device__ __forceinline__ void multiply(float (&d)[kRowTiles][kColumnTiles][4], const TileA& a,
                                         const TileB& b, const Between& between = {},
                                         const Start& start = {}) {
  static_assert(kColumnTiles % 2 == 0);
  constexpr int kPairs = kColumnTiles / 2;
  uint32_t x[2][kRowTiles][4], y[2][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if constexpr (kTransposedA) {
        a.transposed(x[step % 2][i], 16 * step, i);
      } else {
        a.load(x[step % 2][i], 16 * i, step);
      }
    }
  };
  const auto load_b = [&](int at) {
    if constexpr (kTransposedB) {
      b.transposed(y[at % 2], at / kPairs * 16, at % kPairs);
    } else {
      b.load(y[at % 2], at % kPairs * 16, at / kPairs);
    }
  };
  load_a(0);
  load_b(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int at = step * kPairs + pair;
      if (at + 1 < kSteps * kPairs) {
        load_b(at + 1);
      }
      if (pair == kPairs / 2 && step + 1 < kSteps) {
        load_a(step + 1);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          float (&sum)[4] = d[i][2 * pair + half];
          if (kFresh && step == 0) {
            sum[0] = sum[1] = start(2 * i);
            sum[2] = sum[3] = start(2 * i + 1);
          }
          mma<T>(sum, x[step % 2][i], y[at % 2][2 * half], y[at % 2][2 * half + 1]);
        }
      }
    }
    between(step);
  }
}

/// Copies kRows rows of a matrix in device memory into a tile, asynchronously; rows from `limit`
/// on, and pieces from `pieces` on, become zeros. All kThreads threads of the block take part.
template <int kColumns, int kRows, int kThreads>
__device__ __forceinline__ void load_tile(unsigned tile, const char* global, int row_bytes,
                                          int limit, int pieces, int thread) {
  constexpr int kPieces = Tile16Bit<kColumns>::kPieces;
  constexpr int kCopies = kRows * kPieces / kThreads;
  static_assert(kRows * kPieces % kThreads == 0);
  constexpr int kStep = kThreads / kPieces;  // rows from a thread's copy to its next
  if constexpr (kThreads % kPieces == 0 && kStep % 8 == 0) {
    if (limit >= kRows && pieces == kPieces) {  // as most are: few instructions
      const int row = thread / kPieces, piece = thread % kPieces;
      const unsigned to = tile + Tile16Bit<kColumns>::offset(row, piece);
      const char* from = global + static_cast<int64_t>(row) * row_bytes + piece * 16;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        copy_async_16(to + i * kStep * Tile16Bit<kColumns>::kRowBytes, from);
        from += static_cast<int64_t>(kStep) * row_bytes;
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int at = thread + i * kThreads;
    const int row = at / kPieces, piece = at % kPieces;
    copy_async_or_zero(tile + Tile16Bit<kColumns>::offset(row, piece),
                       global + static_cast<int64_t>(row) * row_bytes + piece * 16,
                       row < limit && piece < pieces);
  }
}

/// What load_tile does, copy by copy, so that the copies may stand between other instructions:
/// copies [0, kCopies).
template <int kColumns, int kRows, int kThreads>
class TileCopies {
  using Tile = Tile16Bit<kColumns>;
  static constexpr int kStep = kThreads / Tile::kPieces;  // rows from a copy to the next

 public:
  static constexpr int kCopies = kRows * Tile::kPieces / kThreads;
  static constexpr bool kPossible = kThreads % Tile::kPieces == 0 && kStep % 8 == 0;

  __device__ TileCopies(unsigned tile, const char* global, int row_bytes, int limit, int pieces,
                        int thread) {
    const int row = thread / Tile::kPieces, piece = thread % Tile::kPieces;
    to_ = tile + Tile::offset(row, piece);
    from_ = global + static_cast<int64_t>(row) * row_bytes + piece * 16;
    step_bytes_ = int64_t{kStep} * row_bytes;
    limit_ = piece < pieces ? limit - row : 0;
  }
  __device__ __forceinline__ void copy(int i) const {
    copy_async_or_zero(to_ + i * kStep * Tile::kRowBytes, from_ + i * step_bytes_,
                       i * kStep < limit_);
  }

 private:
  unsigned to_;
  const char* from_;
  int64_t step_bytes_;
  int limit_;
};

/// The way back: rows below `limit`, pieces below `pieces`.
template <int kColumns, int kRows, int kThreads>
__device__ __forceinline__ void store_tile(char* global, int row_bytes, const unsigned char* tile,
                                           int limit, int pieces, int thread) {
  constexpr int kPieces = Tile16Bit<kColumns>::kPieces;
#pragma unroll 4
  for (int at = thread; at < kRows * kPieces; at += kThreads) {
    const int row = at / kPieces, piece = at % kPieces;
    if (row < limit && piece < pieces) {
      *reinterpret_cast<uint4*>(global + static_cast<int64_t>(row) * row_bytes + piece * 16) =
          *reinterpret_cast<const uint4*>(tile + Tile16Bit<kColumns>::offset(row, piece));
    }
  }
}

}  // namespace tidegate::kernels::attention
