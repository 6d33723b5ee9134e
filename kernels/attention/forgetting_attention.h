#pragma once

// Forgetting attention: softmax attention whose scores lose the forget gates between a key and the
// query. Parameters and CPU entry points. The CUDA entry points are in
// forgetting_attention_cuda.h.

#include <cstdint>

#include "kernels/common/parallel_for.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::attention {

/// Which kernels run.
enum class AttentionPath : uint8_t {
  kAuto,        // the planner chooses
  kPlain,       // CUDA cores, sums in the state's type: any dtype, any D
  kTensorCore,  // tiles on tensor cores (CUDA; 16-bit data)
};

/// Which tiles a pass on tensor cores takes: the portable kernels' (cuda/tile_configs.cuh), or
/// those of the kernels for Hopper (cuda/hopper/).
enum class AttentionTile : int {
  kUsual,       // portable
  kSingleTile,  // portable, forward: rows of any width and alignment, up to kSingleTileTime tokens
  kWide,        // portable, forward: more queries and keys, where there are many of both
  kSmall,       // portable, backward: for chips that give a block little shared memory
  kHopper,      // those for compute capability 9.0
};

/// What a launch needs besides its tensors. Found by the *_plan functions of
/// forgetting_attention_cuda.h (or the *_plan_cpu functions below) for one set of params, filled
/// into params.plan by the caller.
struct ForgettingAttentionPlan {
  AttentionPath path = AttentionPath::kPlain;
  /// Where path is kTensorCore.
  AttentionTile tile = AttentionTile::kUsual;
  int64_t splits = 0;           // a step: splits of the cache, whose results are combined
  bool in_clusters = false;     // a step on CUDA: splits are blocks of a cluster, one launch
  int64_t workspace_bytes = 0;  // scratch memory, 16-byte aligned, contents irrelevant
};

/// For every sequence and query head h, with g = h / (Hq / Hkv) the head of its keys and values,
/// query i at position p = i + Tk - Tq of its sequence, and c = cumsum(log_f) over time,
///
///   s_ij = scale * q_i . k_j + c_p - c_j      for j in [max(0, p - window + 1), p]
///   lse_i = log(sum over j of exp(s_ij)),  o_i = sum over j of exp(s_ij - lse_i) v_j
///
/// c_p - c_j is the sum of log_f over (j, p]: the first token's gate is in no sum, and a sequence's
/// gates are in no other's. log_f below kLeastLogGate, -infinity included, counts as that.
/// A query without keys (more queries than keys) has o = 0 and lse = -infinity.
///
/// "State type" is state_dtype(q.dtype); float32, float64, bfloat16 and float16 data. Sums of gates
/// over thousands of tokens are kept in float64, whatever the data: next to 10^5, single precision
/// has lost the digits that a difference of two neighbours consists of.
struct ForgettingAttentionParams {
  SequenceLayout layout = {};      // of queries: B, Tq, N, offsets; never reversed
  SequenceLayout key_layout = {};  // of keys, values and gates: B, Tk, N, offsets
  int64_t heads = 0;               // Hq
  int64_t key_heads = 0;           // Hkv, which divides Hq
  int64_t head_dim = 0;            // D
  int64_t channels = 0;            // Hq * D
  double scale = 1;                // > 0
  int64_t window = 0;              // keys that a query sees at most, its own included; 0: no limit
  double prune = 0;                // bound on the weight that a row may drop; 0: none is dropped
  bool deterministic = false;      // the backward pass: the same bits from run to run
  HeadSeries q = {};               // [B, Tq, Hq, D]
  HeadSeries k = {};               // [B, Tk, Hkv, D] in q.dtype
  HeadSeries v = {};               // [B, Tk, Hkv, D] in q.dtype
  HeadSeries log_f = {};           // [B, Tk, Hq], any strides, in q.dtype or the state type
  HeadSeries o = {};               // [B, Tq, Hq, D] in q.dtype, written; backward: read
  void* lse = nullptr;             // [B, Hq, Tq] contiguous, state type, written; backward: read
  AttentionPath path = AttentionPath::kAuto;  // a request, honoured or refused by the planner
  ForgettingAttentionPlan plan = {};
  void* workspace = nullptr;  // plan.workspace_bytes
};

/// Gradients of ForgettingAttentionParams, from the inputs, o and lse.
/// With P_ij = exp(s_ij - lse_i) and dS_ij = P_ij (do_i . v_j - do_i . o_i + dlse_i),
/// dlog_f_u is the sum of dS_ij over j < u <= p. It is formed from sums of dS over rows and over
/// columns, one scan over time at the end: see docs/numerics_ops.md. In the default pass both are
/// sums of the same values, and so they are in a deterministic pass of the Hopper kernels, which
/// puts additions in order. That of the portable tensor-core kernels computes dS twice, equal up to
/// fp32 rounding (pruned: up to what is dropped).
struct ForgettingAttentionBackwardParams {
  ForgettingAttentionParams forward = {};  // inputs, o, lse; plan and workspace of this pass
  HeadSeries d_o = {};                     // [B, Tq, Hq, D] in q.dtype; strides may be zero
  const void* dlse = nullptr;              // [B, Hq, Tq] contiguous, state type; null means zero
  HeadSeries dq = {};                      // [B, Tq, Hq, D] in q.dtype, written
  HeadSeries dk = {};                      // [B, Tk, Hkv, D] in q.dtype, written
  HeadSeries dv = {};                      // [B, Tk, Hkv, D] in q.dtype, written
  HeadSeries dlog_f = {};                  // [B, Tk, Hq] in log_f.dtype, written
};

/// One query a batch row, the last of lengths[b] tokens, against a cache.
///
/// With `prune`, the oldest keys are left out if their weights are proven to be below prune
/// together. The query's score of its own key is known, and scale |q| key_norms is no less than
/// that of any key before its gates are added; so exp(scale |q| key_norms + c_p - c_j - own score)
/// bounds key j's weight, and only falls from a key to an older one. Where it is below prune /
/// capacity for every query head of a head of keys, that key and all older ones are not read.
struct ForgettingAttentionStepParams {
  SequenceLayout layout = {};  // B, 1, B: the queries
  int64_t heads = 0;           // Hq
  int64_t key_heads = 0;       // Hkv
  int64_t head_dim = 0;        // D
  int64_t channels = 0;        // Hq * D
  int64_t capacity = 0;        // Tmax, the cache's time axis
  double scale = 1;
  int64_t window = 0;
  HeadSeries q = {};      // [B, 1, Hq, D]
  HeadSeries k = {};      // [B, Tmax, Hkv, D] in q.dtype
  HeadSeries v = {};      // [B, Tmax, Hkv, D] in q.dtype
  HeadSeries log_f = {};  // [B, Tmax, Hq], any strides, state type: each token's own gate
  const int32_t* lengths = nullptr;  // [B], where the data lives; clamped to [0, Tmax]
  double prune = 0;                  // bound on the weight that a row may drop; 0: none is dropped
  HeadSeries key_norms = {};  // [B, 1, Hkv, 1], any strides, state type: at least the length of
                              // each head's longest key; read where prune is above 0
  HeadSeries o = {};          // [B, 1, Hq, D] in q.dtype, written
  AttentionPath path = AttentionPath::kAuto;
  ForgettingAttentionPlan plan = {};
  void* workspace = nullptr;
  const int32_t* first_keys = nullptr;  // on CUDA, by the launch: of the workspace, or null
};

/// What lies in a step's workspace: the oldest key that pruning leaves of each head [B, Hkv], where
/// there is pruning; then partial results of splits, `partials` bytes of them.
struct StepWorkspace {
  int64_t partials_at = 0;  // bytes from the start
  int64_t bytes = 0;

  StepWorkspace(const ForgettingAttentionStepParams& params, int64_t partials) {
    const int64_t first_keys =
        params.layout.batch * params.key_heads * static_cast<int64_t>(sizeof(int32_t));
    if (params.prune > 0) partials_at = (first_keys + 15) / 16 * 16;
    bytes = partials_at + partials;
  }
};

/// By how much a bound of scores is widened for what their sums are rounded by.
constexpr double kScoreSlack = 1.0001;

/// The largest D of any kernel.
constexpr int64_t kMaxAttentionHeadDim = 256;

/// Up to these, a forward pass on CUDA tensor cores reads and writes rows as they are: of any head
/// dimension, aligned to an element.
constexpr int kSingleTileTime = 128;    // tokens of all queries and of all keys of a batch row
constexpr int kSingleTileHeadDim = 63;  // D: a row of 128 bytes holds one misaligned by an element

/// exp of this is zero in every type, and a sum of 10^6 of them in float64 still has four digits
/// after the point.
constexpr double kLeastLogGate = -1e5;

/// Why no kernel takes these params, or null: for the user's error, with the tensor and the value.
/// The text holds until the thread's next such call (kernels/common/limits.h). The only place that
/// states what the kernels cannot do, except the limits of a launch's grid; it reads no device
/// memory. The gradients' dtypes and strides are the caller's affair.
const char* forgetting_attention_unsupported(const ForgettingAttentionParams& params);
const char* forgetting_attention_step_unsupported(const ForgettingAttentionStepParams& params);

ForgettingAttentionPlan forgetting_attention_plan_cpu(const ForgettingAttentionParams& params);
ForgettingAttentionPlan forgetting_attention_backward_plan_cpu(
    const ForgettingAttentionParams& params);
ForgettingAttentionPlan forgetting_attention_step_plan_cpu(
    const ForgettingAttentionStepParams& params);

void forgetting_attention_forward_cpu(const ForgettingAttentionParams& params,
                                      const ParallelFor& parallel);
void forgetting_attention_backward_cpu(const ForgettingAttentionBackwardParams& params,
                                       const ParallelFor& parallel);
void forgetting_attention_step_cpu(const ForgettingAttentionStepParams& params,
                                   const ParallelFor& parallel);

}  // namespace tidegate::kernels::attention
