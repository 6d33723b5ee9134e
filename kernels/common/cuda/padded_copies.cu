// The kernel of padded_copies.h. A block of threads has some rows of one copy, a thread two
// neighbouring elements of several of them, which it asks for before it writes any: of 16-bit
// numbers a warp then reads and writes whole lines, whatever their rows' alignment is.

#include "kernels/common/cuda/padded_copies.h"

#include <limits>

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/integers.h"

namespace tidegate::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsAtOnce = 4;  // of a thread

/// A copy, and what its blocks of threads are told beside it.
struct CopyWork {
  PaddedCopy copy;
  int first_block;                // of the grid's
  int pairs;                      // of elements, of a row; at most kThreads
  int rows;                       // in all
  bool aligned_from, aligned_to;  // pairs
};

struct Work {
  CopyWork of[PaddedCopies::kMost];
  int count;
};

struct RowPlace {
  int i, j, r;
};

__device__ inline RowPlace find_row(const PaddedCopy& copy, int row) {
  const int rows = static_cast<int>(copy.sizes[2]), middle = static_cast<int>(copy.sizes[1]);
  const int above = row / rows;
  return {above / middle, above % middle, row % rows};
}

__device__ inline int64_t offset_of(const int64_t (&strides)[3], const RowPlace& at) {
  return at.i * strides[0] + at.j * strides[1] + at.r * strides[2];
}

/// Two elements in one access.
template <class Bits>
struct PairOf;
template <>
struct PairOf<uint16_t> {
  using type = ushort2;
};
template <>
struct PairOf<uint32_t> {
  using type = uint2;
};

template <class Bits>
__device__ inline void copy_rows(const CopyWork& work, int first_row, int column) {
  using Pair = typename PairOf<Bits>::type;
  const PaddedCopy& copy = work.copy;
  const auto fill = static_cast<Bits>(copy.fill);
  const int step = kThreads / work.pairs;
  Pair x[kRowsAtOnce];
#pragma unroll
  for (int n = 0; n < kRowsAtOnce; ++n) {
    const int row = first_row + n * step;
    x[n].x = x[n].y = fill;
    if (row >= work.rows) {
      continue;
    }
    const RowPlace at = find_row(copy, row);
    const Bits* from =
        static_cast<const Bits*>(copy.from) + offset_of(copy.from_strides, at) + column;
    if (at.r >= copy.from_rows || column >= copy.from_width) {
      continue;
    }
    if (work.aligned_from && column + 1 < copy.from_width) {
      x[n] = *reinterpret_cast<const Pair*>(from);
    } else {
      x[n].x = from[0];
      x[n].y = column + 1 < copy.from_width ? from[1] : fill;
    }
  }
#pragma unroll
  for (int n = 0; n < kRowsAtOnce; ++n) {
    const int row = first_row + n * step;
    if (row >= work.rows) {
      continue;
    }
    Bits* to =
        static_cast<Bits*>(copy.to) + offset_of(copy.to_strides, find_row(copy, row)) + column;
    if (work.aligned_to && column + 1 < copy.to_width) {
      *reinterpret_cast<Pair*>(to) = x[n];
    } else {
      to[0] = x[n].x;
      if (column + 1 < copy.to_width) {
        to[1] = x[n].y;
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) copy_padded_kernel(const __grid_constant__ Work all) {
  int which = 0;
  while (which + 1 < all.count && all.of[which + 1].first_block <= static_cast<int>(blockIdx.x)) {
    ++which;
  }
  const CopyWork& work = all.of[which];
  const int thread = static_cast<int>(threadIdx.x), step = kThreads / work.pairs;
  if (thread >= step * work.pairs) {
    return;
  }
  const int block = static_cast<int>(blockIdx.x) - work.first_block;
  const int first_row = block * step * kRowsAtOnce + thread / work.pairs;
  const int column = thread % work.pairs * 2;
  work.copy.element_bytes == 2 ? copy_rows<uint16_t>(work, first_row, column)
                               : copy_rows<uint32_t>(work, first_row, column);
}

bool in_pairs(const void* data, const int64_t (&strides)[3], int element_bytes) {
  return is_aligned(data, 2 * element_bytes) && strides[0] % 2 == 0 && strides[1] % 2 == 0 &&
         strides[2] % 2 == 0;
}

}  // namespace

cudaError_t copy_padded(const PaddedCopies& copies, cudaStream_t stream) {
  Work all = {};
  int64_t blocks = 0;
  for (int n = 0; n < copies.count; ++n) {
    const PaddedCopy& copy = copies.copies[n];
    const int64_t rows = copy.sizes[0] * copy.sizes[1] * copy.sizes[2];
    const int64_t pairs = ceil_div(copy.to_width, int64_t{2});
    if (rows == 0 || pairs == 0) {
      continue;
    }
    constexpr int64_t kMostRows = std::numeric_limits<int>::max() - kThreads * kRowsAtOnce;
    if (pairs > kThreads || rows > kMostRows) {
      return cudaErrorInvalidValue;
    }
    all.of[all.count++] = {copy,
                           static_cast<int>(blocks),
                           static_cast<int>(pairs),
                           static_cast<int>(rows),
                           in_pairs(copy.from, copy.from_strides, copy.element_bytes),
                           in_pairs(copy.to, copy.to_strides, copy.element_bytes)};
    blocks += ceil_div(rows, kThreads / pairs * kRowsAtOnce);
  }
  return launch_unless_empty(&copy_padded_kernel, blocks, dim3(kThreads), 0, stream, all);
}

}  // namespace tidegate::kernels
