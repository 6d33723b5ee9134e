#pragma once

// Pruning: which keys may be dropped from a row, from bounds of scores and the fall of c.

#include "kernels/attention/cuda/work.cuh"

namespace tidegate::kernels::attention {

/// Bytes of work.score_bounds; see ScoreBounds. Zero for a pass that does not prune.
int64_t score_bounds_bytes(const ForgettingAttentionParams& params, bool of_queries);
/// Finds the keys' part of them, which is zero before; delta_kernel finds the queries'.
cudaError_t find_key_norms(const TensorAttention& work, cudaStream_t stream);

/// Floats in an order of integers in which NaN is the largest and zero is below all, and back.
__device__ inline unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x), sign = 0x80000000u;
  return x != x ? ~0u : bits < sign ? bits | sign : ~bits;
}
__device__ inline float from_ordered(unsigned x) {
  return __uint_as_float(x >= 0x80000000u ? x ^ 0x80000000u : ~x);
}

/// Bounds of scores, as ordered floats: a head's largest squared norm of a key, [B, Hkv]; then, in
/// the backward pass, the largest excess of scale |q_i| max|k| over lse_i of a head's queries,
/// [B, Hq].
struct ScoreBounds {
  static __device__ float key(const TensorAttention& w, int64_t batch, int64_t head) {
    const ForgettingAttentionParams& p = w.params.forward;
    return from_ordered(w.score_bounds[batch * p.key_heads + head / (p.heads / p.key_heads)]);
  }
  static __device__ float score(const TensorAttention& w, int64_t batch, int64_t head) {
    const ForgettingAttentionParams& p = w.params.forward;
    return from_ordered(w.score_bounds[p.layout.batch * p.key_heads + batch * p.heads + head]);
  }
};

/// scale |q| |k|, rounded up.
__device__ inline float largest_score(const ForgettingAttentionParams& p, float query_square,
                                      float key_square) {
  return 1.0001f * static_cast<float>(p.scale) * sqrtf(query_square) * sqrtf(key_square);
}

/// How far c may fall from a key to a query before the key may be dropped: its weight is
/// exp(scale q_i . k_j + c_i - c_j - lse_i), and with that at most prune / keys for each key, all
/// that is dropped weighs at most prune. `score`: of scale q_i . k_j - lse_i, nowhere exceeded. NaN
/// drops nothing.
__device__ inline double largest_fall(const ForgettingAttentionParams& p, int keys, double score) {
  return score + log(static_cast<double>(keys)) - log(p.prune);
}

/// Whether a launch of the backward pass takes a head of keys of a sequence.
__device__ inline bool takes_head(const TensorAttention& w, int64_t sequence, int key_head) {
  if (w.head_range == HeadRange::kAll) {
    return true;
  }
  const ForgettingAttentionParams& p = w.params.forward;
  const int group = static_cast<int>(p.heads / p.key_heads);
  const int* const is_short = w.extents.short_range + sequence * p.heads + key_head * group;
  int all = 1;
  for (int i = 0; i < group; ++i) {
    all &= is_short[i];
  }
  return (all != 0) == (w.head_range == HeadRange::kShort);
}

}  // namespace tidegate::kernels::attention
