#pragma once

// What the ops share that end in a product with a weight, y = rows weight^T + bias.
//
// The weight may be float32 beside 16-bit rows. It is rounded once a call then, and its gradient
// stays in the float32 in which products are summed: autograd of a rounded weight would round the
// gradient as well, and widen it again in a pass of its own. (Beside float64 rows it is widened,
// and its gradient is the float64 sum rounded.)

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "src/ops/checks.h"

namespace tidegate::ops {

/// Weight [N, K] and bias [N] beside rows of whatever K = `channels`, which are made of `data` and
/// have `dtype`.
void check_linear(const Reference& data, at::ScalarType dtype, const c10::SymInt& channels,
                  const at::Tensor& weight, const OptionalTensor& bias);

/// The sizes of `rows` with another last one.
c10::SymDimVector with_last_size(const at::Tensor& rows, const c10::SymInt& last);

/// A weight in the dtype of what it multiplies: itself where it has that. (The dispatcher must not
/// be asked for a copy then: below autograd no op may return what it is given.)
at::Tensor rounded_weight(const at::Tensor& weight, at::ScalarType dtype);

/// y of `rows` [..., K], in their dtype.
at::Tensor linear_product(const at::Tensor& rows, const at::Tensor& weight,
                          const OptionalTensor& bias);

/// dy [..., N] weight: the rows' gradient, in their dtype, which is that of `weight` here.
at::Tensor linear_row_gradient(const at::Tensor& dy, const at::Tensor& weight);

/// dy^T rows, summed and kept in `dtype`.
at::Tensor linear_weight_gradient(const at::Tensor& dy, const at::Tensor& rows,
                                  at::ScalarType dtype);

/// The sum of dy over its rows in `dtype`; [0] where that is none.
at::Tensor linear_bias_gradient(const at::Tensor& dy, std::optional<at::ScalarType> dtype);

/// What the backward pass has to know of weight and bias, whose rounded copies it is given.
struct SavedLinear {
  bool wants_rows, wants_weight;
  at::ScalarType weight_dtype;
  std::optional<at::ScalarType> bias_dtype;  // none where nobody asks for the gradient

  SavedLinear(bool wants_rows, const at::Tensor& weight, const OptionalTensor& bias);
  explicit SavedLinear(torch::autograd::AutogradContext* ctx);
  void save(torch::autograd::AutogradContext* ctx) const;
};

}  // namespace tidegate::ops
