#pragma once

// The blocks that share a row of logits, and what they find out together: sums and the best token.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::sampling {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

/// The variable at this address of a block of the cluster: address_in_block().
template <class Value>
__device__ Value load_remote(unsigned address) {
  static_assert(sizeof(Value) == 4 || sizeof(Value) == 8);
  Value value = {};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (sizeof(Value) == 4) {
    unsigned bits;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
    memcpy(&value, &bits, sizeof(value));
  } else {
    unsigned long long bits;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(bits) : "r"(address) : "memory");
    memcpy(&value, &bits, sizeof(value));
  }
#endif
  return value;
}

template <class Real>
__device__ Real lowest() {
  return -static_cast<Real>(INFINITY);
}

/// A token and what it scores.
template <class Real>
struct Best {
  Real score;
  int64_t token;
};

/// The candidate with the larger score; of equal scores the one with the lower token.
template <class Real>
__device__ Best<Real> better(Best<Real> a, Best<Real> b) {
  const bool is_b = b.score > a.score || (b.score == a.score && b.token < a.token);
  return is_b ? b : a;
}

/// The blocks of a row, as one of their threads sees them: its rank, and where they meet.
template <int kBlocks>
struct RowBlocks {
  static constexpr int64_t kStride = int64_t{kBlocks} * kThreads;

  int rank = kBlocks > 1 ? cluster_rank() : 0;
  int turn = 0;

  /// The first of the row's tokens that this thread takes.
  __device__ int64_t first() const { return static_cast<int64_t>(rank) * kThreads + threadIdx.x; }

  /// Meets the other blocks: what each wrote to its shared memory before, all see after.
  __device__ void sync() const {
    if constexpr (kBlocks > 1) {
      publish_shared();
      cluster_meet();
    } else {
      __syncthreads();
    }
  }

  /// What `value` is in each block, in the blocks' order, for every thread. Two buffers by turns,
  /// so that nobody overwrites what a slower block still reads.
  template <class Value>
  __device__ void exchange(Value (&parts)[2], Value value, Value (&all)[kBlocks]) {
    if constexpr (kBlocks == 1) {
      all[0] = value;
    } else {
      turn ^= 1;
      if (threadIdx.x == 0) parts[turn] = value;
      sync();
      read(parts, all);
    }
  }
  template <class Value>
  __device__ void read(const Value (&parts)[2], Value (&all)[kBlocks]) const {
    const unsigned mine = shared_address(&parts[turn]);
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) all[r] = load_remote<Value>(address_in_block(mine, r));
  }
};

/// The best candidate of the block, which every thread gets.
template <class Real>
__device__ Best<Real> warp_best(Best<Real> mine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Best<Real> other{__shfl_xor_sync(~0u, mine.score, distance),
                           __shfl_xor_sync(~0u, mine.token, distance)};
    mine = better(mine, other);
  }
  return mine;
}
template <class Real>
__device__ Best<Real> block_best(Best<Real> mine) {
  __shared__ Real scores[kWarps];
  __shared__ int64_t tokens[kWarps];
  mine = warp_best(mine);
  __syncthreads();  // the arrays' last readers are done
  if (threadIdx.x % 32 == 0) {
    scores[threadIdx.x / 32] = mine.score;
    tokens[threadIdx.x / 32] = mine.token;
  }
  __syncthreads();
  static_assert(kWarps == 32);
  return warp_best(Best<Real>{scores[threadIdx.x % 32], tokens[threadIdx.x % 32]});
}

/// The largest number of the block, which every thread gets.
__device__ inline float block_max(float mine) {
  __shared__ float values[kWarps];
  mine = warp_max(mine);
  __syncthreads();  // the array's last readers are done
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = mine;
  __syncthreads();
  return warp_max(values[threadIdx.x % 32]);
}

/// The sum over the block's threads, which every thread gets.
template <class Value>
__device__ Value block_sum(Value mine) {
  __shared__ Value sums[kWarps];
  mine = warp_sum(mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = mine;
  }
  __syncthreads();
  Value sum = sums[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    sum += sums[warp];
  }
  return sum;
}

/// The best candidate of the row, and a sum over the row, by all of its blocks.
template <int kBlocks, class Real>
__device__ Best<Real> row_best(RowBlocks<kBlocks>& blocks, Best<Real> mine) {
  __shared__ Real scores[2];
  __shared__ int64_t tokens[2];
  mine = block_best(mine);
  Real all_scores[kBlocks];
  int64_t all_tokens[kBlocks];
  if constexpr (kBlocks > 1) {
    if (threadIdx.x == 0) tokens[blocks.turn ^ 1] = mine.token;
  }
  blocks.exchange(scores, mine.score, all_scores);
  if constexpr (kBlocks > 1) {
    blocks.read(tokens, all_tokens);
  } else {
    all_tokens[0] = mine.token;
  }
  Best<Real> best{all_scores[0], all_tokens[0]};
#pragma unroll
  for (int r = 1; r < kBlocks; ++r) best = better(best, Best<Real>{all_scores[r], all_tokens[r]});
  return best;
}
template <int kBlocks, class Value>
__device__ Value row_sum(RowBlocks<kBlocks>& blocks, Value mine) {
  __shared__ Value parts[2];
  Value all[kBlocks], sum = 0;
  blocks.exchange(parts, block_sum(mine), all);
#pragma unroll
  for (int r = 0; r < kBlocks; ++r) sum += all[r];
  return sum;
}

}  // namespace tidegate::kernels::sampling
