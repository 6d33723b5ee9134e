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

/// Largest squared norms of the rows of every head of `t`: a block takes some tokens of one head.
/// `norms` holds zeros before. Floats that are not negative, and NaN, are ordered as integers.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    norms_kernel(HeadSeries t, int64_t time, int heads, int pieces, int* norms) {
  const int head = static_cast<int>(blockIdx.y) % heads;
  const Sequence all = {0, static_cast<int64_t>(blockIdx.y) / heads, 0, 0};
  const int part = static_cast<int>(threadIdx.x) % 8;
  int largest = 0;
  for (int64_t first = int64_t{blockIdx.x} * kRowsABlock; first < time;
       first += int64_t{gridDim.x} * kRowsABlock) {
    const int64_t token = min(first + threadIdx.x / 8, time - 1);
    const char* const row = row_address(t, all, head, token);
    largest = max(largest, __float_as_int(dot_rows<T>(row, row, pieces, part)) & 0x7fffffff);
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) {
    atomicMax(norms + all.batch * heads + head, largest);
  }
}

}  // namespace tidegate::kernels
