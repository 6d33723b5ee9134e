#pragma once

// How blocks that share a matrix tell each other the elements of its vectors. Each block owns some
// channels and says all of them. What goes round of an element are two f16 numbers, in one word,
// and of a group of 32 channels of a vector what they are multiples of: its scale. Two copies of
// the vectors take turns: whoever overwrites one has seen all of the other, and who sent those
// parts had read what is now overwritten.

#include <cstdint>

#include "kernels/common/cuda/mbarrier.cuh"
#include "kernels/rnn/cuda/cluster.cuh"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels {

/// Who owns what, for so many vectors.
template <int kVectors_>
struct FragmentShape {
  static constexpr int kVectors = kVectors_;
  static constexpr int kCluster = 8;   // blocks
  static constexpr int kOutputs = 64;  // channels of a block
  static constexpr int kInputs = kCluster * kOutputs;
  static constexpr int kColumns = 32;  // channels of a group, which a warp receives
  static constexpr int kGroups = kInputs / kColumns;
  static constexpr int kSteps = kColumns / 16;  // of the inner dimension of a product
  static constexpr int kThreads = 32 * kGroups;
};

/// Words of four neighbouring channels as an operand: the first numbers of all, then the second.
__device__ inline void sort_terms(const uint32_t (&words)[4], uint32_t (&operand)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    operand[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
    operand[i + 2] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
  }
}

/// Through the shared memory of a cluster's blocks, whose barriers count the bytes of each group.
template <class Shape>
class ClusterExchange {
  static constexpr int kVectorRow = Shape::kInputs + 16;  // neighbours start in other banks
  static constexpr int kCopy = Shape::kVectors * (kVectorRow + Shape::kGroups);

 public:
  static constexpr bool kNeedsClusters = true;
  static constexpr int kSharedBytes = 2 * kCopy * 4 + 2 * Shape::kGroups * 8;

  __device__ ClusterExchange(const GatedRnnParams&, void* shared, int padded_dim)
      : words_(static_cast<uint32_t*>(shared)),
        barriers_(shared_address(words_ + 2 * kCopy)),
        rank_(cluster_rank()),
        padded_dim_(padded_dim) {
    for (int i = threadIdx.x; i < 2 * kCopy; i += Shape::kThreads) words_[i] = 0;
    if (threadIdx.x == 0) {
      auto* barriers = reinterpret_cast<uint64_t*>(words_ + 2 * kCopy);
      for (int i = 0; i < 2 * Shape::kGroups; ++i) mbarrier_init(&barriers[i], 1);
      publish_barriers();
    }
    __syncthreads();
    const int group = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0 && group * Shape::kColumns < padded_dim_) {
      announce(0, group);
      announce(1, group);
    }
    cluster_sync();
  }

  __device__ int rank() const { return rank_; }

  /// Says an element to all blocks. A warp has the channels of a group of one vector. Four lanes
  /// share the blocks to which their elements go.
  __device__ void send(int vector, int channel, uint32_t word, float scale) const {
    const int lane = threadIdx.x % 32;
    uint32_t words[4], four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __shfl_sync(0xffffffffu, word, (lane & ~3) + i);
    sort_terms(words, four);
    const float4 bits = make_float4(__uint_as_float(four[0]), __uint_as_float(four[1]),
                                    __uint_as_float(four[2]), __uint_as_float(four[3]));
    const int group = channel / Shape::kColumns;
    const unsigned arrived = barrier(turn_, group);
    if (channel < padded_dim_) {
      const unsigned address = shared_address(place(vector, channel & ~3));
#pragma unroll
      for (int block = 0; block < Shape::kCluster; block += 4) {
        const int to = block + lane % 4;
        if (!listens(to)) continue;
        store_remote(address_in_block(address, to), bits, address_in_block(arrived, to));
      }
    }
    if (lane < Shape::kCluster && listens(lane) && group * Shape::kColumns < padded_dim_) {
      const unsigned address = shared_address(scale_place(vector, group));
      store_remote(address_in_block(address, lane), scale, address_in_block(arrived, lane));
    }
  }

  /// Of a vector, what is at `offset` of each 16 channels of a group, as operands, and the group's
  /// scale. The whole warp receives one group, always the same.
  __device__ float receive(int vector, int group, int offset,
                           uint32_t (&operands)[Shape::kSteps][4]) const {
    wait_for_bytes(barrier(turn_, group), parity_);
    __syncwarp();
    if (threadIdx.x % 32 == 0) announce(turn_, group);
#pragma unroll
    for (int s = 0; s < Shape::kSteps; ++s) {
      const uint4 four =
          *reinterpret_cast<const uint4*>(place(vector, group * Shape::kColumns + 16 * s + offset));
      operands[s][0] = four.x, operands[s][1] = four.y;
      operands[s][2] = four.z, operands[s][3] = four.w;
    }
    return __uint_as_float(*scale_place(vector, group));
  }

  __device__ void take_turns() {
    parity_ ^= turn_;
    turn_ ^= 1;
  }

  /// Before a block leaves, nobody may be about to write to it.
  __device__ void finish() const { cluster_sync(); }

 private:
  /// A block without channels says nothing, so that nobody would wait for it: it gets nothing.
  __device__ bool listens(int block) const { return block * Shape::kOutputs < padded_dim_; }
  __device__ uint32_t* place(int vector, int channel) const {
    return words_ + turn_ * kCopy + vector * kVectorRow + channel;
  }
  __device__ uint32_t* scale_place(int vector, int group) const {
    return words_ + turn_ * kCopy + Shape::kVectors * kVectorRow + vector * Shape::kGroups + group;
  }
  __device__ unsigned barrier(int turn, int group) const {
    return barriers_ + 8 * (turn * Shape::kGroups + group);
  }
  /// The bytes of a group of all vectors, scales included.
  __device__ void announce(int turn, int group) const {
    const int channels = min(padded_dim_ - group * Shape::kColumns, Shape::kColumns);
    expect_bytes(barrier(turn, group), static_cast<unsigned>(Shape::kVectors * (channels + 1) * 4));
  }

  uint32_t* words_;  // twice: [kVectors][kVectorRow], and scales [kVectors][kGroups]
  unsigned barriers_;
  int rank_;
  int padded_dim_;
  int turn_ = 0;
  int parity_ = 0;
};

/// Through device memory, on devices without clusters: each word with the number of its step beside
/// it, in one store of 64 bits, so that there is no other flag to wait for. All blocks that share a
/// matrix must run at once; the memory is zero at the start.
template <class Shape>
class MemoryExchange {
  static constexpr int kVectorRow = Shape::kInputs + Shape::kGroups;  // words, then scales
  static constexpr int kCopy = Shape::kVectors * kVectorRow;

 public:
  static constexpr bool kNeedsClusters = false;
  static constexpr int kSharedBytes = 0;
  static constexpr int64_t kBytes = 2 * kCopy * 8;  // of the blocks that share a matrix

  __device__ MemoryExchange(const GatedRnnParams& p, void*, int padded_dim)
      : tagged_(static_cast<uint64_t*>(p.workspace) +
                int64_t{blockIdx.x} / Shape::kCluster * (2 * kCopy)),
        padded_dim_(padded_dim) {}

  __device__ int rank() const { return static_cast<int>(blockIdx.x) % Shape::kCluster; }

  __device__ void send(int vector, int channel, uint32_t word, float scale) const {
    if (channel < padded_dim_) store(place(vector, channel), word);
    if (channel % Shape::kColumns == 0 && channel < padded_dim_) {
      store(place(vector, Shape::kInputs + channel / Shape::kColumns), __float_as_uint(scale));
    }
  }

  __device__ float receive(int vector, int group, int offset,
                           uint32_t (&operands)[Shape::kSteps][4]) const {
    uint32_t words[Shape::kSteps][4] = {};
    uint32_t scale = 0;
    bool is_here;
    do {
      is_here = load(place(vector, Shape::kInputs + group), scale);
#pragma unroll
      for (int s = 0; s < Shape::kSteps; ++s) {
        const int channel = group * Shape::kColumns + 16 * s + offset;
        if (channel >= padded_dim_) continue;  // nobody says it
        const uint64_t* const from = place(vector, channel);
        is_here &= load_pair(from, words[s][0], words[s][1]);
        is_here &= load_pair(from + 2, words[s][2], words[s][3]);
      }
    } while (!is_here);
    __syncwarp();
#pragma unroll
    for (int s = 0; s < Shape::kSteps; ++s) sort_terms(words[s], operands[s]);
    return __uint_as_float(scale);
  }

  __device__ void take_turns() { ++step_; }
  __device__ void finish() const {}

 private:
  __device__ uint64_t* place(int vector, int at) const {
    return tagged_ + (step_ % 2 * Shape::kVectors + vector) * kVectorRow + at;
  }
  __device__ void store(uint64_t* to, uint32_t word) const {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(uint64_t{step_} << 32 | word)
                 : "memory");
  }
  /// Whether this step's word was there.
  __device__ bool load(const uint64_t* from, uint32_t& word) const {
    uint64_t tagged;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(tagged) : "l"(from) : "memory");
    word = static_cast<uint32_t>(tagged);
    return tagged >> 32 == step_;
  }
  __device__ bool load_pair(const uint64_t* from, uint32_t& first, uint32_t& second) const {
    uint64_t tagged[2];
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(tagged[0]), "=l"(tagged[1])
                 : "l"(from)
                 : "memory");
    first = static_cast<uint32_t>(tagged[0]), second = static_cast<uint32_t>(tagged[1]);
    return tagged[0] >> 32 == step_ && tagged[1] >> 32 == step_;
  }

  uint64_t* tagged_;  // twice: [kVectors][kVectorRow]
  int padded_dim_;
  uint32_t step_ = 1;
};

}  // namespace tidegate::kernels
