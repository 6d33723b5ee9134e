#pragma once

// Nonlinear recurrences, whose gate reads the state through a matrix: parameters and CPU entry
// points. The CUDA entry points are in rnn_cuda.h.

#include <cstdint>

#include "kernels/common/parallel_for.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::rnn {

/// How a launch is made, found by the *_plan functions for one set of params and filled into
/// params.plan by the caller.
struct GatedRnnPlan {
  bool on_chip = false;              // CUDA: the matrix stays in registers and shared memory
  int vectors = 1;                   // sequences that share a block, or a cluster, side by side
  bool exchanges_in_memory = false;  // CUDA, on chip: blocks talk through the workspace, no cluster
  // CUDA: a product of a library's at every token beats these kernels. The caller's choice: a
  // launch with it set runs the plain kernel.
  bool by_products = false;
  int64_t first_sequence = 0;   // CUDA, on chip: of a launch, where one does not hold all of them
  int64_t partials = 0;         // backward: rows of dgamma_partial, one a sequence
  int64_t workspace_bytes = 0;  // scratch memory, 64-byte aligned, contents irrelevant
};

/// The minimal gated RNN ("Towards Understanding Gated Linear Recurrent Neural Networks", eq. 5-7):
///   a_t = z_t + W h_{t-1},   lambda_t = gamma + (1 - gamma) * sigmoid(a_t),
///   h_t = lambda_t * h_{t-1} + (1 - lambda_t) * x_t
/// with gamma = 0 there (a lower bound as "Hierarchically Gated Recurrent Neural Network" has it).
/// "State type" is state_dtype(x.dtype).
struct GatedRnnParams {
  SequenceLayout layout = {};   // never reversed
  int64_t channels = 0;         // D
  TimeSeries z = {};            // [B, T, D] in x.dtype or the state type; not read backward
  TimeSeries x = {};            // [B, T, D] float32, float64, bfloat16 or float16
  const void* w = nullptr;      // [D, D] contiguous, state type: row i makes a_t's channel i
  bool w_is_16_bit = false;     // w's numbers come from a 16-bit type
  const void* gamma = nullptr;  // [D] contiguous, state type, in [0, 1); null means zero
  TimeSeries h = {};            // [B, T, D] contiguous, in x.dtype; written forward, read backward
  TimeSeries logits = {};       // a_t: the same in the state type; written forward unless null
  const void* h0 = nullptr;     // [N, D] contiguous, state type; null means zero
  void* h_final = nullptr;  // [N, D] contiguous, state type; may be h0 itself when T <= 1 (a step)
  bool allow_clusters = true;  // false: as on a device without, for tests and comparisons
  bool allow_on_chip = true;   // false: the plain CUDA kernel, for tests and comparisons
  GatedRnnPlan plan = {};
  void* workspace = nullptr;  // plan.workspace_bytes
};

/// Gradients of GatedRnnParams: with g_t the gradient of h_t,
///   dx_t = (1 - lambda_t) g_t,   da_t = dz_t = (1 - gamma) s(a_t) s(-a_t) (h_{t-1} - x_t) g_t,
///   dgamma = sum over tokens of s(-a_t) (h_{t-1} - x_t) g_t,
/// but for W's, the sum over tokens of da_t h_{t-1}^T: one matrix product of dz and h_before.
struct GatedRnnBackwardParams {
  GatedRnnParams forward = {};  // x, w, gamma, h, logits, h0 as in the forward pass; of z the dtype
  TimeSeries dh = {};           // [B, T, D] in x.dtype
  const void* dh_final = nullptr;  // [N, D] contiguous, state type; null means zero
  TimeSeries dz = {};              // [B, T, D] contiguous, in z.dtype, written
  TimeSeries dx = {};              // the same in x.dtype
  TimeSeries h_before = {};        // the same in x.dtype: h_{t-1}, a sequence's h0 first
  void* dh0 = nullptr;             // [N, D] contiguous, state type, written
  void* dgamma_partial = nullptr;  // [N, D] contiguous, state type, written unless null
};

/// Why no kernel takes these params, or null: for the user's error, with the tensor and the value.
/// The text holds until the thread's next such call (kernels/common/limits.h). The only place that
/// states what the kernels cannot do; it reads no device memory.
const char* gated_rnn_unsupported(const GatedRnnParams& params);

GatedRnnPlan gated_rnn_plan_cpu(const GatedRnnParams& params);
void gated_rnn_forward_cpu(const GatedRnnParams& params, const ParallelFor& parallel);
void gated_rnn_backward_cpu(const GatedRnnBackwardParams& params, const ParallelFor& parallel);

}  // namespace tidegate::kernels::rnn
