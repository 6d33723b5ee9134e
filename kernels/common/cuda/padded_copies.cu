// The kernel of padded_copies.h. A block of threads has a part of one copy. A word is as long as
// both tensors' rows allow, 16 bytes or fewer: one element where a row has an odd number of them.
//
// Where `to` lies in memory without gaps and rows of `from` are equally far apart, which is what
// ops ask for, a thread gathers 16 bytes of `to` from the words of which they consist, across the
// ends of rows, and writes them at once. Else it copies the same word of several rows, all of which
// it asks for before it writes any.

#include "kernels/common/cuda/padded_copies.h"

#include <cstring>
#include <limits>

#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/integers.h"

namespace tidegate::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 4;

/// Rows of which a thread asks for a word at once: as many as make 32 to 64 bytes.
__host__ __device__ constexpr int rows_at_once(int word_bytes) {
  return word_bytes == 16 ? 4 : word_bytes == 8 ? 8 : 16;
}

/// A copy, and what its blocks of threads are told beside it; strides and widths in words.
struct CopyWork {
  PaddedCopy copy;
  int word_bytes;
  int words;        // of a row of `to`; at most kThreads
  int first_block;  // of the grid's
  int rows;         // in all
  bool even_rows;   // all rows of both tensors are equally far apart
  bool gathered;    // even_rows, and `to` has no gaps
};

struct Work {
  CopyWork of[PaddedCopies::kMost];
  int count;
};

/// Where a row of both tensors begins, in words.
struct RowPlace {
  int64_t from, to;
  bool exists;  // in `from`

  __device__ RowPlace(const CopyWork& work, int row) {
    const PaddedCopy& copy = work.copy;
    if (work.even_rows) {
      from = row * copy.from_strides[2];
      to = row * copy.to_strides[2];
      exists = true;
      return;
    }
    const int rows = static_cast<int>(copy.sizes[2]), middle = static_cast<int>(copy.sizes[1]);
    const int above = row / rows, r = row - above * rows;
    const int i = above / middle, j = above - i * middle;
    from = i * copy.from_strides[0] + j * copy.from_strides[1] + r * copy.from_strides[2];
    to = i * copy.to_strides[0] + j * copy.to_strides[1] + r * copy.to_strides[2];
    exists = r < copy.from_rows;
  }
};

__device__ inline void fill_word(uint16_t& word, uint32_t fill) {
  word = static_cast<uint16_t>(fill);
}
__device__ inline void fill_word(uint32_t& word, uint32_t fill) { word = fill; }
__device__ inline void fill_word(uint2& word, uint32_t fill) { word = {fill, fill}; }
__device__ inline void fill_word(uint4& word, uint32_t fill) { word = {fill, fill, fill, fill}; }

template <class Word>
__device__ inline void copy_rows(const CopyWork& work, int first_row, int column) {
  constexpr int kRows = rows_at_once(sizeof(Word));
  const PaddedCopy& copy = work.copy;
  const int step = kThreads / work.words;
  const bool in_row = column < copy.from_width;
  const auto* const from = static_cast<const Word*>(copy.from) + column;
  auto* const to = static_cast<Word*>(copy.to) + column;
  Word x[kRows];
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    fill_word(x[n], copy.fill);
    if (const int row = first_row + n * step; in_row && row < work.rows) {
      const RowPlace place(work, row);
      if (place.exists) {
        x[n] = from[place.from];
      }
    }
  }
  // Places are found again: to keep them would take more registers than the loads do.
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    if (const int row = first_row + n * step; row < work.rows) {
      to[RowPlace(work, row).to] = x[n];
    }
  }
}

// A thread's packs of 16 bytes, all of whose words it asks for before it writes any.
constexpr int kPacks = 2;

/// Words of `to` that a block gathers.
__host__ __device__ constexpr int gathered_words(int word_bytes) {
  return kThreads * kPacks * (16 / word_bytes);
}

template <class Word>
__device__ inline void gather_packs(const CopyWork& work, int block) {
  constexpr int kWords = 16 / sizeof(Word);  // of a pack
  const PaddedCopy& copy = work.copy;
  const int words = work.rows * work.words;  // in all
  const int first = block * gathered_words(sizeof(Word)) + static_cast<int>(threadIdx.x) * kWords;
  Word x[kPacks][kWords];
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int at = first + n * kThreads * kWords;
    const int row = at / work.words;
    int column = at - row * work.words;
    const auto* from = static_cast<const Word*>(copy.from) + row * copy.from_strides[2];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      fill_word(x[n][i], copy.fill);
      if (at + i < words && column < copy.from_width) {
        x[n][i] = from[column];
      }
      if (++column == work.words) {
        column = 0;
        from += copy.from_strides[2];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int at = first + n * kThreads * kWords;
    auto* const to = static_cast<Word*>(copy.to) + at;
    if (at + kWords <= words) {
      uint4 pack;
      std::memcpy(&pack, x[n], sizeof pack);
      *reinterpret_cast<uint4*>(to) = pack;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (at + i < words) {
          to[i] = x[n][i];
        }
      }
    }
  }
}

/// Calls visit.operator()<Word>() with the word of so many bytes.
template <class Visit>
__device__ inline void with_word(int bytes, Visit visit) {
  switch (bytes) {
    case 16:
      return visit.template operator()<uint4>();
    case 8:
      return visit.template operator()<uint2>();
    case 4:
      return visit.template operator()<uint32_t>();
    default:
      return visit.template operator()<uint16_t>();
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    copy_padded_kernel(const __grid_constant__ Work all) {
  wait_for_kernels_before();
  let_next_kernel_begin();
  int which = 0;
  while (which + 1 < all.count && all.of[which + 1].first_block <= static_cast<int>(blockIdx.x)) {
    ++which;
  }
  const CopyWork& work = all.of[which];
  const int block = static_cast<int>(blockIdx.x) - work.first_block;
  if (work.gathered) {
    with_word(work.word_bytes, [&]<class Word>() { gather_packs<Word>(work, block); });
    return;
  }
  const int thread = static_cast<int>(threadIdx.x), step = kThreads / work.words;
  if (thread >= step * work.words) {
    return;
  }
  const int row = block * step * rows_at_once(work.word_bytes) + thread / work.words;
  with_word(work.word_bytes,
            [&]<class Word>() { copy_rows<Word>(work, row, thread % work.words); });
}

/// The longest word in which rows of both tensors are whole, and aligned.
int longest_word(const PaddedCopy& copy) {
  uint64_t bits =
      16 | reinterpret_cast<uintptr_t>(copy.from) | reinterpret_cast<uintptr_t>(copy.to);
  const auto add = [&](int64_t elements) {
    bits |= static_cast<uint64_t>(elements * copy.element_bytes);
  };
  for (int d = 0; d < 3; ++d) {
    add(copy.from_strides[d]);
    add(copy.to_strides[d]);
  }
  add(copy.from_width);
  add(copy.to_width);
  return static_cast<int>(bits & (~bits + 1));  // the lowest bit
}

bool rows_are_even(const int64_t (&sizes)[3], const int64_t (&strides)[3]) {
  return (sizes[1] == 1 || strides[1] == sizes[2] * strides[2]) &&
         (sizes[0] == 1 || strides[0] == sizes[1] * sizes[2] * strides[2]);
}

CopyWork in_words(PaddedCopy copy) {
  CopyWork work = {};
  work.word_bytes = longest_word(copy);
  work.rows = static_cast<int>(copy.sizes[0] * copy.sizes[1] * copy.sizes[2]);
  work.even_rows = copy.from_rows >= copy.sizes[2] &&
                   rows_are_even(copy.sizes, copy.from_strides) &&
                   rows_are_even(copy.sizes, copy.to_strides);
  const int elements = work.word_bytes / copy.element_bytes;
  for (int d = 0; d < 3; ++d) {
    copy.from_strides[d] /= elements;
    copy.to_strides[d] /= elements;
  }
  copy.from_width /= elements;
  copy.to_width /= elements;
  copy.fill = copy.element_bytes == 2 && elements > 1 ? copy.fill * 0x10001u : copy.fill;
  work.words = static_cast<int>(copy.to_width);
  const int64_t words = int64_t{work.rows} * work.words;
  work.gathered = work.even_rows && copy.to_strides[2] == copy.to_width &&
                  is_aligned(copy.to, 16) &&
                  words <= std::numeric_limits<int>::max() - gathered_words(2);
  work.copy = copy;
  return work;
}

}  // namespace

cudaError_t copy_padded(const PaddedCopies& copies, cudaStream_t stream) {
  Work all = {};
  int64_t blocks = 0;
  for (int n = 0; n < copies.count; ++n) {
    const PaddedCopy& copy = copies.copies[n];
    const int64_t rows = copy.sizes[0] * copy.sizes[1] * copy.sizes[2];
    if (rows == 0 || copy.to_width == 0) {
      continue;
    }
    constexpr int64_t kMostRows = std::numeric_limits<int>::max() - 16 * kThreads;
    if (copy.to_width > kThreads || rows > kMostRows) {
      return cudaErrorInvalidValue;
    }
    CopyWork& work = all.of[all.count++] = in_words(copy);
    work.first_block = static_cast<int>(blocks);
    blocks += work.gathered ? ceil_div(rows * work.words, gathered_words(work.word_bytes))
                            : ceil_div(rows, kThreads / work.words * rows_at_once(work.word_bytes));
  }
  return launch_early<&copy_padded_kernel>(blocks, dim3(kThreads), 0, stream, all);
}

}  // namespace tidegate::kernels
