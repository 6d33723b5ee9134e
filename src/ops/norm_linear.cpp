// norm_linear: a norm and the product that follows it, of which the backward pass keeps what the
// norm reads and not what it makes. Schemas, checks, and a gradient of its own.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/linear.h"
#include "src/ops/norms.h"
#include "src/ops/op.h"
#include "tidegate/ops/linear.h"

namespace tidegate::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct NormLinear {
  static constexpr std::string_view kSchema =
      "norm_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? norm_weight=None, "
      "Tensor? norm_bias=None, Tensor? gate=None, str kind=\"rms\", str gate_activation=\"silu\", "
      "bool gate_first=False, float eps=1e-05, ScalarType? dtype=None) -> Tensor";
  static constexpr std::string_view kData = "x";

  const at::Tensor &x, &weight;
  const OptionalTensor &bias, &norm_weight, &norm_bias, &gate;
  std::string_view kind, gate_activation;
  bool gate_first;
  double eps;
  std::optional<at::ScalarType> dtype;

  at::Tensor kernel() const;
  at::Tensor meta() const;

  at::ScalarType result_dtype() const { return dtype.value_or(x.scalar_type()); }
  NormArguments arguments() const {
    return {norm_weight, norm_bias, gate, kind, gate_activation, gate_first, eps};
  }
  void check() const;
};

/// The gradients of x, weight, in weight_dtype, bias, in bias_dtype, norm_weight, norm_bias and
/// gate; [0] where they are not asked for. The weight comes in dy's dtype.
struct NormLinearBackward {
  static constexpr std::string_view kSchema =
      "norm_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? norm_weight, "
      "Tensor? norm_bias, Tensor? gate, str kind, str gate_activation, bool gate_first, "
      "float eps, ScalarType weight_dtype, ScalarType? bias_dtype, bool wants_x, "
      "bool wants_weight) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)";
  static constexpr std::string_view kData = "x";

  const at::Tensor &dy, &x, &weight;
  const OptionalTensor &norm_weight, &norm_bias, &gate;
  std::string_view kind, gate_activation;
  bool gate_first;
  double eps;
  at::ScalarType weight_dtype;
  std::optional<at::ScalarType> bias_dtype;
  bool wants_x, wants_weight;  // wants_x: anything of the norm's

  TensorTuple<6> kernel() const;
  TensorTuple<6> meta() const;

  NormArguments arguments() const {
    return {norm_weight, norm_bias, gate, kind, gate_activation, gate_first, eps};
  }
};

void NormLinear::check() const {
  const Reference data{kOpName<NormLinear>, "x", x};
  check_norm(data, arguments(), result_dtype());
  const bool is_narrower = result_dtype() != x.scalar_type();
  check_linear({data.op, is_narrower ? "the norm of x" : "x", x}, result_dtype(), x.sym_size(-1),
               weight, bias);
}

at::Tensor NormLinear::meta() const {
  check();
  return at::empty_symint(with_last_size(x, weight.sym_size(0)), x.options().dtype(result_dtype()));
}

at::Tensor NormLinear::kernel() const {
  check();
  KernelInputs inputs(x);
  auto params = norm_params(&inputs, x, arguments(), result_dtype());
  const at::Tensor normed = new_like(x, result_dtype());
  params.y = row_series(&inputs, normed);
  run_norm(kOpName<NormLinear>, params, x);
  return linear_product(normed, weight, bias);
}

TensorTuple<6> NormLinearBackward::meta() const {
  const auto of_norm = [&](const OptionalTensor& t) {
    return wants_x ? new_gradient(t, dy) : no_gradient(dy);
  };
  const at::Tensor dbias = bias_dtype ? at::empty_symint(c10::SymIntArrayRef({weight.sym_size(0)}),
                                                         dy.options().dtype(*bias_dtype))
                                      : no_gradient(dy);
  return {wants_x ? new_like(x) : no_gradient(dy),
          wants_weight ? new_like(weight, weight_dtype) : no_gradient(dy),
          dbias,
          of_norm(norm_weight),
          of_norm(norm_bias),
          of_norm(gate)};
}

TensorTuple<6> NormLinearBackward::kernel() const {
  constexpr const char* kOp = kOpName<NormLinearBackward>;
  const at::ScalarType dtype = dy.scalar_type();
  check_norm({kOp, "x", x}, arguments(), dtype);
  const at::Tensor none = no_gradient(dy);
  NormGradients grads{none, none, none, none};
  at::Tensor normed, dweight = none;
  if (wants_weight) {
    normed = new_like(x, dtype);
  }
  if (wants_x) {
    grads = norm_gradients(kOp, linear_row_gradient(dy, weight), x, arguments(), normed);
  } else if (wants_weight) {
    KernelInputs inputs(x);
    auto params = norm_params(&inputs, x, arguments(), dtype);
    params.y = row_series(&inputs, normed);
    run_norm(kOp, params, x);
  }
  if (wants_weight) {
    dweight = linear_weight_gradient(dy, normed, weight_dtype);
  }
  return {grads.x,      dweight,    linear_bias_gradient(dy, bias_dtype),
          grads.weight, grads.bias, grads.gate};
}

// ---- autocast ----

at::Tensor norm_linear_autocast(const at::Tensor& x, const at::Tensor& weight,
                                const OptionalTensor& bias, const OptionalTensor& norm_weight,
                                const OptionalTensor& norm_bias, const OptionalTensor& gate,
                                std::string_view kind, std::string_view gate_activation,
                                bool gate_first, double eps, std::optional<at::ScalarType> dtype) {
  const AutocastGuard autocast(x.device());
  const AutocastNorm cast(autocast, x, norm_weight, norm_bias, gate, dtype);
  const OptionalTensor added =
      is_given(bias) ? OptionalTensor(autocast.cast_unless_float(*bias)) : std::nullopt;
  return Entry<NormLinear>::call(cast.x, autocast.cast_unless_float(weight), added, cast.weight,
                                 cast.bias, cast.gate, kind, gate_activation, gate_first, eps,
                                 cast.dtype);
}

// ---- gradient ----

class NormLinearFunction : public torch::autograd::Function<NormLinearFunction> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias, const OptionalTensor& norm_weight,
                            const OptionalTensor& norm_bias, const OptionalTensor& gate,
                            std::string_view kind, std::string_view gate_activation,
                            bool gate_first, double eps, std::optional<at::ScalarType> dtype) {
    const auto asks = [](const OptionalTensor& t) { return is_given(t) && t->requires_grad(); };
    const SavedLinear saved(x.requires_grad() || asks(norm_weight) || asks(norm_bias) || asks(gate),
                            weight, bias);
    const at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor rounded = rounded_weight(weight, dtype.value_or(x.scalar_type()));
    const auto or_none = [](const OptionalTensor& t) { return t.value_or(at::Tensor()); };
    ctx->save_for_backward({x, rounded, or_none(norm_weight), or_none(norm_bias), or_none(gate)});
    saved.save(ctx);
    auto& data = ctx->saved_data;
    data["kind"] = std::string(kind);
    data["gate_activation"] = std::string(gate_activation);
    data["gate_first"] = gate_first;
    data["eps"] = eps;
    return Entry<NormLinear>::call(x, rounded, bias, norm_weight, norm_bias, gate, kind,
                                   gate_activation, gate_first, eps, dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list t = ctx->get_saved_variables();
    const SavedLinear saved(ctx);
    auto& data = ctx->saved_data;
    auto [dx, dweight, dbias, dnorm_weight, dnorm_bias, dgate] = Entry<NormLinearBackward>::call(
        gradients[0], t[0], t[1], optional(t[2]), optional(t[3]), optional(t[4]),
        data["kind"].toStringRef(), data["gate_activation"].toStringRef(),
        data["gate_first"].toBool(), data["eps"].toDouble(), saved.weight_dtype, saved.bias_dtype,
        saved.wants_rows, saved.wants_weight);
    const auto if_wanted = [](bool wanted, const at::Tensor& gradient) {
      return wanted ? gradient : at::Tensor();
    };
    const auto of = [&](const at::Tensor& argument, const at::Tensor& gradient) {
      return if_wanted(saved.wants_rows && argument.defined(), gradient);
    };
    return {if_wanted(saved.wants_rows, dx),
            if_wanted(saved.wants_weight, dweight),
            if_wanted(saved.bias_dtype.has_value(), dbias),
            of(t[2], dnorm_weight),
            of(t[3], dnorm_bias),
            of(t[4], dgate),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

at::Tensor norm_linear_autograd(const at::Tensor& x, const at::Tensor& weight,
                                const OptionalTensor& bias, const OptionalTensor& norm_weight,
                                const OptionalTensor& norm_bias, const OptionalTensor& gate,
                                std::string_view kind, std::string_view gate_activation,
                                bool gate_first, double eps, std::optional<at::ScalarType> dtype) {
  Entry<NormLinear>::check_all_given(x, weight, bias, norm_weight, norm_bias, gate, kind,
                                     gate_activation, gate_first, eps, dtype);
  const auto pointer = [](const OptionalTensor& t) { return is_given(t) ? &*t : nullptr; };
  const at::Tensor* const tensors[] = {
      &x, &weight, pointer(bias), pointer(norm_weight), pointer(norm_bias), pointer(gate)};
  check_differentiable(kOpName<NormLinear>, tensors);
  if (!asks_for_gradient(tensors)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Entry<NormLinear>::call(x, weight, bias, norm_weight, norm_bias, gate, kind,
                                   gate_activation, gate_first, eps, dtype);
  }
  return NormLinearFunction::apply(x, weight, bias, norm_weight, norm_bias, gate, kind,
                                   gate_activation, gate_first, eps, dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<NormLinear>(m);
  register_autocast<&norm_linear_autocast>(m, kOpName<NormLinear>);
  register_autograd<&norm_linear_autograd>(m, kOpName<NormLinear>);
  register_backward<NormLinearBackward>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor norm_linear(const at::Tensor& x, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias,
                       const std::optional<at::Tensor>& norm_weight,
                       const std::optional<at::Tensor>& norm_bias,
                       const std::optional<at::Tensor>& gate, std::string_view kind,
                       std::string_view gate_activation, bool gate_first, double eps,
                       std::optional<at::ScalarType> dtype) {
  return ops::call_public<ops::NormLinear>(x, weight, bias, norm_weight, norm_bias, gate, kind,
                                           gate_activation, gate_first, eps, dtype);
}

}  // namespace tidegate
