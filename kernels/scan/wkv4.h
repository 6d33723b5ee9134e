#pragma once

// RWKV-4's token mixing: parameters and CPU entry points. The CUDA entry points are in
// scan_cuda.h, the mathematics is in docs/kernels/wkv4.md.

#include <cstdint>

#include "kernels/common/parallel_for.h"
#include "kernels/common/time_series.h"
#include "kernels/scan/scan.h"

namespace tidegate::kernels::scan {

/// Tokens from one saved state to the next: a backward pass computes what lies between them again.
constexpr int64_t kWkv4SavedEvery = 8;

/// Rows of saved states of a batch row of `time` tokens. Row i belongs to the token among
/// [i, i + 1) * kWkv4SavedEvery, if any, that is a whole number of such chunks from its sequence's
/// end, where the backward pass starts, and not its first. (Units of one instruction set call it,
/// so it must not have a body of its own.)
[[gnu::always_inline]] constexpr int64_t wkv4_saved_rows(int64_t time) {
  return time / kWkv4SavedEvery + 1;
}

/// The scaling exponent of a state without weight: below every key that has one. A k of -inf is a
/// token without weight.
constexpr float kWkv4NoWeight = -1e30f;

/// Beside an empty state a token is the whole mean, however small its weight: the logarithm of that
/// weight, with its bonus, counts as at least this, from where no digit of the token is lost.
constexpr float kWkv4LeastBesideEmpty = -40.0f;

/// The gradient of an empty state, as it was given, is that at its first token's exponent times
/// exp(m - that exponent), which no float holds for keys below -88. The logarithm of that factor
/// counts as at most this, and the gradient as at most the largest number, so that it is not NaN
/// where it overflows.
template <class R>
constexpr R kWkv4LargestGradientScale = sizeof(R) == 8 ? R(700) : R(86);

/// Weighted means whose weights decay, the newest one with a bonus (RWKV-4, arXiv 2305.13048):
///   y_t = exp(-w) y_{t-1} + exp(k_t) v_t,   z_t = exp(-w) z_{t-1} + exp(k_t)
///   o_t = (y_{t-1} + exp(u + k_t) v_t) / (z_{t-1} + exp(u + k_t))
/// A state is (y, z, m) with y and z scaled by exp(-m). The scaling exponent m is whatever keeps
/// the scaled numbers near one; a state of zeros is empty, whatever its m.
struct Wkv4Params {
  SequenceLayout layout = {};   // never reversed
  int64_t channels = 0;         // D
  TimeSeries k = {};            // [B, T, D]: float32, float64, bfloat16 or float16
  TimeSeries v = {};            // [B, T, D] in k.dtype
  TimeSeries o = {};            // [B, T, D] in k.dtype, written; unused in the backward pass
  const void* w = nullptr;      // [D] state type, rates a step in natural logarithms, at least 0
  const void* u = nullptr;      // [D] state type, natural logarithm of the bonus
  const void* state = nullptr;  // [N, 3, D] contiguous, state type; null means empty
  void* final_state =
      nullptr;  // [N, 3, D] contiguous, state type; may be `state` itself when T <= 1 (a step)
  void* saved = nullptr;  // [B, wkv4_saved_rows(T), 3, D] state type: states that enter tokens,
                          // written forward unless null, read backward by the same device's
                          // kernels alone (on CUDA their exponents may be binary logarithms)
  TimeSplit time_split =
      TimeSplit::kAuto;  // for tests; kMultiBlock is kSingleBlock where it does not fit
  ScanPlan plan = {};
  void* workspace = nullptr;  // plan.workspace_bytes
};

/// Gradients of Wkv4Params. Scaling exponents are constants: the gradient of m is zero.
struct Wkv4BackwardParams {
  Wkv4Params forward = {};  // all but o; final_state as the forward pass wrote it, for its exponent
  TimeSeries grad_o = {};   // [B, T, D] in k.dtype
  const void* dfinal_state = nullptr;  // [N, 3, D] contiguous, state type; null means zero
  TimeSeries dk = {};                  // [B, T, D] in k.dtype, written
  TimeSeries dv = {};                  // [B, T, D] in k.dtype, written
  void* dw_partial = nullptr;          // [P, D] state type, written; dw = sum over P
  void* du_partial = nullptr;          // [P, D] state type, written; du = sum over P
  void* dstate = nullptr;              // [N, 3, D] contiguous, state type, written
};

/// Why no kernel takes these params, or null: for the user's error, with the tensor and the value.
/// The text holds until the thread's next such call (kernels/common/limits.h).
const char* wkv4_unsupported(const Wkv4Params& params);

/// Partial sums only, one row a sequence, so that results do not depend on the threads.
ScanPlan wkv4_plan_cpu(const Wkv4Params& params);

void wkv4_forward_cpu(const Wkv4Params& params, const ParallelFor& parallel);
void wkv4_backward_cpu(const Wkv4BackwardParams& params, const ParallelFor& parallel);

}  // namespace tidegate::kernels::scan
