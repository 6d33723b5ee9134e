#include "src/ops/norms.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <vector>

#include "src/ops/launch.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/norm/norm_cuda.h"
#endif

namespace tidegate::ops {
namespace {

using kernels::norm::Activation;
using kernels::norm::NormKind;

NormKind parse_norm_kind(const char* op, std::string_view kind) {
  TORCH_CHECK(kind == "layer" || kind == "rms", op, R"(: kind must be "layer" or "rms", got ")",
              kind, "\"");
  return kind == "layer" ? NormKind::kLayer : NormKind::kRms;
}

/// A weight or bias: [D], or [H, D] of x [..., H, D].
void check_norm_parameter(const Reference& data, const char* name, const OptionalTensor& parameter,
                          at::ScalarType dtype) {
  if (!is_given(parameter)) {
    return;
  }
  if (parameter->scalar_type() == dtype) {  // y's dtype will do beside a wider x
    check_device(data, name, *parameter);
  } else {
    check_gate(data, name, *parameter);
  }
  const at::Tensor& x = data.tensor;
  if (parameter->dim() == 2 && x.dim() >= 2) {
    check_shape(data.op, name, *parameter, "[H, D]", {x.sym_size(-2), x.sym_size(-1)});
  } else {
    check_shape(data.op, name, *parameter, "[D]", {x.sym_size(-1)});
  }
}

/// Kernels take a parameter in y's dtype or the state's.
at::Tensor parameter_for_kernel(const OptionalTensor& parameter, at::ScalarType dtype) {
  if (!is_given(parameter)) {
    return {};
  }
  return parameter->scalar_type() == dtype ? parameter->contiguous()
                                           : contiguous_as(parameter, state_dtype(dtype));
}

int64_t heads_of(const OptionalTensor& parameter) {
  return is_given(parameter) && parameter->dim() == 2 ? parameter->size(0) : 1;
}

}  // namespace

Activation parse_row_activation(const char* op, const char* name, std::string_view value,
                                bool can_be_none) {
  const bool is_none = can_be_none && value == "none";
  TORCH_CHECK(value == "silu" || value == "sigmoid" || is_none, op, ": ", name,
              can_be_none ? R"( must be "silu", "sigmoid" or "none", got ")"
                          : R"( must be "silu" or "sigmoid", got ")",
              value, "\"");
  return is_none ? Activation::kNone : value == "silu" ? Activation::kSilu : Activation::kSigmoid;
}

void check_norm(const Reference& data, const NormArguments& arguments, at::ScalarType dtype) {
  const auto& [weight, bias, gate, kind, gate_activation, gate_first, eps] = arguments;
  check_data_dtype(data, ComplexData::kRefused);
  const at::ScalarType own = data.tensor.scalar_type();
  TORCH_CHECK(data.tensor.dim() > 0, data.op, ": ", data.name, " must have shape [..., D], got []");
  const bool is_narrower = own == at::kFloat && (dtype == at::kBFloat16 || dtype == at::kHalf);
  TORCH_CHECK(dtype == own || (is_narrower && !is_given(gate)), data.op, ": dtype must be ",
              dtype_name(own), own != at::kFloat || is_given(gate) ? "" : ", bfloat16 or float16",
              " (", data.name, " is ", dtype_name(own), is_given(gate) ? ", with a gate" : "",
              "), got ", dtype_name(dtype));
  check_norm_parameter(data, "weight", weight, dtype);
  check_norm_parameter(data, "bias", bias, dtype);
  if (is_given(weight) && is_given(bias)) {
    TORCH_CHECK(weight->dim() == bias->dim(), data.op, ": bias must have ", weight->dim(),
                " dimensions like weight, got ", bias->dim());
  }
  if (is_given(gate)) {
    check_like(data, "gate", *gate);
  }
  parse_norm_kind(data.op, kind);
  parse_row_activation(data.op, "gate_activation", gate_activation, /*can_be_none=*/false);
  TORCH_CHECK(eps >= 0 && std::isfinite(eps), data.op, ": eps must be 0 or more and finite, got ",
              eps);
}

kernels::HeadSeries row_series(KernelInputs* inputs, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return {};
  }
  const at::Tensor rows = inputs->keep(in_rows(tensor));
  if (rows.dim() > 4) {
    return head_series(inputs->keep(rows.flatten(0, rows.dim() - 4)));
  }
  // head_series() of as many dimensions of one in front as are missing: decoding, whose rows are
  // few, would spend much of its time on making these views.
  int64_t strides[3] = {};  // of heads, time, batch
  int64_t stride = rows.size(-1);
  for (int64_t d = 0; d < 3; ++d) {
    const bool is_there = d + 1 < rows.dim();
    const int64_t size = is_there ? rows.size(-2 - d) : 1;
    strides[d] = size > 1 ? rows.stride(-2 - d) : stride;
    stride = strides[d] * size;
  }
  return {rows.data_ptr(), strides[2], strides[1], strides[0], kernel_dtype(rows.scalar_type())};
}

kernels::norm::NormParams norm_params(KernelInputs* inputs, const at::Tensor& x,
                                      const NormArguments& arguments, at::ScalarType dtype) {
  kernels::norm::NormParams params;
  params.channels = x.size(-1);
  params.heads = x.dim() > 1 ? x.size(-2) : 1;
  params.time = x.dim() > 2 ? x.size(-3) : 1;
  params.batch = 1;
  for (int64_t d = 0; d + 3 < x.dim(); ++d) {
    params.batch *= x.size(d);
  }
  params.kind = parse_norm_kind("norm", arguments.kind);
  params.activation =
      parse_row_activation("norm", "gate_activation", arguments.gate_activation, false);
  params.gate_first = arguments.gate_first;
  params.eps = arguments.eps;
  params.x = row_series(inputs, x);
  params.gate = row_series(inputs, arguments.gate.value_or(at::Tensor()));
  params.y.dtype = kernel_dtype(dtype);
  const at::Tensor weight = inputs->keep(parameter_for_kernel(arguments.weight, dtype));
  const at::Tensor bias = inputs->keep(parameter_for_kernel(arguments.bias, dtype));
  params.weight = data_or_null(weight);
  params.bias = data_or_null(bias);
  if (weight.defined()) {
    params.weight_dtype = kernel_dtype(weight.scalar_type());
  }
  if (bias.defined()) {
    params.bias_dtype = kernel_dtype(bias.scalar_type());
  }
  params.weight_heads = std::max(heads_of(arguments.weight), heads_of(arguments.bias));
  return params;
}

void run_norm([[maybe_unused]] const char* op, const kernels::norm::NormParams& params,
              const at::Tensor& like) {
  const c10::DeviceGuard guard(like.device());
#ifdef TIDEGATE_WITH_CUDA
  if (like.is_cuda()) {
    check_launch(op, "launch", kernels::norm::norm_forward(params, current_stream(like.device())));
    return;
  }
#endif
  kernels::norm::norm_cpu(params, torch_threads());
}

ParameterGradients run_norm_backward(const char* op, kernels::norm::NormBackwardParams params,
                                     const NormArguments& arguments, const at::Tensor& like) {
  const c10::DeviceGuard guard(like.device());
  const auto& [weight, bias, gate, kind, gate_activation, gate_first, eps] = arguments;
#ifdef TIDEGATE_WITH_CUDA
  if (like.is_cuda()) {
    check_launch(op, "plan", kernels::norm::norm_backward_plan(params, &params.plan));
  } else
#endif
  {
    params.plan = kernels::norm::norm_backward_plan_cpu(params);
  }
  const int64_t width = params.forward.weight_heads * params.forward.channels;
  const auto partial_sums = [&](const OptionalTensor& parameter) {
    return is_given(parameter)
               ? matrix(params.plan.partials, width, state_dtype(like.scalar_type()), like)
               : at::Tensor();
  };
  const std::vector<at::Tensor> partials = {partial_sums(weight), partial_sums(bias)};
  params.dweight = data_or_null(partials[0]);
  params.dbias = data_or_null(partials[1]);
  const at::Tensor scratch = workspace(params.plan.workspace_bytes, like);
  params.workspace = data_or_null(scratch);
#ifdef TIDEGATE_WITH_CUDA
  if (like.is_cuda()) {
    check_launch(op, "launch", kernels::norm::norm_backward(params, current_stream(like.device())));
  } else
#endif
  {
    kernels::norm::norm_backward_cpu(params, torch_threads());
  }
  const std::vector<at::Tensor> sums = sum_rows(op, partials);
  const auto gradient = [&](const OptionalTensor& parameter, const at::Tensor& sum) {
    return parameter_gradient(parameter, sum.defined() ? sum.view(parameter->sizes()) : sum, like);
  };
  return {gradient(weight, sums[0]), gradient(bias, sums[1])};
}

NormGradients norm_gradients(const char* op, const at::Tensor& dy, const at::Tensor& x,
                             const NormArguments& arguments, const at::Tensor& y) {
  const OptionalTensor& gate = arguments.gate;
  KernelInputs inputs(x);
  kernels::norm::NormBackwardParams params;
  params.forward = norm_params(&inputs, x, arguments, dy.scalar_type());
  if (y.defined()) {
    params.forward.y = row_series(&inputs, y);
  }
  params.dy = row_series(&inputs, dy);
  const at::Tensor dx = new_like(x);
  const at::Tensor dgate = is_given(gate) ? new_like(*gate) : no_gradient(dy);
  params.dx = row_series(&inputs, dx);
  if (is_given(gate)) {
    params.dgate = row_series(&inputs, dgate);
  }
  const auto [dweight, dbias] = run_norm_backward(op, params, arguments, dy);
  return {dx, dweight, dbias, dgate};
}

AutocastNorm::AutocastNorm(const AutocastGuard& autocast, const at::Tensor& given_x,
                           const OptionalTensor& given_weight, const OptionalTensor& given_bias,
                           const OptionalTensor& given_gate,
                           std::optional<at::ScalarType> given_dtype)
    : dtype(given_dtype) {
  const auto unless_float = [&](const OptionalTensor& tensor) -> OptionalTensor {
    return is_given(tensor) ? autocast.cast_unless_float(*tensor) : tensor;
  };
  x = is_given(given_gate) ? autocast.cast(given_x) : autocast.cast_unless_float(given_x);
  weight = unless_float(given_weight);
  bias = unless_float(given_bias);
  gate = is_given(given_gate) ? OptionalTensor(autocast.cast(*given_gate)) : given_gate;
  const bool is_lowered = x.scalar_type() == at::kFloat || x.scalar_type() == autocast.dtype();
  if (!dtype && is_lowered) {
    dtype = autocast.dtype();
  }
}

}  // namespace tidegate::ops
