// add_norm: schema, checks, how tensors become the kernels' params, and a gradient of its own,
// which x and residual share where their dtypes are one.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/norms.h"
#include "src/ops/op.h"
#include "tidegate/ops/norm.h"

namespace tidegate::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const OptionalTensor kNoGate = std::nullopt;

struct AddNorm {
  static constexpr std::string_view kSchema =
      "add_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, "
      "str kind=\"rms\", float eps=1e-05) -> (Tensor, Tensor)";
  static constexpr std::string_view kData = "x";
  static constexpr CastRule kCasts[] = {{"x", Cast::kLower}, {"residual", Cast::kUnlessFloat}};

  const at::Tensor &x, &residual;
  const OptionalTensor &weight, &bias;
  std::string_view kind;
  double eps;

  TensorTuple<2> kernel() const;
  TensorTuple<2> meta() const;

  NormArguments arguments() const {
    return {weight, bias, kNoGate, kind, "silu", /*gate_first=*/false, eps};
  }
};

/// The gradients of x, residual, weight and bias. Where x has residual's dtype its gradient is that
/// of residual, and the first result is [0]: results of an op may not be one tensor.
struct AddNormBackward {
  static constexpr std::string_view kSchema =
      "add_norm_backward(Tensor dy, Tensor? dresidual_out, Tensor residual_out, Tensor? weight, "
      "Tensor? bias, str kind, float eps) -> (Tensor, Tensor, Tensor, Tensor)";

  const at::Tensor& dy;
  const OptionalTensor& dresidual_out;
  const at::Tensor& residual_out;
  const OptionalTensor &weight, &bias;
  std::string_view kind;
  double eps;

  TensorTuple<4> kernel() const;
  TensorTuple<4> meta() const;

  NormArguments arguments() const {
    return {weight, bias, kNoGate, kind, "silu", /*gate_first=*/false, eps};
  }
  void check() const;
  at::Tensor new_dx() const {
    return dy.scalar_type() == residual_out.scalar_type() ? no_gradient(dy) : new_like(dy);
  }
};

// ---- checks ----

TensorTuple<2> AddNorm::meta() const {
  constexpr const char* kOp = kOpName<AddNorm>;
  const Reference data{kOp, "x", x};
  check_norm(data, arguments(), x.scalar_type());
  check_gate(data, "residual", residual);
  if (x.scalar_type() == at::kDouble) {
    check_same_type(data, "residual", residual);
  }
  check_shape(kOp, "residual", residual, "that of x", x.sym_sizes());
  return {new_like(x), new_like(residual)};
}

void AddNormBackward::check() const {
  constexpr const char* kOp = kOpName<AddNormBackward>;
  const Reference data{kOp, "residual_out", residual_out};
  check_device(data, "dy", dy);
  check_norm(data, arguments(), dy.scalar_type());
  check_shape(kOp, "dy", dy, "that of residual_out", residual_out.sym_sizes());
  if (is_given(dresidual_out)) {
    check_like(data, "dresidual_out", *dresidual_out);
  }
}

TensorTuple<4> AddNormBackward::meta() const {
  check();
  return {new_dx(), new_like(residual_out), new_gradient(weight, dy), new_gradient(bias, dy)};
}

// ---- CPU and CUDA ----

TensorTuple<2> AddNorm::kernel() const {
  auto results = meta();
  KernelInputs inputs(x);
  auto params = norm_params(&inputs, residual, arguments(), x.scalar_type());
  params.addend = row_series(&inputs, x);
  params.y = row_series(&inputs, std::get<0>(results));
  params.sum = row_series(&inputs, std::get<1>(results));
  run_norm(kOpName<AddNorm>, params, x);
  return results;
}

TensorTuple<4> AddNormBackward::kernel() const {
  check();
  KernelInputs inputs(dy);
  kernels::norm::NormBackwardParams params;
  params.forward = norm_params(&inputs, residual_out, arguments(), dy.scalar_type());
  params.dy = row_series(&inputs, dy);
  params.dsum = row_series(&inputs, dresidual_out.value_or(at::Tensor()));
  const at::Tensor dx = new_dx(), dresidual = new_like(residual_out);
  params.dx = row_series(&inputs, dresidual);
  if (dy.scalar_type() != residual_out.scalar_type()) {
    params.daddend = row_series(&inputs, dx);
  }
  const auto [dweight, dbias] =
      run_norm_backward(kOpName<AddNormBackward>, params, arguments(), dy);
  return {dx, dresidual, dweight, dbias};
}

// ---- gradient ----

class AddNormFunction : public torch::autograd::Function<AddNormFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& x,
                               const at::Tensor& residual, const OptionalTensor& weight,
                               const OptionalTensor& bias, std::string_view kind, double eps) {
    ctx->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, residual_out] = Entry<AddNorm>::call(x, residual, weight, bias, kind, eps);
    ctx->save_for_backward(
        {residual_out, weight.value_or(at::Tensor()), bias.value_or(at::Tensor())});
    ctx->saved_data["kind"] = std::string(kind);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["dtype"] = static_cast<int64_t>(x.scalar_type());
    return {y, residual_out};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    const at::Tensor dy = gradients[0].defined()
                              ? gradients[0]
                              : at::zeros_like(saved[0], saved[0].options().dtype(dtype));
    auto [dx, dresidual, dweight, dbias] = Entry<AddNormBackward>::call(
        dy, optional(gradients[1]), saved[0], optional(saved[1]), optional(saved[2]),
        ctx->saved_data["kind"].toStringRef(), ctx->saved_data["eps"].toDouble());
    if (dtype == saved[0].scalar_type()) {
      dx = dresidual;
    }
    const auto of = [](const at::Tensor& parameter, const at::Tensor& gradient) {
      return parameter.defined() ? gradient : at::Tensor();
    };
    return {dx, dresidual, of(saved[1], dweight), of(saved[2], dbias), at::Tensor(), at::Tensor()};
  }
};

TensorTuple<2> add_norm_autograd(const at::Tensor& x, const at::Tensor& residual,
                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                 std::string_view kind, double eps) {
  Entry<AddNorm>::check_all_given(x, residual, weight, bias, kind, eps);
  const auto pointer = [](const OptionalTensor& t) { return is_given(t) ? &*t : nullptr; };
  const at::Tensor* const tensors[] = {&x, &residual, pointer(weight), pointer(bias)};
  check_differentiable(kOpName<AddNorm>, tensors);
  if (!asks_for_gradient(tensors)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Entry<AddNorm>::call(x, residual, weight, bias, kind, eps);
  }
  const variable_list results = AddNormFunction::apply(x, residual, weight, bias, kind, eps);
  return {results[0], results[1]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<AddNorm>(m);
  register_backward<AddNormBackward>(m);
  register_autograd<&add_norm_autograd>(m, kOpName<AddNorm>);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> add_norm(const at::Tensor& x, const at::Tensor& residual,
                                            const std::optional<at::Tensor>& weight,
                                            const std::optional<at::Tensor>& bias,
                                            std::string_view kind, double eps) {
  return ops::call_public<ops::AddNorm>(x, residual, weight, bias, kind, eps);
}

}  // namespace tidegate
