#pragma once

// What a step of decoding does with its projections before attention: parameters. On the CPU, and
// where the kernel does not apply, ops of torch do the same (src/nn/attention_append.h). The CUDA
// entry point is in append_cuda.h.

#include <cstdint>

#include "kernels/common/time_series.h"

namespace tidegate::kernels::attention {

/// For the next token of each sequence b, at place lengths[b] of its cache and position seen[b],
/// each head of q, k, v [D]:
///
///   k, v = a last + (1 - a) k, a = sigmoid(mix), and last = k, v     with KV-shift, rounded
///   q, k = norm(q), norm(k)                                          RMS, with weights, rounded
///   q, k = channels i and i + D / 2 turned by seen theta^(-2i / D)   with rotary positions,
///   rounded log f = log(gamma + (1 - gamma) sigmoid(gate + bias))
///
/// q goes to its own memory, k, v and log f to the caches, and both counts grow by one.
struct AttentionAppendParams {
  int64_t batch = 0, heads = 0, key_heads = 0, head_dim = 0, capacity = 0;
  DType dtype = DType::kFloat32;    // of all data; 64-bit is not taken
  const void* projected = nullptr;  // [B, heads + 2 key_heads heads of D]: q, k, v
  int64_t stride_projected = 0;     // elements from one row to the next, here and below
  // KV-shift: null pointers where the layer has none.
  const void* mixes = nullptr;  // [B, 2 key_heads]: of k, of v
  int64_t stride_mixes = 0;
  void* last_k = nullptr;  // [B, key_heads, D], contiguous
  void* last_v = nullptr;
  // Weights of the norms of q and k, [heads, D] or [D]: null where there are no norms.
  const void* q_weight = nullptr;
  const void* k_weight = nullptr;
  bool weights_a_head = false;
  double eps = 0;
  double theta = 0;  // zero: no rotary positions
  // Forget gates: gate_heads is zero where the layer has none.
  int64_t gate_heads = 0;
  const void* gate_logits = nullptr;  // [B, gate_heads]; null: the bias alone
  int64_t stride_gate_logits = 0;
  const float* gate_bias = nullptr;  // [gate_heads]; null: log f = 0
  const float* gamma = nullptr;      // [gate_heads]; null: zero
  // What is written.
  void* q = nullptr;  // [B, heads, D], contiguous
  HeadSeries k, v;    // caches [B, capacity, key_heads, D]
  HeadSeries log_f;   // [B, capacity, gate_heads, 1], float
  int32_t* lengths = nullptr;
  int64_t* seen = nullptr;
};

}  // namespace tidegate::kernels::attention
