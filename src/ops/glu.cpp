// glu, and glu_linear, the product that follows it: schemas, checks, how tensors become the
// kernels' params.

#include "tidegate/ops/glu.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "kernels/norm/glu.h"
#include "src/ops/autograd.h"
#include "src/ops/launch.h"
#include "src/ops/linear.h"
#include "src/ops/norms.h"
#include "src/ops/op.h"
#include "tidegate/ops/linear.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/norm/glu_cuda.h"
#endif

namespace tidegate::ops {
namespace {

struct Glu {
  static constexpr std::string_view kSchema = "glu(Tensor x, str activation=\"silu\") -> Tensor";
  static constexpr std::string_view kResults[] = {"y"};
  static constexpr std::string_view kData = "x";

  const at::Tensor& x;
  std::string_view activation;

  std::tuple<at::Tensor> kernel() const;
  std::tuple<at::Tensor> meta() const;
};

/// The gradient of x.
struct GluBackward {
  static constexpr std::string_view kSchema =
      "glu_backward(Tensor dy, Tensor x, str activation) -> Tensor";
  static constexpr std::string_view kGradientLike = "x";

  const at::Tensor &dy, &x;
  std::string_view activation;

  std::tuple<at::Tensor> kernel() const;
  std::tuple<at::Tensor> meta() const;
};

/// glu, and y = that times a weight.
struct GluLinear {
  static constexpr std::string_view kSchema =
      "glu_linear(Tensor x, Tensor weight, Tensor? bias=None, str activation=\"silu\") -> Tensor";
  static constexpr std::string_view kData = "x";
  static constexpr CastRule kCasts[] = {
      {"x", Cast::kLower}, {"weight", Cast::kUnlessFloat}, {"bias", Cast::kUnlessFloat}};

  const at::Tensor &x, &weight;
  const OptionalTensor& bias;
  std::string_view activation;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

/// The gradients of x, weight, in weight_dtype, and bias, in bias_dtype; [0] where they are not
/// asked for. The weight comes in x's dtype.
struct GluLinearBackward {
  static constexpr std::string_view kSchema =
      "glu_linear_backward(Tensor dy, Tensor x, Tensor weight, str activation, "
      "ScalarType weight_dtype, ScalarType? bias_dtype, bool wants_x, bool wants_weight) -> "
      "(Tensor, Tensor, Tensor)";
  static constexpr std::string_view kData = "x";

  const at::Tensor &dy, &x, &weight;
  std::string_view activation;
  at::ScalarType weight_dtype;
  std::optional<at::ScalarType> bias_dtype;
  bool wants_x, wants_weight;

  TensorTuple<3> kernel() const;
  TensorTuple<3> meta() const;
};

// ---- checks ----

/// The sizes of y.
c10::SymDimVector check_glu(const char* op, const at::Tensor& x, std::string_view activation) {
  check_data_dtype({op, "x", x}, ComplexData::kRefused);
  TORCH_CHECK(x.dim() > 0, op, ": x must have shape [..., 2F], got []");
  TORCH_CHECK(x.sym_size(-1) % 2 == 0, op,
              ": x must have an even number of channels, gates and values, got ", x.sym_size(-1));
  parse_row_activation(op, "activation", activation, /*can_be_none=*/true);
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = sizes.back() / 2;
  return sizes;
}

std::tuple<at::Tensor> Glu::meta() const {
  return {at::empty_symint(check_glu(kOpName<Glu>, x, activation), x.options())};
}

std::tuple<at::Tensor> GluBackward::meta() const {
  constexpr const char* kOp = kOpName<GluBackward>;
  const c10::SymDimVector sizes = check_glu(kOp, x, activation);
  check_same_type({kOp, "x", x}, "dy", dy);
  check_shape(kOp, "dy", dy, "[..., F]", sizes);
  return {new_like(x)};
}

// ---- CPU and CUDA ----

kernels::norm::GluParams glu_params(const char* op, KernelInputs* inputs, const at::Tensor& x,
                                    std::string_view activation) {
  kernels::norm::GluParams params;
  params.channels = x.size(-1) / 2;
  params.heads = x.dim() > 1 ? x.size(-2) : 1;
  params.time = x.dim() > 2 ? x.size(-3) : 1;
  params.batch = 1;
  for (int64_t d = 0; d + 3 < x.dim(); ++d) {
    params.batch *= x.size(d);
  }
  params.activation = parse_row_activation(op, "activation", activation, true);
  params.x = row_series(inputs, x);
  return params;
}

/// Writes y.
void run_glu(const char* op, const at::Tensor& x, std::string_view activation,
             const at::Tensor& y) {
  const c10::DeviceGuard guard(x.device());
  KernelInputs inputs(x);
  auto params = glu_params(op, &inputs, x, activation);
  params.y = row_series(&inputs, y);
#ifdef TIDEGATE_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(op, "launch", kernels::norm::glu_forward(params, current_stream(x.device())));
    return;
  }
#endif
  kernels::norm::glu_cpu(params, torch_threads());
}

/// Writes dx and, where it is defined, y again.
void run_glu_backward(const char* op, const at::Tensor& dy, const at::Tensor& x,
                      std::string_view activation, const at::Tensor& dx, const at::Tensor& y) {
  const c10::DeviceGuard guard(x.device());
  KernelInputs inputs(x);
  kernels::norm::GluBackwardParams params;
  params.forward = glu_params(op, &inputs, x, activation);
  params.forward.y = row_series(&inputs, y);
  params.dy = row_series(&inputs, dy);
  params.dx = row_series(&inputs, dx);
#ifdef TIDEGATE_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(op, "launch", kernels::norm::glu_backward(params, current_stream(x.device())));
    return;
  }
#endif
  kernels::norm::glu_backward_cpu(params, torch_threads());
}

std::tuple<at::Tensor> Glu::kernel() const {
  const auto result = meta();
  run_glu(kOpName<Glu>, x, activation, std::get<0>(result));
  return result;
}

std::tuple<at::Tensor> GluBackward::kernel() const {
  const auto result = meta();
  run_glu_backward(kOpName<GluBackward>, dy, x, activation, std::get<0>(result), {});
  return result;
}

// ---- with the product that follows ----

at::Tensor GluLinear::meta() const {
  constexpr const char* kOp = kOpName<GluLinear>;
  const c10::SymDimVector sizes = check_glu(kOp, x, activation);
  check_linear({kOp, "x", x}, x.scalar_type(), sizes.back(), weight, bias);
  return at::empty_symint(with_last_size(x, weight.sym_size(0)), x.options());
}

at::Tensor GluLinear::kernel() const {
  constexpr const char* kOp = kOpName<GluLinear>;
  const c10::SymDimVector sizes = check_glu(kOp, x, activation);
  check_linear({kOp, "x", x}, x.scalar_type(), sizes.back(), weight, bias);
  const at::Tensor product = at::empty_symint(sizes, x.options());
  run_glu(kOp, x, activation, product);
  return linear_product(product, weight, bias);
}

TensorTuple<3> GluLinearBackward::meta() const {
  const auto in = [&](at::ScalarType dtype) { return x.options().dtype(dtype); };
  return {wants_x ? new_like(x) : no_gradient(x),
          wants_weight ? new_like(weight, weight_dtype) : no_gradient(x),
          bias_dtype ? at::empty_symint(c10::SymIntArrayRef({weight.sym_size(0)}), in(*bias_dtype))
                     : no_gradient(x)};
}

TensorTuple<3> GluLinearBackward::kernel() const {
  constexpr const char* kOp = kOpName<GluLinearBackward>;
  const c10::SymDimVector sizes = check_glu(kOp, x, activation);
  at::Tensor product, dx = no_gradient(x), dweight = no_gradient(x);
  if (wants_weight) {
    product = at::empty_symint(sizes, x.options());
  }
  if (wants_x) {
    dx = new_like(x);
    run_glu_backward(kOp, linear_row_gradient(dy, weight), x, activation, dx, product);
  } else if (wants_weight) {
    run_glu(kOp, x, activation, product);
  }
  if (wants_weight) {
    dweight = linear_weight_gradient(dy, product, weight_dtype);
  }
  return {dx, dweight, linear_bias_gradient(dy, bias_dtype)};
}

class GluLinearFunction : public torch::autograd::Function<GluLinearFunction> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, const OptionalTensor& bias,
                            std::string_view activation) {
    const SavedLinear saved(x.requires_grad(), weight, bias);
    const at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor rounded = rounded_weight(weight, x.scalar_type());
    ctx->save_for_backward({x, rounded});
    saved.save(ctx);
    ctx->saved_data["activation"] = std::string(activation);
    return Entry<GluLinear>::call(x, rounded, bias, activation);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const auto tensors = ctx->get_saved_variables();
    const SavedLinear saved(ctx);
    auto [dx, dweight, dbias] = Entry<GluLinearBackward>::call(
        gradients[0], tensors[0], tensors[1], ctx->saved_data["activation"].toStringRef(),
        saved.weight_dtype, saved.bias_dtype, saved.wants_rows, saved.wants_weight);
    const auto if_wanted = [](bool wanted, const at::Tensor& t) {
      return wanted ? t : at::Tensor();
    };
    return {if_wanted(saved.wants_rows, dx), if_wanted(saved.wants_weight, dweight),
            if_wanted(saved.bias_dtype.has_value(), dbias), at::Tensor()};
  }
};

at::Tensor glu_linear_autograd(const at::Tensor& x, const at::Tensor& weight,
                               const OptionalTensor& bias, std::string_view activation) {
  Entry<GluLinear>::check_all_given(x, weight, bias, activation);
  const at::Tensor bias_or_none = bias.value_or(at::Tensor());
  const at::Tensor* const tensors[] = {&x, &weight, &bias_or_none};
  check_differentiable(kOpName<GluLinear>, tensors);
  if (!asks_for_gradient(tensors)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Entry<GluLinear>::call(x, weight, bias, activation);
  }
  return GluLinearFunction::apply(x, weight, bias, activation);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<Glu>(m);
  register_backward<GluBackward>(m);
  register_gradient<Glu, GluBackward>(m);
  register_op<GluLinear>(m);
  register_autograd<&glu_linear_autograd>(m, kOpName<GluLinear>);
  register_backward<GluLinearBackward>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor glu(const at::Tensor& x, std::string_view activation) {
  return std::get<0>(ops::call_public<ops::Glu>(x, activation));
}

at::Tensor glu_linear(const at::Tensor& x, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, std::string_view activation) {
  return ops::call_public<ops::GluLinear>(x, weight, bias, activation);
}

}  // namespace tidegate
