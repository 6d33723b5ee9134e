#pragma once

// A matrix of up to 512 columns that stays in the registers of eight blocks as operands of the
// tensor cores, and its product with a few vectors that change from step to step. The interface is
// FmaMatrix's.
//
// Precision: that of float. A float, scaled by a power of two, is the sum of two f16 numbers, each
// rounded, to 2^-24 of it; below 2^-16 of the largest number of its row (of the matrix) or group
// (of a vector: 32 channels) this becomes 2^-38 of that largest number. One of the four products of
// two such sums, that of the two rests, is left out: it is below 2^-24 of the whole. Products are
// exact, and their sums are floats. A matrix of 16-bit numbers is one f16 number an element, not
// two.
//
// A block owns 64 rows. Each of its 16 warps multiplies half of them by 64 columns, or all of them
// by 32, as soon as the values of this part have come: the exchange (state_exchange.cuh) has a
// barrier for every block that sends. Fewer columns mean less to receive, fewer rows fewer sums.
// Columns of the small product are vectors: up to 8, of which kVectors count. The warps' sums meet
// in shared memory, where after one __syncthreads a step the threads that own the elements add them
// up, always in one order. The sums are double-buffered, as the vectors are. Warps that own no
// elements do nothing but multiply.

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/cuda/warp.cuh"
#include "kernels/rnn/cuda/on_chip/state_exchange.cuh"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels::rnn {

template <class Tile>
class MmaMatrix;

/// A tile says how many vectors there are, of how many f16 numbers an element of the matrix is the
/// sum, how many warps share columns, and how blocks exchange the vectors.
template <int kVectors, int kTerms_, int kSplit, template <class> class ExchangeOf>
struct MmaTile : MmaShape<kVectors, kSplit> {
  using Shape = MmaShape<kVectors, kSplit>;
  using Matrix = MmaMatrix<MmaTile>;
  using Exchange = ExchangeOf<Shape>;
  static constexpr int kTerms = kTerms_;
  static constexpr bool kNeedsClusters = Exchange::kNeedsClusters;
  static constexpr int kOwn = 1;
  static constexpr bool kLoadsAhead = false;              // a step is longer than a load
  static constexpr int kRows = Shape::kOutputs / kSplit;  // of a warp
  static constexpr int kRowTiles = kRows / 16;
  static constexpr int kTiles = kRowTiles * Shape::kSteps;

  static constexpr int kSumRow = Shape::kOutputs + 4;  // neighbours start in other banks
  static constexpr int kSums = Shape::kParts * kVectors * kSumRow;
  static constexpr int kNeededBytes = 2 * kSums * 4 + Shape::kOutputs * 4 + Exchange::kSharedBytes;
  /// In clusters more than half of a multiprocessor's: two blocks on one would take turns while
  /// others idle.
  static constexpr int kSharedBytes =
      kNeedsClusters && kNeededBytes < 120 * 1024 ? 120 * 1024 : kNeededBytes;

  static_assert(kVectors <= 8, "one column of a product each");
  static_assert(kRows % 32 == 0, "sums are kept by 32 rows");
};

/// A power of two by which numbers become fit for f16, the largest of them between 2^13 and 2^14,
/// and its inverse. Infinite numbers and NaN stay what they are.
struct Scale {
  float factor, inverse;

  __device__ explicit Scale(float largest) {
    const int bits = static_cast<int>(__float_as_uint(largest) >> 23);
    const int exponent = bits == 255 ? 140 : max(bits, 14);
    factor = __int_as_float((267 - exponent) << 23);
    inverse = __int_as_float((exponent - 13) << 23);
  }
};

/// The largest magnitude in the warp, NaN if there is one.
__device__ inline float warp_largest(float value) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(fabsf(value))));
}

/// A pair of floats as f16, the first one in the lower half; what is left of them stays.
__device__ inline uint32_t take_f16(float& low, float& high) {
  const uint32_t pair = pack_f16(low, high);
  low -= __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
  high -= __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  return pair;
}

/// The sum of kCount numbers, neighbours first.
template <int kCount>
__device__ inline float sum_of(const float* values) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    return sum_of<kCount / 2>(values) + sum_of<kCount / 2>(values + kCount / 2);
  }
}

template <class Tile>
class MmaMatrix {
 public:
  /// Holds p.w or its transpose. Called by all threads.
  __device__ MmaMatrix(const GatedRnnParams& p, bool transposed, void* shared)
      : sums_(static_cast<float*>(shared)),
        thread_(fresh_thread_index()),
        lane_(thread_ % 32),
        padded_dim_((static_cast<int>(p.channels) + 3) / 4 * 4),
        exchange_(p, sums_ + 2 * Tile::kSums + Tile::kOutputs, padded_dim_, vector_of(0), own_row(),
                  lane_) {
    for (int i = thread_; i < 2 * Tile::kSums; i += Tile::kThreads) sums_[i] = 0.0f;
    load_matrix(p, transposed, sums_ + 2 * Tile::kSums);
    has_columns_ = part() * Tile::kPart < padded_dim_;
  }

  /// The element that this thread owns: of which vector, and its channel. Both may lie past the
  /// last.
  __device__ int vector_of(int) const { return thread_ / Tile::kOutputs; }
  __device__ int channel_of(int) const { return exchange_.rank() * Tile::kOutputs + own_row(); }
  __device__ bool is_first() const { return true; }

  /// A block that owns no channel has no part in the products: nobody waits for it.
  __device__ bool takes_part() const { return exchange_.rank() * Tile::kOutputs < padded_dim_; }
  /// Whether this thread, and its warp, owns elements: the others only multiply.
  __device__ bool owns() const { return vector_of(0) < Tile::kVectors; }

  /// Does what FmaMatrix::multiply does.
  template <class Meanwhile>
  __device__ void multiply(const float (&values)[1], float (&products)[1], Meanwhile meanwhile) {
    if (owns()) {
      send(values[0]);
      meanwhile();
    }
    if (has_columns_) accumulate();
    products[0] = add_up();
    ++step_;
  }

  __device__ void finish() const { exchange_.finish(); }

 private:
  static constexpr int kRowsOfLane = Tile::kRows / 8;

  __device__ int own_row() const { return thread_ % Tile::kOutputs; }
  __device__ int warp() const { return thread_ / 32; }
  /// Which part of the columns this warp multiplies; as many warps as share the rows have one part.
  __device__ int part() const { return warp() / Tile::kSplit; }
  __device__ int first_row() const { return warp() % Tile::kSplit * Tile::kRows; }

  /// An element of the matrix or its transpose, by this block's row; zero past the last one.
  struct Elements {
    const float* w;
    int dim, first_row;
    bool transposed;

    __device__ __forceinline__ float operator()(int row, int column) const {
      row += first_row;
      if (row >= dim || column >= dim) return 0.0f;
      return transposed ? w[int64_t{column} * dim + row] : w[int64_t{row} * dim + column];
    }
  };

  __device__ void load_matrix(const GatedRnnParams& p, bool transposed, float* row_largest) {
    const Elements element = {static_cast<const float*>(p.w), static_cast<int>(p.channels),
                              exchange_.rank() * Tile::kOutputs, transposed};
    find_row_largest(element, row_largest);
    __syncthreads();
    row_inverse_ = Scale(row_largest[own_row()]).inverse;
    load_fragments(element, row_largest);
  }

  /// The largest magnitude of each of the block's rows.
  __device__ __forceinline__ void find_row_largest(const Elements& element,
                                                   float* row_largest) const {
    for (int row = warp(); row < Tile::kOutputs; row += Tile::kWarps) {
      float largest = 0.0f;
      for (int column = lane_; column < Tile::kInputs; column += 32) {
        largest = __uint_as_float(
            max(__float_as_uint(largest), __float_as_uint(fabsf(element(row, column)))));
      }
      largest = warp_largest(largest);
      if (lane_ == 0) row_largest[row] = largest;
    }
  }

  /// Fragments, as warp.cuh says; of 16 columns, a lane's four lie side by side.
  __device__ __forceinline__ void load_fragments(const Elements& element,
                                                 const float* row_largest) {
#pragma unroll
    for (int tile = 0; tile < Tile::kTiles; ++tile) {
      const int upper = first_row() + tile / Tile::kSteps * 16 + lane_ / 4;
      const int column = part() * Tile::kPart + tile % Tile::kSteps * 16 + lane_ % 4 * 4;
      const float factors[2] = {Scale(row_largest[upper]).factor,
                                Scale(row_largest[upper + 8]).factor};
      float values[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[i / 4][i % 4] = element(upper + i / 4 * 8, column + i % 4) * factors[i / 4];
      }
#pragma unroll
      for (int term = 0; term < Tile::kTerms; ++term) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          registers_[term][tile][i] =
              take_f16(values[i % 2][i / 2 * 2], values[i % 2][i / 2 * 2 + 1]);
        }
      }
    }
  }

  /// A warp's values are a group of one vector.
  __device__ void send(float value) const {
    const Scale scale(warp_largest(value));
    float rest = value * scale.factor, none = 0.0f;
    const uint32_t first = take_f16(rest, none);
    const uint32_t second = pack_f16(rest, 0.0f);
    exchange_.send(step_, __byte_perm(first, second, 0x5410), scale.inverse);
  }

  /// Where a part's sum for a vector and a row lies. Rows r, r + 8, r + 16 and r + 24 of 32 lie
  /// side by side: a lane has them.
  __device__ float* sum_at(int part, int vector, int row) const {
    return sums_ + step_ % 2 * Tile::kSums + (part * Tile::kVectors + vector) * Tile::kSumRow +
           row / 32 * 32 + row % 8 * 4 + row % 32 / 8;
  }

  __device__ void accumulate() const {
    constexpr int kGroupSteps = Tile::kSteps / Tile::kPartGroups;
    ReceivedPart<typename Tile::Shape> received;
    exchange_.receive(step_, part(), /*renews=*/warp() % 2 == 0, &received);
    float rows[2][kRowsOfLane] = {};  // of two vectors
#pragma unroll
    for (int group = 0; group < Tile::kPartGroups; ++group) {
      float sum[Tile::kRowTiles][4] = {};
      multiply_group(received, group * kGroupSteps, (group + 1) * kGroupSteps, sum);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) {
          rows[i][r] = fmaf(sum[r / 2][i + r % 2 * 2], received.scales[i][group], rows[i][r]);
        }
      }
    }
    store_sums(rows);
  }

  /// The products of 16 columns a step, the small ones first.
  __device__ __forceinline__ void multiply_group(const ReceivedPart<typename Tile::Shape>& received,
                                                 int first_step, int end_step,
                                                 float (&sum)[Tile::kRowTiles][4]) const {
#pragma unroll
    for (int kind = Tile::kTerms; kind >= 0; --kind) {  // which of the terms meet
      const int term = kind == 2 ? 1 : 0, of = kind == 1 ? 2 : 0;
#pragma unroll
      for (int s = first_step; s < end_step; ++s) {
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) {
          mma_f16(sum[r], registers_[term][r * Tile::kSteps + s], received.operands[s][of],
                  received.operands[s][of + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void store_sums(const float (&rows)[2][kRowsOfLane]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int vector = lane_ % 4 * 2 + i;
      if (vector >= Tile::kVectors) continue;
#pragma unroll
      for (int r = 0; r < kRowsOfLane; r += 4) {
        const unsigned to = shared_address(sum_at(part(), vector, first_row() + 8 * r + lane_ / 4));
        // The compiler would make four stores of it.
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(rows[i][r]),
                     "f"(rows[i][r + 1]), "f"(rows[i][r + 2]), "f"(rows[i][r + 3])
                     : "memory");
      }
    }
  }

  /// The result of the element that this thread owns, once all warps have stored their sums. Called
  /// by all threads.
  __device__ float add_up() const {
    unsigned from = shared_address(sum_at(0, owns() ? vector_of(0) : 0, own_row()));
    asm volatile("" : "+r"(from));  // found before the barrier
    __syncthreads();
    if (!owns()) return 0.0f;
    float parts[Tile::kParts];
#pragma unroll
    for (int i = 0; i < Tile::kParts; ++i) {
      asm volatile("ld.shared.f32 %0, [%1];"
                   : "=f"(parts[i])
                   : "r"(from + i * (Tile::kVectors * Tile::kSumRow * 4))
                   : "memory");
    }
    return sum_of<Tile::kParts>(parts) * row_inverse_;
  }

  float* sums_;  // [2][kParts][kVectors][kSumRow]
  int thread_;
  int lane_;
  int padded_dim_;
  unsigned step_ = 0;  // products so far
  bool has_columns_;
  float row_inverse_;
  typename Tile::Exchange exchange_;
  uint32_t registers_[Tile::kTerms][Tile::kTiles][4];
};

}  // namespace tidegate::kernels::rnn
