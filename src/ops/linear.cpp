// linear: schemas, checks, and a gradient of its own; linear.h says what for.

#include "src/ops/linear.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/op.h"
#include "src/ops/recipes.h"
#include "src/ops/results.h"
#include "tidegate/ops/linear.h"

namespace tidegate::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Linear {
  static constexpr std::string_view kSchema =
      "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor";
  static constexpr std::string_view kData = "x";
  static constexpr CastRule kCasts[] = {
      {"x", Cast::kLower}, {"weight", Cast::kUnlessFloat}, {"bias", Cast::kUnlessFloat}};

  const at::Tensor &x, &weight;
  const OptionalTensor& bias;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

/// The gradients of x, where there is a weight, in x's dtype here; of the weight, where there is an
/// x; and of the bias, where that has a dtype. [0] where they are not asked for.
struct LinearBackward {
  static constexpr std::string_view kSchema =
      "linear_backward(Tensor dy, Tensor? x, Tensor? weight, ScalarType weight_dtype, "
      "ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor)";
  static constexpr std::string_view kData = "dy";

  const at::Tensor& dy;
  const OptionalTensor &x, &weight;
  at::ScalarType weight_dtype;
  std::optional<at::ScalarType> bias_dtype;

  TensorTuple<3> kernel() const;
  TensorTuple<3> meta() const;
};

/// [..., C] as a matrix.
at::Tensor matrix_of(const at::Tensor& t) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) {
    rows *= t.size(d);
  }
  return t.reshape({rows, t.size(-1)});
}

}  // namespace

// ---- what the ops share ----

void check_linear(const Reference& data, at::ScalarType dtype, const c10::SymInt& channels,
                  const at::Tensor& weight, const OptionalTensor& bias) {
  check_gate(data, dtype, "weight", weight);
  TORCH_CHECK(weight.dim() == 2, data.op, ": weight must have shape [N, K], got ",
              weight.sym_sizes());
  const c10::SymInt outputs = weight.sym_size(0);
  check_shape(data.op, "weight", weight, "[N, K]", {outputs, channels});
  if (is_given(bias)) {
    check_gate(data, dtype, "bias", *bias);
    check_shape(data.op, "bias", *bias, "[N]", {outputs});
  }
}

c10::SymDimVector with_last_size(const at::Tensor& rows, const c10::SymInt& last) {
  c10::SymDimVector sizes(rows.sym_sizes().begin(), rows.sym_sizes().end());
  sizes.back() = last;
  return sizes;
}

at::Tensor rounded_weight(const at::Tensor& weight, at::ScalarType dtype) {
  return weight.scalar_type() == dtype ? weight : weight.to(dtype);
}

at::Tensor linear_product(const at::Tensor& rows, const at::Tensor& weight,
                          const OptionalTensor& bias) {
  const c10::DeviceGuard guard(rows.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType dtype = rows.scalar_type();
  const OptionalTensor added = is_given(bias) ? OptionalTensor(bias->to(dtype)) : std::nullopt;
  return at::linear(rows, weight.to(dtype), added);
}

at::Tensor linear_row_gradient(const at::Tensor& dy, const at::Tensor& weight) {
  const c10::DeviceGuard guard(dy.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::DimVector sizes(dy.sizes().begin(), dy.sizes().end());
  sizes.back() = weight.size(1);
  return at::mm(matrix_of(dy), weight).view(sizes);
}

at::Tensor linear_weight_gradient(const at::Tensor& dy, const at::Tensor& rows,
                                  at::ScalarType dtype) {
  const c10::DeviceGuard guard(dy.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor left = matrix_of(dy).t(), right = matrix_of(rows);
  // torch's product has a dtype of its own for the sums of 16-bit factors on CUDA alone: those of
  // float64 rows are rounded to a float32 weight's.
  const bool keeps_sums =
      right.is_cuda() && c10::isReducedFloatingType(right.scalar_type()) && dtype == at::kFloat;
  if (!keeps_sums || right.numel() == 0 || left.numel() == 0) {
    return at::mm(left, right).to(dtype);
  }
  at::Tensor sums = at::empty({left.size(0), right.size(1)}, right.options().dtype(dtype));
  at::mm_out(sums, left, right, dtype);
  return sums;
}

at::Tensor linear_bias_gradient(const at::Tensor& dy, std::optional<at::ScalarType> dtype) {
  if (!dtype) {
    return no_gradient(dy);
  }
  const c10::DeviceGuard guard(dy.device());
  return at::sum(matrix_of(dy), {0}, /*keepdim=*/false, state_dtype(dy.scalar_type())).to(*dtype);
}

SavedLinear::SavedLinear(bool wants_rows, const at::Tensor& weight, const OptionalTensor& bias)
    : wants_rows(wants_rows),
      wants_weight(weight.requires_grad()),
      weight_dtype(weight.scalar_type()),
      bias_dtype(is_given(bias) && bias->requires_grad() ? std::optional(bias->scalar_type())
                                                         : std::nullopt) {}

SavedLinear::SavedLinear(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  wants_rows = data["wants_rows"].toBool();
  wants_weight = data["wants_weight"].toBool();
  weight_dtype = static_cast<at::ScalarType>(data["weight_dtype"].toInt());
  const int64_t bias = data["bias_dtype"].toInt();
  bias_dtype = bias < 0 ? std::nullopt : std::optional(static_cast<at::ScalarType>(bias));
}

void SavedLinear::save(AutogradContext* ctx) const {
  auto& data = ctx->saved_data;
  data["wants_rows"] = wants_rows;
  data["wants_weight"] = wants_weight;
  data["weight_dtype"] = static_cast<int64_t>(weight_dtype);
  data["bias_dtype"] = bias_dtype ? static_cast<int64_t>(*bias_dtype) : int64_t{-1};
}

// ---- the op ----

namespace {

at::Tensor Linear::meta() const {
  const Reference data{kOpName<Linear>, "x", x};
  check_data_dtype(data, ComplexData::kRefused);
  TORCH_CHECK(x.dim() > 0, data.op, ": x must have shape [..., K], got []");
  check_linear(data, x.scalar_type(), x.sym_size(-1), weight, bias);
  return at::empty_symint(with_last_size(x, weight.sym_size(0)), x.options());
}

at::Tensor Linear::kernel() const {
  const Reference data{kOpName<Linear>, "x", x};
  check_data_dtype(data, ComplexData::kRefused);
  TORCH_CHECK(x.dim() > 0, data.op, ": x must have shape [..., K], got []");
  check_linear(data, x.scalar_type(), x.sym_size(-1), weight, bias);
  return linear_product(x, weight, bias);
}

TensorTuple<3> LinearBackward::meta() const {
  const auto none = [&] { return no_gradient(dy); };
  const auto in = [&](at::ScalarType dtype) { return dy.options().dtype(dtype); };
  return {is_given(weight) ? at::empty_symint(with_last_size(dy, weight->sym_size(1)), dy.options())
                           : none(),
          is_given(x) ? at::empty_symint(c10::SymIntArrayRef({dy.sym_size(-1), x->sym_size(-1)}),
                                         in(weight_dtype))
                      : none(),
          bias_dtype ? at::empty_symint(c10::SymIntArrayRef({dy.sym_size(-1)}), in(*bias_dtype))
                     : none()};
}

TensorTuple<3> LinearBackward::kernel() const {
  return {is_given(weight) ? linear_row_gradient(dy, *weight) : no_gradient(dy),
          is_given(x) ? linear_weight_gradient(dy, *x, weight_dtype) : no_gradient(dy),
          linear_bias_gradient(dy, bias_dtype)};
}

// ---- gradient ----

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias) {
    const SavedLinear saved(x.requires_grad(), weight, bias);
    const at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor rounded = rounded_weight(weight, x.scalar_type());
    // What a gradient is not asked for is not kept, nor is what only it needs.
    save_or_recipe(
        ctx, {saved.wants_weight ? x : at::Tensor(), saved.wants_rows ? rounded : at::Tensor()});
    saved.save(ctx);
    return Entry<Linear>::call(x, rounded, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list tensors = saved_or_made(ctx);
    const SavedLinear saved(ctx);
    auto [dx, dweight, dbias] =
        Entry<LinearBackward>::call(gradients[0], optional(tensors[0]), optional(tensors[1]),
                                    saved.weight_dtype, saved.bias_dtype);
    const auto if_wanted = [](bool wanted, const at::Tensor& t) {
      return wanted ? t : at::Tensor();
    };
    return {if_wanted(saved.wants_rows, dx), if_wanted(saved.wants_weight, dweight),
            if_wanted(saved.bias_dtype.has_value(), dbias)};
  }
};

at::Tensor linear_autograd(const at::Tensor& x, const at::Tensor& weight,
                           const OptionalTensor& bias) {
  Entry<Linear>::check_all_given(x, weight, bias);
  const at::Tensor bias_or_none = bias.value_or(at::Tensor());
  const at::Tensor* const tensors[] = {&x, &weight, &bias_or_none};
  check_differentiable(kOpName<Linear>, tensors);
  if (!asks_for_gradient(tensors)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Entry<Linear>::call(x, weight, bias);
  }
  return LinearFunction::apply(x, weight, bias);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<Linear>(m);
  register_autograd<&linear_autograd>(m, kOpName<Linear>);
  register_backward<LinearBackward>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  return ops::call_public<ops::Linear>(x, weight, bias);
}

}  // namespace tidegate
