#pragma once

// What of gated_rnn torch's matrix products compute: the recurrence itself, in a loop, where the
// matrix is too large for a chip, and the matrix's gradient always.

#include <ATen/core/Tensor.h>

namespace tidegate::ops {

/// What the forward pass writes; `h_final` may be h0 when T = 1, `logits` undefined.
struct GatedRnnResults {
  at::Tensor h, h_final, logits;
};

/// What the backward pass writes; `h_before` is h_{t-1}, `bound_grads` [N, D], undefined without
/// gamma, sums to gamma's gradient.
struct GatedRnnGradients {
  at::Tensor dz, dx, h_before, dh0, bound_grads;
};

/// Padded sequences only. w, gamma, h0 and dh_final are of the state's type; all but w may be
/// undefined. Products in float32 follow torch's settings (TF32).
void scan_by_products(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w,
                      const at::Tensor& gamma, const at::Tensor& h0,
                      const GatedRnnResults& results);
void scan_back_by_products(const at::Tensor& dh, const at::Tensor& dh_final, const at::Tensor& x,
                           const at::Tensor& w, const at::Tensor& gamma, const at::Tensor& logits,
                           const at::Tensor& h, const at::Tensor& h0,
                           const GatedRnnGradients& results);

/// dW = sum over tokens of da_t h_{t-1}^T, in one product as a rule; `dz` is da, `h_before`
/// h_{t-1}, and the result is of w's dtype.
at::Tensor matrix_gradient(const at::Tensor& dz, const at::Tensor& h_before, const at::Tensor& w);

}  // namespace tidegate::ops
