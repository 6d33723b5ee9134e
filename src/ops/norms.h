#pragma once

// What norm and add_norm check and launch alike.

#include <ATen/core/Tensor.h>

#include <string_view>

#include "kernels/norm/norm.h"
#include "src/ops/autocast.h"
#include "src/ops/checks.h"
#include "src/ops/results.h"
#include "src/ops/views.h"

namespace tidegate::ops {

/// What says how a row is normed, beside the rows themselves.
struct NormArguments {
  const OptionalTensor &weight, &bias, &gate;
  std::string_view kind, gate_activation;
  bool gate_first;
  double eps;
};

/// `name` is the argument's: "gate_activation" of a norm, "activation" of a gated linear unit.
kernels::norm::Activation parse_row_activation(const char* op, const char* name,
                                               std::string_view value, bool can_be_none);

/// The rows, `data`, weight, bias, gate and options; `dtype` is y's.
void check_norm(const Reference& data, const NormArguments& arguments, at::ScalarType dtype);

/// A tensor [..., D] as kernels take rows: up to three dimensions before the last.
kernels::HeadSeries row_series(KernelInputs* inputs, const at::Tensor& tensor);

/// Sizes and options, x, gate, weight and bias of a norm of x, with y in `dtype`; whatever else
/// there is follows.
kernels::norm::NormParams norm_params(KernelInputs* inputs, const at::Tensor& x,
                                      const NormArguments& arguments, at::ScalarType dtype);

/// One run forward, on the device of `like`.
void run_norm(const char* op, const kernels::norm::NormParams& params, const at::Tensor& like);

/// The sums over rows that a backward pass leaves: dweight and dbias, or no_gradient().
struct ParameterGradients {
  at::Tensor weight, bias;
};

/// One run backward, with partial sums, their memory and their end.
ParameterGradients run_norm_backward(const char* op, kernels::norm::NormBackwardParams params,
                                     const NormArguments& arguments, const at::Tensor& like);

/// The gradients of a norm without addend: of x, weight, bias and gate, or no_gradient().
struct NormGradients {
  at::Tensor x, weight, bias, gate;
};

/// `y`: the norm's result is written there again, if it is defined: like dy, contiguous.
NormGradients norm_gradients(const char* op, const at::Tensor& dy, const at::Tensor& x,
                             const NormArguments& arguments, const at::Tensor& y = {});

/// The type of a norm's result inside autocast, where it is not asked for; no value where that is
/// x's own. Beside a gate x goes to autocast's type itself, otherwise a float32 x is not rounded
/// before it is normed.
struct AutocastNorm {
  at::Tensor x;
  OptionalTensor weight, bias, gate;
  std::optional<at::ScalarType> dtype;

  AutocastNorm(const AutocastGuard& autocast, const at::Tensor& x, const OptionalTensor& weight,
               const OptionalTensor& bias, const OptionalTensor& gate,
               std::optional<at::ScalarType> dtype);
};

}  // namespace tidegate::ops
