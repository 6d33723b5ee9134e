#pragma once

// Gated linear attention, and HGRN2 as the case of it that makes its keys and decays from one
// logit: parameters and CPU entry points. The CUDA entry points are in gla_cuda.h.

#include <cstdint>

#include "kernels/common/parallel_for.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::gla {

/// What `gate` holds, and where keys and decays come from.
enum class GateKind : uint8_t {
  kLogDecay,  // log f_t itself, anything from -inf to 0; the keys are a tensor
  kLogit,     // x_t: f_t = gamma + (1 - gamma) sigmoid(x_t), k_t = (1 - gamma) sigmoid(-x_t)
};

/// What is applied to q or v as they are read.
enum class InputActivation : uint8_t { kNone, kSilu, kSigmoid };

/// Which kernels run.
enum class GlaPath : uint8_t {
  kAuto,        // the planner chooses
  kPlain,       // token by token: any dtype, any K and V; on CUDA also the kernels of one or two
                // tokens
  kTensorCore,  // sub-chunks of 16 tokens on tensor cores (CUDA; 16-bit data)
  kFp32Chunks,  // chunks of 16 to 64 tokens in fp32 without tensor cores (CUDA; float32 data)
};

/// Tensor cores take K and V up to kMostTensorCoreDim, backward only multiples of kTensorCoreDims:
/// ops pad others with channels that add nothing. Forward, any but rows that do not fit a tile
/// (forward_rows.h).
constexpr int64_t kTensorCoreDims = 16, kMostTensorCoreDim = 256;

/// Calls of at most this many tokens whose sizes or rows would need padding take the plain kernels,
/// in both directions: these take no longer there, and are exact to fp32. So do float32 calls of at
/// most as many tokens, whatever their sizes.
constexpr int64_t kMostUnpaddedTokens = 8;

/// Calls of at most this many tokens take the kernels of decoding, on CUDA.
constexpr int kStepTokens = 2;

/// What a launch needs besides its tensors. Found by the *_plan functions of gla_cuda.h (or
/// gla_plan_cpu below) for one set of params, filled into params.plan by the caller.
struct GlaPlan {
  GlaPath path = GlaPath::kPlain;
  int64_t segment_time = 0;     // tokens of a segment, where time is divided; 0: it is not
  int64_t segments = 0;         // an upper bound of their number over all sequences
  int64_t chunk_time = 0;       // kFp32Chunks: tokens of a chunk
  bool by_sequences = false;    // kFp32Chunks: outputs are made of whole sequences, not chunks
  int64_t partials = 0;         // P, rows of the partial sums that a backward kernel writes
  int64_t workspace_bytes = 0;  // scratch memory, 16-byte aligned, contents irrelevant
};

/// S_t = diag(f_t) S_{t-1} + k_t v_t^T,  o_t = scale * q_t^T S_t  for every head, S_{-1} = h0.
/// Anything of f in [0, 1], in any mixture, is exact: no kernel divides by a product of decays.
/// The step ops ask for T = 1 with h_final == h0.
/// The state type is state_dtype(q.dtype); float32, float64, bfloat16 and float16 data.
struct GlaParams {
  SequenceLayout layout = {};
  int64_t heads = 0;      // H
  int64_t key_dim = 0;    // K, of q, k and the rows of a state
  int64_t value_dim = 0;  // V, of v, o and the columns of a state
  int64_t channels = 0;   // H * K: the width of a row of partial sums
  double scale = 1;
  GateKind gate_kind = GateKind::kLogDecay;
  bool gate_per_head = false;  // kLogDecay only: one gate a head, [B, T, H, 1]
  InputActivation q_activation = InputActivation::kNone;
  InputActivation v_activation = InputActivation::kNone;
  HeadSeries q = {};            // [B, T, H, K]
  HeadSeries k = {};            // [B, T, H, K] in q.dtype; null data with kLogit
  HeadSeries v = {};            // [B, T, H, V] in q.dtype
  HeadSeries gate = {};         // [B, T, H, K or 1] in q.dtype or the state type
  const void* gamma = nullptr;  // kLogit: [H, K] contiguous, state type, in [0, 1); null means zero
  HeadSeries o = {};            // [B, T, H, V] in q.dtype, written; unused in the backward pass
  const void* h0 = nullptr;     // [N, H, K, V] contiguous, state type; null means zero
  void* h_final = nullptr;      // [N, H, K, V] state type, written; may be h0 itself when T <= 1
  GlaPath path = GlaPath::kAuto;  // a request, honoured or refused by the planner
  GlaPlan plan = {};
  void* workspace = nullptr;  // plan.workspace_bytes
};

/// Gradients of GlaParams. A backward pass reads the inputs of the forward pass and nothing else:
/// the states that it needs are computed again, into the workspace. Until they are written, the
/// gradients' rows are workspace too: they overlap no input.
struct GlaBackwardParams {
  GlaParams forward = {};          // inputs, h0; plan and workspace of the backward pass
  HeadSeries d_o = {};             // [B, T, H, V] in q.dtype; strides may be zero
  const void* dh_final = nullptr;  // [N, H, K, V] contiguous, state type; null means zero
  HeadSeries dq = {};              // [B, T, H, K] in q.dtype, written
  HeadSeries dk = {};              // [B, T, H, K] in q.dtype, written; null data with kLogit
  HeadSeries dv = {};              // [B, T, H, V] in q.dtype, written
  HeadSeries dgate = {};           // like gate, in gate.dtype, written; kLogit: through f and k
  void* dgamma_partial = nullptr;  // [P, H, K] state type, written; null when gamma is null
  void* dh0 = nullptr;             // [N, H, K, V] contiguous, state type, written
};

/// The largest K and V of any kernel.
constexpr int64_t kMaxHeadDim = 512;

/// Why no kernel takes these params, or null: for the user's error, with the tensor and the value.
/// The text holds until the thread's next such call (kernels/common/limits.h). This is the only
/// place that states what the kernels cannot do; what only one path cannot do (tensor_*_fits)
/// chooses another path. It reads no device memory.
const char* gla_unsupported(const GlaParams& params);

/// The plan of either direction on the CPU.
GlaPlan gla_plan_cpu(const GlaParams& params);

void gla_forward_cpu(const GlaParams& params, const ParallelFor& parallel);
void gla_backward_cpu(const GlaBackwardParams& params, const ParallelFor& parallel);

}  // namespace tidegate::kernels::gla
