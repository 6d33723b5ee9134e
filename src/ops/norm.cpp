// norm: schema, checks, how tensors become the kernels' params. add_norm.cpp has the residual
// connection before it.

#include "tidegate/ops/norm.h"

#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/norms.h"
#include "src/ops/op.h"

namespace tidegate::ops {
namespace {

struct Norm {
  static constexpr std::string_view kSchema =
      "norm(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? gate=None, "
      "str kind=\"rms\", str gate_activation=\"silu\", bool gate_first=False, float eps=1e-05, "
      "ScalarType? dtype=None) -> Tensor";
  static constexpr std::string_view kResults[] = {"y"};
  static constexpr std::string_view kData = "x";

  const at::Tensor& x;
  const OptionalTensor &weight, &bias, &gate;
  std::string_view kind, gate_activation;
  bool gate_first;
  double eps;
  std::optional<at::ScalarType> dtype;

  std::tuple<at::Tensor> kernel() const;
  std::tuple<at::Tensor> meta() const;

  at::ScalarType result_dtype() const { return dtype.value_or(x.scalar_type()); }
  NormArguments arguments() const {
    return {weight, bias, gate, kind, gate_activation, gate_first, eps};
  }
};

/// The gradients of x, weight, bias and gate.
struct NormBackward {
  static constexpr std::string_view kSchema =
      "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? gate, str kind, "
      "str gate_activation, bool gate_first, float eps) -> (Tensor, Tensor, Tensor, Tensor)";
  static constexpr std::string_view kGradientLike = "x";

  const at::Tensor &dy, &x;
  const OptionalTensor &weight, &bias, &gate;
  std::string_view kind, gate_activation;
  bool gate_first;
  double eps;

  TensorTuple<4> kernel() const;
  TensorTuple<4> meta() const;

  NormArguments arguments() const {
    return {weight, bias, gate, kind, gate_activation, gate_first, eps};
  }
  void check() const;
};

// ---- checks ----

std::tuple<at::Tensor> Norm::meta() const {
  check_norm({kOpName<Norm>, "x", x}, arguments(), result_dtype());
  return {new_like(x, result_dtype())};
}

void NormBackward::check() const {
  constexpr const char* kOp = kOpName<NormBackward>;
  const Reference data{kOp, "x", x};
  check_device(data, "dy", dy);
  check_norm(data, arguments(), dy.scalar_type());
  check_shape(kOp, "dy", dy, "that of x", x.sym_sizes());
}

TensorTuple<4> NormBackward::meta() const {
  check();
  return {new_like(x), new_gradient(weight, dy), new_gradient(bias, dy),
          is_given(gate) ? new_like(*gate) : no_gradient(dy)};
}

// ---- CPU and CUDA ----

std::tuple<at::Tensor> Norm::kernel() const {
  auto result = meta();
  KernelInputs inputs(x);
  auto params = norm_params(&inputs, x, arguments(), result_dtype());
  params.y = row_series(&inputs, std::get<0>(result));
  run_norm(kOpName<Norm>, params, x);
  return result;
}

TensorTuple<4> NormBackward::kernel() const {
  check();
  const NormGradients grads = norm_gradients(kOpName<NormBackward>, dy, x, arguments());
  return {grads.x, grads.weight, grads.bias, grads.gate};
}

// ---- autocast ----

/// y goes to autocast's type, since what follows a norm is a matrix product, but a float32 x is not
/// rounded before it is normed: a residual stream keeps its digits. Beside a gate x goes along.
std::tuple<at::Tensor> norm_autocast(const at::Tensor& x, const OptionalTensor& weight,
                                     const OptionalTensor& bias, const OptionalTensor& gate,
                                     std::string_view kind, std::string_view gate_activation,
                                     bool gate_first, double eps,
                                     std::optional<at::ScalarType> dtype) {
  const AutocastGuard autocast(x.device());
  const AutocastNorm cast(autocast, x, weight, bias, gate, dtype);
  return Entry<Norm>::call(cast.x, cast.weight, cast.bias, cast.gate, kind, gate_activation,
                           gate_first, eps, cast.dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<Norm>(m);
  register_autocast<&norm_autocast>(m, kOpName<Norm>);
  register_backward<NormBackward>(m);
  register_gradient<Norm, NormBackward>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& gate,
                std::string_view kind, std::string_view gate_activation, bool gate_first,
                double eps, std::optional<at::ScalarType> dtype) {
  return std::get<0>(ops::call_public<ops::Norm>(x, weight, bias, gate, kind, gate_activation,
                                                 gate_first, eps, dtype));
}

}  // namespace tidegate
