#pragma once

// A matrix of up to 512 columns that stays in the registers of eight blocks as operands of the
// tensor cores, and its product with a few vectors that change from step to step. The interface is
// MatrixOnChip's.
//
// Precision: that of float. A float, scaled by a power of two, is the sum of two f16 numbers, each
// rounded, to 2^-24 of it; below 2^-16 of the largest number of its row (of the matrix) or group
// (of a vector: 32 channels) this becomes 2^-38 of that largest number. Of the four products of two
// such sums, the one of the two rests is left out: it is below 2^-24 of the whole. Products are
// exact, and their sums are floats. A matrix of 16-bit numbers is one f16 number an element, not
// two.
//
// A block owns 64 rows. Each of its 16 warps multiplies all of them by 32 columns, a group, as soon
// as this group's values are there. Columns of the small product are vectors: up to 8, of which
// kVectors count. The warps' sums meet in shared memory, where the threads that own the elements
// add them up, always in the same order. Two copies of the sums take turns, as those of the vectors
// do (state_exchange.cuh).

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/cuda/mma.cuh"
#include "kernels/rnn/cuda/state_exchange.cuh"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels {

template <class Tile>
class MatrixInFragments;

/// kTerms: f16 numbers that an element of the matrix is the sum of.
template <int kVectors, int kTerms_, template <class> class ExchangeOf>
struct FragmentTile : FragmentShape<kVectors> {
  using Shape = FragmentShape<kVectors>;
  using Matrix = MatrixInFragments<FragmentTile>;
  using Exchange = ExchangeOf<Shape>;
  static constexpr int kTerms = kTerms_;
  static constexpr bool kNeedsClusters = Exchange::kNeedsClusters;
  static constexpr int kOwn = 1;
  static constexpr int kRowTiles = Shape::kOutputs / 16;
  static constexpr int kTiles = kRowTiles * Shape::kSteps;

  static constexpr int kSumRow = Shape::kOutputs + 4;  // neighbours start in other banks
  static constexpr int kSums = Shape::kGroups * kVectors * kSumRow;
  static constexpr int kNeededBytes = 2 * kSums * 4 + Shape::kOutputs * 4 + Exchange::kSharedBytes;
  /// In clusters more than half of a multiprocessor's: two blocks on one would take turns while
  /// others idle.
  static constexpr int kSharedBytes =
      kNeedsClusters && kNeededBytes < 120 * 1024 ? 120 * 1024 : kNeededBytes;

  static_assert(kVectors <= 8, "one column of a product each");
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

/// Neighbours first, always in the same order.
template <int kCount>
__device__ inline float sum_of(const float* values) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    return sum_of<kCount / 2>(values) + sum_of<kCount / 2>(values + kCount / 2);
  }
}

template <class Tile>
class MatrixInFragments {
 public:
  /// Of p.w or its transpose. Called by all threads.
  __device__ MatrixInFragments(const GatedRnnParams& p, bool transposed, void* shared)
      : sums_(static_cast<float*>(shared)),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        padded_dim_((static_cast<int>(p.channels) + 3) / 4 * 4),
        exchange_(p, sums_ + 2 * Tile::kSums + Tile::kOutputs, padded_dim_) {
    for (int i = threadIdx.x; i < 2 * Tile::kSums; i += Tile::kThreads) sums_[i] = 0.0f;
    load_matrix(p, transposed, sums_ + 2 * Tile::kSums);
  }

  /// The element that this thread owns: of which vector, and its channel. Both may lie past the
  /// last.
  __device__ int vector_of(int) const { return static_cast<int>(threadIdx.x) / Tile::kOutputs; }
  __device__ int channel_of(int) const { return exchange_.rank() * Tile::kOutputs + own_row(); }
  __device__ bool is_first() const { return true; }

  /// See MatrixOnChip.
  template <class Meanwhile>
  __device__ void multiply(const float (&values)[1], float (&products)[1], Meanwhile meanwhile) {
    products[0] = 0.0f;
    if (exchange_.rank() * Tile::kOutputs >= padded_dim_) return;  // nobody waits for this block
    if (vector_of(0) < Tile::kVectors) send(values[0]);
    meanwhile();
    float* const sums = sums_ + turn_ * Tile::kSums;
    if (warp_ * Tile::kColumns < padded_dim_) accumulate(sums);
    __syncthreads();
    if (vector_of(0) < Tile::kVectors) products[0] = add_up(sums);
    exchange_.take_turns();
    turn_ ^= 1;
  }

  __device__ void finish() const { exchange_.finish(); }

 private:
  __device__ static int own_row() { return static_cast<int>(threadIdx.x) % Tile::kOutputs; }

  /// Fragments, as mma.cuh says; of 16 columns, a lane's four lie side by side.
  __device__ void load_matrix(const GatedRnnParams& p, bool transposed, float* row_largest) {
    const auto* w = static_cast<const float*>(p.w);
    const int dim = static_cast<int>(p.channels);
    const auto element = [&](int row, int column) {
      row += exchange_.rank() * Tile::kOutputs;
      if (row >= dim || column >= dim) return 0.0f;
      return transposed ? w[int64_t{column} * dim + row] : w[int64_t{row} * dim + column];
    };
    for (int row = warp_; row < Tile::kOutputs; row += Tile::kGroups) {
      float largest = 0.0f;
      for (int column = lane_; column < Tile::kInputs; column += 32) {
        largest = __uint_as_float(
            max(__float_as_uint(largest), __float_as_uint(fabsf(element(row, column)))));
      }
      largest = warp_largest(largest);
      if (lane_ == 0) row_largest[row] = largest;
    }
    __syncthreads();
    row_inverse_ = Scale(row_largest[own_row()]).inverse;
#pragma unroll
    for (int tile = 0; tile < Tile::kTiles; ++tile) {
      const int upper = tile / Tile::kSteps * 16 + lane_ / 4;
      const int column = warp_ * Tile::kColumns + tile % Tile::kSteps * 16 + lane_ % 4 * 4;
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
    exchange_.send(vector_of(0), channel_of(0), __byte_perm(first, second, 0x5410), scale.inverse);
  }

  __device__ void accumulate(float* sums) const {
    // Lanes of columns past the last vector read that one again; nobody reads their sums.
    uint32_t inputs[Tile::kSteps][4];
    const float scale =
        exchange_.receive(min(lane_ / 4, Tile::kVectors - 1), warp_, lane_ % 4 * 4, inputs);
    float sum[Tile::kRowTiles][4] = {};
    // The small products first.
#pragma unroll
    for (int kind = Tile::kTerms; kind >= 0; --kind) {  // which of the terms meet
      const int term = kind == 2 ? 1 : 0, of = kind == 1 ? 2 : 0;
#pragma unroll
      for (int s = 0; s < Tile::kSteps; ++s) {
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) {
          mma_f16(sum[r], registers_[term][r * Tile::kSteps + s], inputs[s][of], inputs[s][of + 1]);
        }
      }
    }
    float* const to = sums + warp_ * Tile::kVectors * Tile::kSumRow + lane_ / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int vector = lane_ % 4 * 2 + i;
      const float inverse = __shfl_sync(0xffffffffu, scale, 4 * vector);
      if (vector >= Tile::kVectors) continue;
#pragma unroll
      for (int r = 0; r < Tile::kRowTiles; ++r) {
        to[vector * Tile::kSumRow + 16 * r] = sum[r][i] * inverse;
        to[vector * Tile::kSumRow + 16 * r + 8] = sum[r][i + 2] * inverse;
      }
    }
  }

  __device__ float add_up(const float* sums) const {
    const float* const from = sums + vector_of(0) * Tile::kSumRow + own_row();
    float parts[Tile::kGroups];
#pragma unroll
    for (int i = 0; i < Tile::kGroups; ++i) parts[i] = from[i * Tile::kVectors * Tile::kSumRow];
    return sum_of<Tile::kGroups>(parts) * row_inverse_;
  }

  float* sums_;  // [2][kGroups][kVectors][kSumRow]
  int lane_;
  int warp_;
  int padded_dim_;
  int turn_ = 0;
  float row_inverse_;
  typename Tile::Exchange exchange_;
  uint32_t registers_[Tile::kTerms][Tile::kTiles][4];
};

}  // namespace tidegate::kernels
