#pragma once

// What a pass over the rows prepares for the tensor-core kernels: delta - dlse for the backward
// pass, largest norms for pruning. Eight lanes share a row.

#include "kernels/attention/cuda/tensor_work.cuh"

namespace tidegate::kernels {

constexpr int kRowThreads = 256;
constexpr int kRowsABlock = kRowThreads / 8;

template <class T>
__device__ inline float dot_rows(const char* a, const char* b, int pieces, int part) {
  float sum = 0;
  for (int piece = part; piece < pieces; piece += 8) {
    const auto x = *reinterpret_cast<const Pack<T, 8>*>(a + piece * 16);
    const auto y = *reinterpret_cast<const Pack<T, 8>*>(b + piece * 16);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      sum = fmaf(x.get(e), y.get(e), sum);
    }
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, step);
  }
  return sum;
}

/// row_terms = do . o - dlse, rows in the order [B, Tq, Hq].
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    row_terms_kernel(const __grid_constant__ TensorAttention w) {
  const ForgettingAttentionParams& p = w.params.forward;
  const int64_t row = int64_t{blockIdx.x} * kRowsABlock + threadIdx.x / 8;
  const bool exists = row < p.layout.batch * p.layout.time * p.heads;
  const int64_t head = row % p.heads, token = row / p.heads % p.layout.time;
  const Sequence all = {0, row / p.heads / p.layout.time, 0, 0};
  const int part = static_cast<int>(threadIdx.x) % 8;
  float sum = 0;
  if (__any_sync(0xffffffffu, exists)) {
    const int pieces = exists ? static_cast<int>(p.head_dim / 8) : 0;
    sum = dot_rows<T>(row_address(p.o, all, head, token),
                      row_address(w.params.d_o, all, head, token), pieces, part);
  }
  if (exists && part == 0) {
    const int64_t at = (all.batch * p.heads + head) * p.layout.time + token;
    const auto* const dlse = static_cast<const float*>(w.params.dlse);
    // A row without keys has no lse to take a gradient of.
    const bool empty = static_cast<const float*>(p.lse)[at] == -INFINITY;
    w.row_terms[at] = empty || dlse == nullptr ? sum : sum - dlse[at];
  }
}

/// The largest value of every head, one value a row; a block takes some tokens of one head.
/// `largest` holds what is below every value before. Keys: squared norms. Queries: see KeyNorms.
template <class T, bool kQueries>
__global__ void __launch_bounds__(kRowThreads)
    norms_kernel(const __grid_constant__ TensorAttention w, int* largest) {
  const ForgettingAttentionParams& p = w.params.forward;
  const HeadSeries& t = kQueries ? p.q : p.k;
  const int64_t time = kQueries ? p.layout.time : p.key_layout.time;
  const int64_t heads = kQueries ? p.heads : p.key_heads;
  const int64_t batch = blockIdx.y / heads, head = blockIdx.y % heads;
  const Sequence all = {0, batch, 0, 0};
  const int part = static_cast<int>(threadIdx.x) % 8, pieces = static_cast<int>(p.head_dim / 8);
  const float key = kQueries ? KeyNorms::key(w, batch, head) : 0.0f;
  int found = ordered(-INFINITY);
  for (int64_t first = int64_t{blockIdx.x} * kRowsABlock; first < time;
       first += int64_t{gridDim.x} * kRowsABlock) {
    const int64_t token = min(first + threadIdx.x / 8, time - 1);
    const char* const row = row_address(t, all, head, token);
    float x = dot_rows<T>(row, row, pieces, part);
    if (kQueries) {
      const float lse = static_cast<const float*>(p.lse)[(batch * heads + head) * time + token];
      x = lse == -INFINITY ? -INFINITY : largest_score(p, x, key) - lse;
    }
    found = max(found, ordered(x));
  }
  found = __reduce_max_sync(0xffffffffu, found);
  if (threadIdx.x % 32 == 0) {
    atomicMax(largest + batch * heads + head, found);
  }
}

}  // namespace tidegate::kernels
