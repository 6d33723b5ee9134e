#pragma once

// Element-wise gated linear recurrences over time: parameters and CPU entry points.
// The CUDA entry points are in scan_cuda.h.

#include <cstdint>

#include "kernels/common/parallel_for.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::scan {

enum class Activation : uint8_t { kNone, kSilu };

/// How a CUDA kernel divides the time axis among thread blocks.
enum class TimeSplit : uint8_t {
  kAuto,         // the planner chooses
  kSingleBlock,  // one block scans a whole sequence
  kMultiBlock,   // several blocks share one
};

/// What a launch needs besides its tensors: every choice that it depends on. Found by the *_plan
/// functions of scan_cuda.h (or *_plan_cpu below) for one set of params, filled into params.plan by
/// the caller. All but `partials` and `workspace_bytes` are CUDA's.
struct ScanPlan {
  bool sequential = false;  // one thread a channel, step by step
  TimeSplit split = TimeSplit::kSingleBlock;
  // D makes a channel tile, and rows of all tiles are aligned to four threads' packs. They are
  // copied 16 bytes a thread where, moreover, all inputs' packs have four bytes (not an fp32 gate
  // beside 16-bit data).
  bool wide_rows = false;
  bool one_block_per_sm = false;  // single-block: no multiprocessor has two blocks
  int blocks_per_sequence = 1;    // 1 where single-block, and may be 1 where multi-block
  int carry_group = 1;            // multi-block: warp groups that a state crosses at once
  int16_t warps = 1;              // of a block; multi-block: compute warps of a warp group
  // 16-bit data of which some row does not begin at a multiple of four bytes, or, where D makes a
  // tile and rows would be copied 16 bytes a thread, of sixteen.
  bool unaligned_rows = false;
  int8_t sharing = 0;           // 2^sharing sequences share a channel tile (shared_tails.h)
  int64_t partials = 0;         // P, rows of the partial sums that a backward kernel writes
  int64_t workspace_bytes = 0;  // scratch memory, 16-byte aligned, contents irrelevant
};

/// h_t = a_t * h_{t-1} + x_t, element by element over D channels, h_{-1} = h0.
/// "State type" is state_dtype(x.dtype). Complex numbers are interleaved (std::complex).
struct LinearScanParams {
  SequenceLayout layout = {};
  int64_t channels = 0;  // D
  TimeSeries x = {};     // [B, T, D]; the backward pass looks at its dtype alone
  TimeSeries a = {};     // [B, T, D] in x.dtype or the state type; constant: [D], both strides 0
  bool a_is_constant = false;
  TimeSeries h = {};         // [B, T, D] in x.dtype; written forward, read backward
  const void* h0 = nullptr;  // [N, D] contiguous, state type; null means zero
  void* h_final = nullptr;   // [N, D] contiguous, state type; may be h0 itself when T <= 1 (a step)
  TimeSplit time_split =
      TimeSplit::kAuto;  // for tests; kMultiBlock is kSingleBlock where it does not fit
  ScanPlan plan = {};
  void* workspace = nullptr;  // plan.workspace_bytes
};

/// Gradients of LinearScanParams (complex ones in torch's convention: dL/dRe + i dL/dIm).
struct LinearScanBackwardParams {
  LinearScanParams forward = {};  // a, h, h0 as in the forward pass; plan and workspace of backward
  TimeSeries dh = {};             // [B, T, D] in x.dtype
  const void* dh_final = nullptr;  // [N, D] contiguous, state type; null means zero
  TimeSeries dx = {};              // [B, T, D] in x.dtype, written
  TimeSeries da = {};              // [B, T, D] in a.dtype, written; unused when a is constant
  void* da_partial = nullptr;      // constant a: [P, D] state type, written; da = sum over P
  void* dh0 = nullptr;             // [N, D] contiguous, state type, written
};

/// HGRN's recurrence from pre-activations (arXiv 2311.04823, eq. 2):
///   lambda_t = gamma + (1 - gamma) * sigmoid(f_t)
///   h_t = lambda_t * exp(i theta) * h_{t-1} + (1 - lambda_t) * act(c_t)
/// Real (theta null): c and h are [B, T, D]. Complex: c and h are [B, T, 2D] = [Re | Im].
struct HgruParams {
  SequenceLayout layout = {};
  int64_t channels = 0;  // D
  Activation activation = Activation::kSilu;
  TimeSeries c = {};            // [B, T, D or 2D]: float32, float64, bfloat16 or float16
  TimeSeries f = {};            // [B, T, D] in c.dtype or the state type
  TimeSeries h = {};            // [B, T, D or 2D] in c.dtype; written forward, read backward
  const void* gamma = nullptr;  // [D] state type, in [0, 1); null means zero
  const void* theta = nullptr;  // [D] state type, radians a step; null means real
  const void* h0 = nullptr;     // [N, D or 2D] contiguous, state type; null means zero
  void* h_final = nullptr;      // [N, D or 2D] state type; may be h0 itself when T <= 1 (a step)
  TimeSplit time_split = TimeSplit::kAuto;
  ScanPlan plan = {};
  void* workspace = nullptr;  // plan.workspace_bytes
};

struct HgruBackwardParams {
  HgruParams forward = {};         // c, f, h, gamma, theta, h0 as in the forward pass
  TimeSeries dh = {};              // [B, T, D or 2D] in c.dtype
  const void* dh_final = nullptr;  // [N, D or 2D] contiguous, state type; null means zero
  TimeSeries dc = {};              // [B, T, D or 2D] in c.dtype, written
  TimeSeries df = {};              // [B, T, D] in f.dtype, written
  void* dgamma_partial = nullptr;  // [P, D] state type, written; null when gamma is null
  void* dtheta_partial = nullptr;  // [P, D] state type, written; null when theta is null
  void* dh0 = nullptr;             // [N, D or 2D] contiguous, state type, written
};

/// The linear recurrent unit's recurrence, whose decay and input scale are constant:
///   lambda = exp(-exp(nu_log) + i exp(theta_log))
///   h_t = lambda * h_{t-1} + exp(gamma_log) * x_t
/// Real (theta_log null): x and h are [B, T, D]. Complex: x and h are [B, T, 2D] = [Re | Im].
struct LruParams {
  SequenceLayout layout = {};
  int64_t channels = 0;             // D
  TimeSeries x = {};                // [B, T, D or 2D]: float32, float64, bfloat16 or float16
  TimeSeries h = {};                // [B, T, D or 2D] in x.dtype; written forward, read backward
  const void* nu_log = nullptr;     // [D] state type
  const void* theta_log = nullptr;  // [D] state type; null means real
  const void* gamma_log = nullptr;  // [D] state type
  const void* h0 = nullptr;         // [N, D or 2D] contiguous, state type; null means zero
  void* h_final = nullptr;  // [N, D or 2D] state type; may be h0 itself when T <= 1 (a step)
  TimeSplit time_split = TimeSplit::kAuto;
  ScanPlan plan = {};
  void* workspace = nullptr;  // plan.workspace_bytes
};

struct LruBackwardParams {
  LruParams forward = {};              // x, h, h0 and the parameters as in the forward pass
  TimeSeries dh = {};                  // [B, T, D or 2D] in x.dtype
  const void* dh_final = nullptr;      // [N, D or 2D] contiguous, state type; null means zero
  TimeSeries dx = {};                  // [B, T, D or 2D] in x.dtype, written
  void* dnu_log_partial = nullptr;     // [P, D] state type, written
  void* dtheta_log_partial = nullptr;  // [P, D] state type, written; null when real
  void* dgamma_log_partial = nullptr;  // [P, D] state type, written
  void* dh0 = nullptr;                 // [N, D or 2D] contiguous, state type, written
};

/// Why no kernel takes these params, or null: for the user's error, with the tensor and the value.
/// The text holds until the thread's next such call (kernels/common/limits.h). The only place that
/// states what the kernels cannot do; it reads no device memory.
const char* linear_scan_unsupported(const LinearScanParams& params);
const char* hgru_unsupported(const HgruParams& params);
const char* lru_unsupported(const LruParams& params);

/// CPU plans: partial sums, one row a sequence, so that results do not depend on the threads; for
/// lru also a workspace, for what follows from its parameters.
ScanPlan linear_scan_plan_cpu(const LinearScanParams& params);
ScanPlan hgru_plan_cpu(const HgruParams& params);
ScanPlan lru_plan_cpu(const LruParams& params);

void linear_scan_forward_cpu(const LinearScanParams& params, const ParallelFor& parallel);
void linear_scan_backward_cpu(const LinearScanBackwardParams& params, const ParallelFor& parallel);
void hgru_forward_cpu(const HgruParams& params, const ParallelFor& parallel);
void hgru_backward_cpu(const HgruBackwardParams& params, const ParallelFor& parallel);
void lru_forward_cpu(const LruParams& params, const ParallelFor& parallel);
void lru_backward_cpu(const LruBackwardParams& params, const ParallelFor& parallel);

}  // namespace tidegate::kernels::scan
