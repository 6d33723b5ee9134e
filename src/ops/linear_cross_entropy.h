#pragma once

// Linear cross-entropy in chunks of rows: two or three matrix products and a kernel a chunk.

#include <ATen/core/Tensor.h>

#include "kernels/loss/cross_entropy.h"
#include "src/ops/checks.h"

namespace tidegate::ops {

/// What a call reads, checked. x [..., D], weight [V, D], labels int32 or int64 of x's shape
/// without D, bias [V] or none.
struct HeadInputs {
  const at::Tensor &x, &weight, &labels;
  const OptionalTensor& bias;
  int64_t ignore_index;
  double label_smoothing, z_loss;
};

/// Which gradients a call makes.
struct HeadGradients {
  bool x = false, weight = false, bias = false;

  bool any() const { return x || weight || bias; }
};

/// losses [N] in the state's type of x, N labels in x's order. dx is like x and contiguous, dweight
/// [V, D] and dbias [V] are in the state's type, unscaled sums over the rows; undefined where they
/// were not asked for.
struct HeadResults {
  at::Tensor losses, dx, dweight, dbias;
};

/// Computes a call, chunk by chunk: the losses if `losses`, and the gradients that are asked for.
/// `row_gradient`, [N] contiguous in the state's type, multiplies each row's gradient;
/// undefined: 1.
HeadResults linear_cross_entropy_chunks(const char* op, const HeadInputs& inputs,
                                        HeadGradients gradients, bool losses,
                                        const at::Tensor& row_gradient);

/// The sum or the mean of `losses`, and what they were multiplied by, both [] in their type.
std::tuple<at::Tensor, at::Tensor> sum_of_losses(const char* op, const HeadInputs& inputs,
                                                 const at::Tensor& losses, bool mean);

}  // namespace tidegate::ops
