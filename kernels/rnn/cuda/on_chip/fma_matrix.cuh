#pragma once

// A matrix that stays on the chip for a whole launch, in the registers (and, where these are too
// few, the shared memory) of one block or of the blocks of a cluster, and its product with a few
// vectors that change from step to step, by fused multiply-adds (FFMA).
//
// A block owns kOutputs rows of the matrix. Its threads are groups of kLanes lanes: a group owns
// kOut rows, and of these each lane 4 of every 4 * kLanes columns. The vectors lie whole in every
// block's shared memory. After a product the lanes of a group add their parts up (scatter_sums),
// which leaves each of them with kOwn numbers of the result: the elements that this thread owns. It
// keeps their states, and sends the new ones to all blocks before the next product.
//
// The vectors are double-buffered. Whoever writes one buffer has seen all parts of the other, and
// the blocks that sent those had read what is now overwritten: nothing else has to be waited for.
// Each buffer has an mbarrier of its own that counts the bytes sent to it, so that the bytes of the
// next step never count for this one. Thread 0 arms a barrier when its phase has ended.

#include <cstdint>

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels::rnn {

constexpr int kFmaThreads = 256;

/// The smallest that is not below `count`.
constexpr int power_of_two(int count) {
  int power = 1;
  while (power < count) power *= 2;
  return power;
}

template <class Tile>
class FmaMatrix;

/// A tile says how many lanes share a row, how many columns a lane has, how many rows a group of
/// lanes has in registers and in shared memory, and how many vectors and blocks share the matrix.
template <int kLanes_, int kColumnsPerLane, int kRegisterRows, int kSharedRows_, int kVectors_,
          int kCluster_>
struct FmaTile {
  using Matrix = FmaMatrix<FmaTile>;
  static constexpr int kThreads = kFmaThreads;
  static constexpr bool kNeedsClusters = kCluster_ > 1;
  static constexpr int kLanes = kLanes_;
  static constexpr bool kLoadsAhead = true;  // a step is about as long as a load
  static constexpr int kChunks = kColumnsPerLane / 4;
  static constexpr int kInRegisters = kRegisterRows;
  static constexpr int kInShared = kSharedRows_;
  static constexpr int kOut = kRegisterRows + kSharedRows_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kOutputs = kFmaThreads / kLanes * kOut;  // of a block
  static constexpr int kInputs = kLanes * kColumnsPerLane;
  // Sums of a group of lanes, as if there were a power of two of vectors.
  static constexpr int kValues = power_of_two(kVectors) * kOut;
  static constexpr int kOwn = kValues > kLanes ? kValues / kLanes : 1;
  static constexpr int kCopies = kValues < kLanes ? kLanes / kValues : 1;  // of each number
  /// Whether a few neighbouring lanes own four neighbouring elements of one vector.
  static constexpr bool kInFours = kOwn <= 4 && kCopies == 1 && kOut % 4 == 0;

  static constexpr int kVectorBytes = 2 * kVectors * kInputs * 4;
  static constexpr int kMatrixBytes = kInShared * kChunks * kFmaThreads * 16;
  static constexpr int kSharedBytes = kVectorBytes + kMatrixBytes + 16;

  static_assert(kOutputs * kCluster >= kInputs, "every column is some block's row");
};

template <class Tile>
class FmaMatrix {
 public:
  /// Holds p.w or its transpose. Called by all threads.
  __device__ FmaMatrix(const GatedRnnParams& p, bool transposed, void* shared)
      : vectors_(static_cast<float*>(shared)),
        matrix_(reinterpret_cast<float4*>(vectors_ + Tile::kVectorBytes / 4)),
        barriers_(shared_address(matrix_ + Tile::kMatrixBytes / 16)),
        lane_(threadIdx.x % Tile::kLanes),
        first_output_((Tile::kCluster > 1 ? cluster_rank() : 0) * Tile::kOutputs +
                      static_cast<int>(threadIdx.x) / Tile::kLanes * Tile::kOut),
        padded_dim_((static_cast<int>(p.channels) + 3) / 4 * 4) {
    load_matrix(p, transposed);
    for (int i = threadIdx.x; i < Tile::kVectorBytes / 4; i += kFmaThreads) {
      vectors_[i] = 0.0f;
    }
    if constexpr (Tile::kCluster > 1) {
      if (threadIdx.x == 0) {
        auto* barriers = reinterpret_cast<uint64_t*>(matrix_ + Tile::kMatrixBytes / 16);
        mbarrier_init(&barriers[0], 1);
        mbarrier_init(&barriers[1], 1);
        publish_barriers();
        expect_sends(0);
        expect_sends(1);
      }
      cluster_sync();
    } else {
      __syncthreads();
    }
  }

  /// The e-th element that this thread owns: of which vector, and its channel. Both may lie past
  /// the last. Other threads may own it too; one of them is the first.
  __device__ int vector_of(int e) const { return own(e) / Tile::kOut; }
  __device__ int channel_of(int e) const { return first_output_ + own(e) % Tile::kOut; }
  __device__ bool is_first() const { return lane_ % Tile::kCopies == 0; }

  /// A warp of a cluster that owns no channel has no part in the products. It sends nothing, so
  /// nobody would wait for it, and a barrier could pass two phases while it waits for the first.
  __device__ bool takes_part() const {
    const int first_group = static_cast<int>(threadIdx.x) % kWarpSize / Tile::kLanes;
    return Tile::kCluster == 1 || first_output_ - first_group * Tile::kOut < padded_dim_;
  }
  /// All threads own elements.
  static __device__ constexpr bool owns() { return true; }

  /// The elements of the matrix times the vectors whose elements are `values`, zero past the last
  /// channel. `meanwhile` is called while the values are on their way, for what needs no product.
  /// Called by all threads of all warps that take part.
  template <class Meanwhile>
  __device__ void multiply(const float (&values)[Tile::kOwn], float (&products)[Tile::kOwn],
                           Meanwhile meanwhile) {
    if constexpr (Tile::kCluster > 1) {
      send(values);
      meanwhile();
      wait_for_bytes(barriers_ + 8 * buffer_, parity_);
      if (threadIdx.x == 0) expect_sends(buffer_);
    } else {
      meanwhile();  // nothing is on its way here: first what the other warps do not wait for
      store(values);
      __syncthreads();
    }
    float sums[Tile::kValues] = {};
    accumulate(vectors_ + buffer_ * (Tile::kVectors * Tile::kInputs), sums);
    scatter_sums<Tile::kValues, Tile::kLanes / 2>(sums, lane_);
#pragma unroll
    for (int e = 0; e < Tile::kOwn; ++e) products[e] = sums[e];
    parity_ ^= buffer_;
    buffer_ ^= 1;
  }

  /// Before a block leaves, nobody may be about to write to it.
  __device__ void finish() const {
    if constexpr (Tile::kCluster > 1) cluster_sync();
  }

 private:
  __device__ int own(int e) const { return lane_ / Tile::kCopies * Tile::kOwn + e; }

  __device__ void load_matrix(const GatedRnnParams& p, bool transposed) {
    const auto* w = static_cast<const float*>(p.w);
    const int dim = static_cast<int>(p.channels);
    const int64_t row_stride = transposed ? 1 : dim;
    const int64_t column_stride = transposed ? dim : 1;
#pragma unroll
    for (int o = 0; o < Tile::kOut; ++o) {
      const int row = first_output_ + o;
#pragma unroll
      for (int i = 0; i < Tile::kChunks; ++i) {
        float chunk[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = 4 * (i * Tile::kLanes + lane_) + j;
          const bool exists = row < dim && column < dim;
          chunk[j] = exists ? w[row * row_stride + column * column_stride] : 0.0f;
        }
        if (o < Tile::kInRegisters) {
#pragma unroll
          for (int j = 0; j < 4; ++j) registers_[o][4 * i + j] = chunk[j];
        } else {
          const int at = ((o - Tile::kInRegisters) * Tile::kChunks + i) * kFmaThreads;
          matrix_[at + threadIdx.x] = make_float4(chunk[0], chunk[1], chunk[2], chunk[3]);
        }
      }
    }
  }

  __device__ void accumulate(const float* vectors, float (&sums)[Tile::kValues]) const {
#pragma unroll
    for (int i = 0; i < Tile::kChunks; ++i) {
      float4 input[Tile::kVectors];
#pragma unroll
      for (int r = 0; r < Tile::kVectors; ++r) {
        input[r] = *reinterpret_cast<const float4*>(vectors + r * Tile::kInputs +
                                                    4 * (i * Tile::kLanes + lane_));
      }
#pragma unroll
      for (int o = 0; o < Tile::kOut; ++o) {
        float4 w;
        if (o < Tile::kInRegisters) {
          w = make_float4(registers_[o][4 * i], registers_[o][4 * i + 1], registers_[o][4 * i + 2],
                          registers_[o][4 * i + 3]);
        } else {
          const int at = ((o - Tile::kInRegisters) * Tile::kChunks + i) * kFmaThreads;
          w = matrix_[at + threadIdx.x];
        }
#pragma unroll
        for (int r = 0; r < Tile::kVectors; ++r) {
          float& sum = sums[r * Tile::kOut + o];
          sum = fmaf(w.x, input[r].x, sum);
          sum = fmaf(w.y, input[r].y, sum);
          sum = fmaf(w.z, input[r].z, sum);
          sum = fmaf(w.w, input[r].w, sum);
        }
      }
    }
  }

  /// Where an element lies in this step's buffer.
  __device__ float* place(int vector, int channel) const {
    return vectors_ + (buffer_ * Tile::kVectors + vector) * Tile::kInputs + channel;
  }

  __device__ void store(const float (&values)[Tile::kOwn]) const {
#pragma unroll
    for (int e = 0; e < Tile::kOwn; ++e) {
      if (is_inside(e)) *place(vector_of(e), channel_of(e)) = values[e];
    }
  }

  __device__ void send(const float (&values)[Tile::kOwn]) const {
    const unsigned barrier = barriers_ + 8 * buffer_;
    if constexpr (Tile::kInFours) {
      // The lanes that own four elements share the blocks to which these go.
      constexpr int kSenders = 4 / Tile::kOwn;
      const int sender = threadIdx.x % kSenders;
      const int first = threadIdx.x % 32 - sender;
      const auto element = [&](int i) {
        return __shfl_sync(0xffffffffu, values[i % Tile::kOwn], first + i / Tile::kOwn);
      };
      const float4 four = make_float4(element(0), element(1), element(2), element(3));
      if (!is_inside(0)) return;
      const unsigned address = shared_address(place(vector_of(0), channel_of(0) & ~3));
#pragma unroll
      for (int block = 0; block < Tile::kCluster; block += kSenders) {
        const int rank = block + sender;
        if (rank < Tile::kCluster && owns_channels(rank)) {
          store_remote(address_in_block(address, rank), four, address_in_block(barrier, rank));
        }
      }
    } else {
#pragma unroll
      for (int e = 0; e < Tile::kOwn; ++e) {
        if (!is_inside(e)) continue;
        const unsigned address = shared_address(place(vector_of(e), channel_of(e)));
        for (int rank = lane_ % Tile::kCopies; rank < Tile::kCluster; rank += Tile::kCopies) {
          if (!owns_channels(rank)) break;
          store_remote(address_in_block(address, rank), values[e], address_in_block(barrier, rank));
        }
      }
    }
  }

  /// A block that owns no channels sends nothing, so that nobody would wait for it: it gets nothing
  /// either.
  __device__ bool owns_channels(int rank) const { return rank * Tile::kOutputs < padded_dim_; }

  /// Whether the e-th element is one of the vectors', which are padded to whole fours.
  __device__ bool is_inside(int e) const {
    return vector_of(e) < Tile::kVectors && channel_of(e) < padded_dim_;
  }

  /// Arms a buffer's barrier with the bytes that all blocks together send to it.
  __device__ void expect_sends(int buffer) const {
    expect_bytes(barriers_ + 8 * buffer, static_cast<unsigned>(Tile::kVectors * padded_dim_ * 4));
  }

  float* vectors_;  // [2][kVectors][kInputs]
  float4* matrix_;  // [kInShared][kChunks][kFmaThreads]
  unsigned barriers_;
  int lane_;
  int first_output_;
  int padded_dim_;
  int buffer_ = 0;
  int parity_ = 0;
  float registers_[Tile::kInRegisters][4 * Tile::kChunks];
};

}  // namespace tidegate::kernels::rnn
