#pragma once

// How the blocks that share a matrix exchange the elements of its vectors (the states, or their
// gradients) at every step. Each block owns some channels and sends them to all. What is sent of an
// element are two f16 numbers, in one word, and of a group of 32 channels of a vector what they are
// multiples of: its scale.
//
// Either way the vectors are double-buffered. Whoever overwrites one buffer has seen all of the
// other, and the blocks that sent those parts had read what is now overwritten.
//   ClusterExchange  stores into the other blocks' shared memory. Each buffer has an mbarrier for
//                    every sending block, which counts the bytes that arrive from it.
//   MemoryExchange   writes packed records to device memory, which receivers poll.

#include <cstdint>

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels::rnn {

/// Who owns what, for so many vectors; kSplit warps share columns, each with rows of its own.
template <int kVectors_, int kSplit_>
struct MmaShape {
  static constexpr int kVectors = kVectors_;
  static constexpr int kSplit = kSplit_;
  static constexpr int kCluster = 8;   // blocks
  static constexpr int kOutputs = 64;  // channels of a block
  static constexpr int kInputs = kCluster * kOutputs;
  static constexpr int kGroup = 32;  // channels that share a scale: a warp's
  static constexpr int kGroups = kInputs / kGroup;
  static constexpr int kWarps = 16;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kParts = kWarps / kSplit;  // of the columns: what a warp receives
  static constexpr int kPart = kInputs / kParts;
  static constexpr int kPartGroups = kPart / kGroup;
  static constexpr int kBlockParts = kOutputs / kPart;  // of what one block sends
  static constexpr int kSteps = kPart / 16;  // of the inner dimension of a warp's product
};

/// What a lane multiplies of a part of the columns: for vector lane / 4, of each 16 channels four
/// neighbouring ones, and the scales of vectors lane % 4 * 2 and the next. Lanes of vectors past
/// the last get anything.
template <class Shape>
struct ReceivedPart {
  uint32_t operands[Shape::kSteps][4];
  float scales[2][Shape::kPartGroups];
};

/// Words of four neighbouring channels as an operand: the first numbers of all, then the second.
__device__ inline void gather_terms(const uint32_t (&words)[4], uint32_t (&operand)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    operand[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
    operand[i + 2] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
  }
}

/// Exchanges through the shared memory of a cluster's blocks.
template <class Shape>
class ClusterExchange {
  static constexpr int kVectorRow = Shape::kInputs + 16;  // neighbours start in other banks
  static constexpr int kScaleRow = Shape::kGroups + 4;
  static constexpr int kBuffer = Shape::kVectors * (kVectorRow + kScaleRow);

 public:
  static constexpr bool kNeedsClusters = true;
  static constexpr int kSharedBytes = 2 * kBuffer * 4 + 2 * Shape::kCluster * 8;

  /// This thread sends the block's `row`-th channel of `vector`.
  __device__ ClusterExchange(const GatedRnnParams&, void* shared, int padded_dim, int vector,
                             int row, int lane)
      : words_(static_cast<uint32_t*>(shared)),
        barriers_(shared_address(words_ + 2 * kBuffer)),
        rank_(cluster_rank()),
        lane_(lane),
        padded_dim_(padded_dim) {
    for (int i = threadIdx.x; i < 2 * kBuffer; i += Shape::kThreads) words_[i] = 0;
    if (threadIdx.x == 0) {
      auto* barriers = reinterpret_cast<uint64_t*>(words_ + 2 * kBuffer);
      for (int i = 0; i < 2 * Shape::kCluster; ++i) mbarrier_init(&barriers[i], 1);
      publish_barriers();
      for (int block = 0; block < Shape::kCluster; ++block) {
        if (!receives(block)) continue;
        expect_sends(barriers_ + 8 * block, block);
        expect_sends(barriers_ + 8 * (Shape::kCluster + block), block);
      }
    }
    const int channel = rank_ * Shape::kOutputs + row;
    const int group = channel / Shape::kGroup;
    own_words_ = shared_address(words_ + vector * kVectorRow + (channel & ~3));
    own_scale_ = shared_address(words_ + scale_place(vector, group));
    sends_ = channel < padded_dim_;
    sends_to_all_ = padded_dim_ == Shape::kInputs;
    sends_scale_ =
        lane_ < Shape::kCluster && receives(lane_) && group * Shape::kGroup < padded_dim_;
    cluster_sync();
  }

  __device__ int rank() const { return rank_; }

  /// Sends this thread's element of a step to all blocks. A warp has the channels of a group of one
  /// vector. Four lanes share the blocks to which their elements go.
  __device__ void send(unsigned step, uint32_t word, float scale) const {
    const unsigned arrived = barriers_ + 8 * (step % 2 * Shape::kCluster + rank_);
    const unsigned buffer = step % 2 * (kBuffer * 4);
    uint32_t words[4], four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __shfl_sync(0xffffffffu, word, (lane_ & ~3) + i);
    if (sends_scale_) {
      store_remote(address_in_block(own_scale_ + buffer, lane_), scale,
                   address_in_block(arrived, lane_));
    }
    gather_terms(words, four);
    const float4 bits = make_float4(__uint_as_float(four[0]), __uint_as_float(four[1]),
                                    __uint_as_float(four[2]), __uint_as_float(four[3]));
    const unsigned address = own_words_ + buffer;
    const int near = lane_ % 4, far = near + 4;
    if (sends_to_all_) {
      store_remote(address_in_block(address, near), bits, address_in_block(arrived, near));
      store_remote(address_in_block(address, far), bits, address_in_block(arrived, far));
    } else if (sends_) {
      if (receives(near)) {
        store_remote(address_in_block(address, near), bits, address_in_block(arrived, near));
      }
      if (receives(far)) {
        store_remote(address_in_block(address, far), bits, address_in_block(arrived, far));
      }
    }
  }

  /// The whole warp receives one part, the same one at every step. Two warps wait for what a block
  /// sends; one of them arms its barrier again.
  __device__ void receive(unsigned step, int part, bool renews,
                          ReceivedPart<Shape>* received) const {
    const int block = part / Shape::kBlockParts;
    const unsigned barrier = barriers_ + 8 * (step % 2 * Shape::kCluster + block);
    wait_for_bytes(barrier, step / 2 % 2);
    __syncwarp();
    if (renews && lane_ == 0) expect_sends(barrier, block);
    const uint32_t* const buffer = words_ + step % 2 * kBuffer;
    if (lane_ / 4 < Shape::kVectors) {
      const uint32_t* const from =
          buffer + lane_ / 4 * kVectorRow + part * Shape::kPart + lane_ % 4 * 4;
#pragma unroll
      for (int s = 0; s < Shape::kSteps; ++s) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + 16 * s);
        received->operands[s][0] = four.x, received->operands[s][1] = four.y;
        received->operands[s][2] = four.z, received->operands[s][3] = four.w;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int vector = min(lane_ % 4 * 2 + i, Shape::kVectors - 1);
      const unsigned from = shared_address(buffer + scale_place(vector, part * Shape::kPartGroups));
      // Volatile: else it is loaded after the products, where it would be waited for.
      if constexpr (Shape::kPartGroups == 2) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(received->scales[i][0]), "=f"(received->scales[i][1])
                     : "r"(from)
                     : "memory");
      } else {
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(received->scales[i][0])
                     : "r"(from)
                     : "memory");
      }
    }
  }

  /// Before a block leaves, nobody may be about to write to it.
  __device__ void finish() const { cluster_sync(); }

 private:
  static_assert(Shape::kPartGroups <= 2 && Shape::kCluster == 8, "what receive and send share out");

  /// A block without channels sends nothing, so that nobody would wait for it: it gets nothing.
  __device__ bool receives(int block) const { return block * Shape::kOutputs < padded_dim_; }
  __device__ static int scale_place(int vector, int group) {
    return Shape::kVectors * kVectorRow + vector * kScaleRow + group;
  }
  /// Arms a barrier with the bytes that a block sends of all vectors, scales included.
  __device__ void expect_sends(unsigned barrier, int block) const {
    const int channels = min(padded_dim_ - block * Shape::kOutputs, Shape::kOutputs);
    const int groups = (channels + Shape::kGroup - 1) / Shape::kGroup;
    expect_bytes(barrier, static_cast<unsigned>(Shape::kVectors * (channels + groups) * 4));
  }

  uint32_t* words_;  // twice: [kVectors][kVectorRow], and scales [kVectors][kScaleRow]
  unsigned barriers_;
  int rank_;
  int lane_;
  int padded_dim_;
  unsigned own_words_, own_scale_;  // in the first buffer
  bool sends_, sends_to_all_, sends_scale_;
};

/// The workspace of MemoryExchange: for every group of blocks that share a matrix, two buffers of
/// records [kVectors][kVectorRow].
template <class Shape>
struct ExchangeWorkspace {
  static constexpr int kVectorRow = Shape::kInputs + Shape::kGroups;  // words, then scales
  static constexpr int kBuffer = Shape::kVectors * kVectorRow;
  static constexpr int64_t kGroupBytes = 2 * kBuffer * 8;

  static int64_t bytes(int64_t groups) { return groups * kGroupBytes; }
  /// How many groups a workspace has room for.
  static int64_t groups(int64_t bytes) { return bytes / kGroupBytes; }

  __device__ static uint64_t* group(void* workspace, int64_t index) {
    return static_cast<uint64_t*>(workspace) + index * (2 * kBuffer);
  }
};

/// Exchanges through device memory, on devices without clusters: every word is a packed record
/// (between_blocks.cuh), so that there is no other flag to wait for. All blocks that share a matrix
/// must run at once; the memory is zero at the start.
template <class Shape>
class MemoryExchange {
 public:
  using Workspace = ExchangeWorkspace<Shape>;
  static constexpr bool kNeedsClusters = false;
  static constexpr int kSharedBytes = 0;

  __device__ MemoryExchange(const GatedRnnParams& p, void*, int padded_dim, int vector, int row,
                            int lane)
      : records_(Workspace::group(p.workspace, int64_t{blockIdx.x} / Shape::kCluster)),
        padded_dim_(padded_dim),
        lane_(lane),
        vector_(vector),
        channel_(rank() * Shape::kOutputs + row) {}

  __device__ int rank() const { return static_cast<int>(blockIdx.x) % Shape::kCluster; }

  __device__ void send(unsigned step, uint32_t word, float scale) const {
    if (channel_ >= padded_dim_) return;
    PackedWord::write(place(step, vector_, channel_), epoch(step), word);
    if (channel_ % Shape::kGroup == 0) {
      PackedWord::write(place(step, vector_, Shape::kInputs + channel_ / Shape::kGroup),
                        epoch(step), __float_as_uint(scale));
    }
  }

  __device__ void receive(unsigned step, int part, bool, ReceivedPart<Shape>* received) const {
    // Lanes of vectors past the last read that one again.
    const int vector = min(lane_ / 4, Shape::kVectors - 1);
    uint32_t words[Shape::kSteps][4] = {}, scales[Shape::kPartGroups] = {};
    bool is_here;
    do {
      is_here = true;
#pragma unroll
      for (int g = 0; g < Shape::kPartGroups; ++g) {
        const int group = part * Shape::kPartGroups + g;
        if (group * Shape::kGroup >= padded_dim_) continue;  // nobody sends it
        is_here &=
            PackedWord::poll(place(step, vector, Shape::kInputs + group), epoch(step), scales[g]);
      }
#pragma unroll
      for (int s = 0; s < Shape::kSteps; ++s) {
        const int channel = part * Shape::kPart + 16 * s + lane_ % 4 * 4;
        if (channel >= padded_dim_) continue;
        const uint64_t* const from = place(step, vector, channel);
        is_here &= PackedWord::poll_pair(from, epoch(step), words[s][0], words[s][1]);
        is_here &= PackedWord::poll_pair(from + 2, epoch(step), words[s][2], words[s][3]);
      }
    } while (!is_here);
    __syncwarp();
#pragma unroll
    for (int s = 0; s < Shape::kSteps; ++s) gather_terms(words[s], received->operands[s]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int g = 0; g < Shape::kPartGroups; ++g) {
        const int from = 4 * (lane_ % 4 * 2 + i);
        received->scales[i][g] = __uint_as_float(__shfl_sync(0xffffffffu, scales[g], from));
      }
    }
  }

  __device__ void finish() const {}

 private:
  __device__ uint64_t* place(unsigned step, int vector, int at) const {
    return records_ + (step % 2 * Shape::kVectors + vector) * Workspace::kVectorRow + at;
  }
  /// The epoch of a step's records: zero, which memory holds at the start, is none's.
  __device__ static unsigned epoch(unsigned step) { return step + 1; }

  uint64_t* records_;  // see ExchangeWorkspace
  int padded_dim_;
  int lane_;
  int vector_, channel_;  // what this thread sends
};

}  // namespace tidegate::kernels::rnn
