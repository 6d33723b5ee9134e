#pragma once

// What the plain kernels and the decoding step share: rows of a tensor, exponentials of either
// state type; and, of the step alone, how a cache is split and what a split leaves behind.

#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/cuda/sequences.cuh"

namespace tidegate::kernels::attention {

/// The rows of one head of one sequence.
template <class E>
struct AttentionRows {
  E* first;
  int64_t step;

  __device__ AttentionRows(const HeadSeries& series, int64_t batch, int64_t start, int64_t head)
      : first(static_cast<E*>(series.data) + element_offset(series, batch, start, head)),
        step(series.stride_t) {}
  __device__ E* row(int64_t token) const { return first + token * step; }
};

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

// ---- Splits of a cache ----

constexpr int kLeastSplit = 64;  // splits are multiples of so many keys, and these of every tile

/// A partial result: o times its sum, then maximum, sum, and the sum of the split's gates.
__host__ __device__ constexpr int64_t partial_numbers(int64_t head_dim) { return head_dim + 3; }

/// The oldest key of a sequence of `length` keys that window and pruning leave of a head of keys.
__device__ inline int64_t oldest_key(const ForgettingAttentionStepParams& p, int64_t batch,
                                     int64_t key_head, int64_t length) {
  if (p.first_keys != nullptr) return p.first_keys[batch * p.key_heads + key_head];
  return p.window > 0 ? max(int64_t{0}, length - p.window) : 0;
}

/// Where the splits of one head of keys of one sequence lie: as equal as tiles allow, over the keys
/// that are read of it.
struct Splits {
  int64_t oldest, length;
  int64_t keys;  // of a split

  __device__ Splits(const ForgettingAttentionStepParams& p, int64_t batch, int64_t key_head)
      : Splits(p, batch, key_head, p.lengths[batch]) {}

  /// `tokens` is the sequence's length as the caller has read it, so that it is not read again.
  __device__ Splits(const ForgettingAttentionStepParams& p, int64_t batch, int64_t key_head,
                    int32_t tokens) {
    length = max(int64_t{0}, min(int64_t{tokens}, p.capacity));
    oldest = oldest_key(p, batch, key_head, length);
    const int64_t equal = (length - oldest + p.plan.splits - 1) / p.plan.splits;
    keys = (equal + kLeastSplit - 1) / kLeastSplit * kLeastSplit;
  }
  __device__ int64_t begin(int64_t split) const { return min(length, oldest + split * keys); }
  __device__ int64_t used() const { return keys == 0 ? 0 : (length - oldest + keys - 1) / keys; }
};

}  // namespace tidegate::kernels::attention
