// linear_cross_entropy: schemas, checks, and a gradient of its own: the forward pass makes the
// gradients where they are wanted, and the backward pass scales them.

#include "tidegate/ops/linear_cross_entropy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>

#include "src/ops/autograd.h"
#include "src/ops/capture.h"
#include "src/ops/checks.h"
#include "src/ops/linear_cross_entropy.h"
#include "src/ops/op.h"
#include "src/ops/results.h"

namespace tidegate::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct LinearCrossEntropy {
  static constexpr std::string_view kSchema =
      "linear_cross_entropy(Tensor x, Tensor weight, Tensor labels, Tensor? bias=None, "
      "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, "
      "str reduction=\"mean\") -> Tensor";
  static constexpr std::string_view kData = "x";
  static constexpr CastRule kCasts[] = {
      {"x", Cast::kLower}, {"weight", Cast::kUnlessFloat}, {"bias", Cast::kUnlessFloat}};

  const at::Tensor &x, &weight, &labels;
  const OptionalTensor& bias;
  int64_t ignore_index;
  double label_smoothing, z_loss;
  std::string_view reduction;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

/// The loss and, besides, what it was scaled by and the unscaled gradients that are asked for, [0]
/// where they are not: dx in x's dtype, dweight and dbias in the state's.
struct LinearCrossEntropySaving {
  static constexpr std::string_view kSchema =
      "linear_cross_entropy_saving(Tensor x, Tensor weight, Tensor labels, Tensor? bias, "
      "int ignore_index, float label_smoothing, float z_loss, str reduction, bool wants_x, "
      "bool wants_weight, bool wants_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)";
  static constexpr std::string_view kData = "x";

  const at::Tensor &x, &weight, &labels;
  const OptionalTensor& bias;
  int64_t ignore_index;
  double label_smoothing, z_loss;
  std::string_view reduction;
  bool wants_x, wants_weight, wants_bias;

  TensorTuple<5> kernel() const;
  TensorTuple<5> meta() const;
};

/// The gradients of "none", from each row's: the logits are made anew.
struct LinearCrossEntropyBackward {
  static constexpr std::string_view kSchema =
      "linear_cross_entropy_backward(Tensor dloss, Tensor x, Tensor weight, Tensor labels, "
      "Tensor? bias, int ignore_index, float label_smoothing, float z_loss, bool wants_x, "
      "bool wants_weight, bool wants_bias) -> (Tensor, Tensor, Tensor)";
  static constexpr std::string_view kData = "x";

  const at::Tensor &dloss, &x, &weight, &labels;
  const OptionalTensor& bias;
  int64_t ignore_index;
  double label_smoothing, z_loss;
  bool wants_x, wants_weight, wants_bias;

  TensorTuple<3> kernel() const;
  TensorTuple<3> meta() const;
};

/// The gradients of "mean" and "sum": those that the forward pass made times dloss and `scale`.
/// x, weight and bias are not computed with: of weight and bias the gradients have the dtype, and
/// through all three autograd sees that the gradients depend on them, so that a second derivative
/// is refused and not silently zero.
struct LinearCrossEntropyScaled {
  static constexpr std::string_view kSchema =
      "linear_cross_entropy_backward_scaled(Tensor dloss, Tensor scale, Tensor dx, Tensor dweight, "
      "Tensor dbias, Tensor x, Tensor weight, Tensor? bias) -> (Tensor, Tensor, Tensor)";
  static constexpr std::string_view kData = "dx";

  const at::Tensor &dloss, &scale, &dx, &dweight, &dbias, &x, &weight;
  const OptionalTensor& bias;

  TensorTuple<3> kernel() const;
  TensorTuple<3> meta() const;
};

constexpr const char* kCrossEntropy = kOpName<LinearCrossEntropy>;

// ---- checks ----

template <class Op>
HeadInputs head_inputs(const Op& op) {
  return {op.x, op.weight, op.labels, op.bias, op.ignore_index, op.label_smoothing, op.z_loss};
}

template <class Op>
HeadGradients head_gradients(const Op& op) {
  return {op.wants_x, op.wants_weight, op.wants_bias};
}

void check_labels(const char* op, const at::Tensor& x, const at::Tensor& labels) {
  check_device({op, "x", x}, "labels", labels);
  TORCH_CHECK(labels.scalar_type() == at::kInt || labels.scalar_type() == at::kLong, op,
              ": labels must be int32 or int64, got ", dtype_name(labels.scalar_type()));
  const auto expected = x.sym_sizes().slice(0, x.dim() - 1);
  bool fits = labels.dim() == x.dim() - 1;
  for (int64_t i = 0; fits && i < labels.dim(); ++i) {
    fits = labels.sym_size(i).sym_eq(expected[i]).expect_true(__FILE__, __LINE__);
  }
  TORCH_CHECK(fits, op, ": labels must have x's shape without its last dimension, ", expected,
              ", got ", labels.sym_sizes());
}

void check_head(const char* op, const HeadInputs& in) {
  const Reference data{op, "x", in.x};
  check_data_dtype(data, ComplexData::kRefused);
  TORCH_CHECK(in.x.dim() >= 2, op, ": x must have shape [..., D] of two or more dimensions, got ",
              in.x.sym_sizes());
  check_gate(data, "weight", in.weight);
  TORCH_CHECK(in.weight.dim() == 2, op, ": weight must have shape [V, D], got ",
              in.weight.sym_sizes());
  const c10::SymInt vocab = in.weight.sym_size(0);
  check_shape(op, "weight", in.weight, "[V, D]", {vocab, in.x.sym_size(-1)}, " like x");
  check_labels(op, in.x, in.labels);
  if (is_given(in.bias)) {
    check_gate(data, "bias", *in.bias);
    check_shape(op, "bias", *in.bias, "[V]", {vocab});
  }
  TORCH_CHECK(in.label_smoothing >= 0 && in.label_smoothing <= 1, op,
              ": label_smoothing must lie in [0, 1], got ", in.label_smoothing);
  TORCH_CHECK(in.z_loss >= 0 && in.z_loss < std::numeric_limits<double>::infinity(), op,
              ": z_loss must be finite and at least 0, got ", in.z_loss);
}

void check_reduction(const char* op, std::string_view reduction) {
  TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none", op,
              ": reduction must be 'mean', 'sum' or 'none', got '", reduction, "'");
}

/// Labels on the CPU are always looked at, others in debug mode only: that reads them back.
void check_label_values(const char* op, const HeadInputs& in) {
  const bool can_look =
      in.labels.is_cpu() || (debug_checks_enabled() && !is_capturing(in.labels.device()));
  if (!can_look) {
    return;
  }
  const at::Tensor labels = in.labels.to(at::kCPU, at::kLong).contiguous();
  const int64_t* const values = labels.const_data_ptr<int64_t>();
  const int64_t vocab = in.weight.size(0);
  for (int64_t i = 0; i < labels.numel(); ++i) {
    TORCH_CHECK(values[i] == in.ignore_index || (values[i] >= 0 && values[i] < vocab), op,
                ": labels must lie in [0, V) = [0, ", vocab,
                ") or be ignore_index = ", in.ignore_index, ", got ", values[i], " at flat index ",
                i);
  }
}

// ---- the op ----

at::Tensor LinearCrossEntropy::meta() const {
  check_head(kCrossEntropy, head_inputs(*this));
  check_reduction(kCrossEntropy, reduction);
  if (reduction == "none") {
    return at::empty_symint(labels.sym_sizes(), x.options().dtype(state_dtype(x.scalar_type())));
  }
  return new_state(x, {});
}

at::Tensor LinearCrossEntropy::kernel() const {
  const HeadInputs inputs = head_inputs(*this);
  check_head(kCrossEntropy, inputs);
  check_reduction(kCrossEntropy, reduction);
  check_label_values(kCrossEntropy, inputs);
  const HeadResults results =
      linear_cross_entropy_chunks(kCrossEntropy, inputs, {}, /*losses=*/true, {});
  if (reduction == "none") {
    return results.losses.view(labels.sizes());
  }
  return std::get<0>(sum_of_losses(kCrossEntropy, inputs, results.losses, reduction == "mean"));
}

// ---- with gradients ----

void check_saving(const LinearCrossEntropySaving& op) {
  check_head(kCrossEntropy, head_inputs(op));
  TORCH_CHECK(op.reduction == "mean" || op.reduction == "sum", kOpName<LinearCrossEntropySaving>,
              ": reduction must be 'mean' or 'sum', got '", op.reduction, "'");
}

at::Tensor or_no_gradient(const at::Tensor& gradient, const at::Tensor& data) {
  return gradient.defined() ? gradient : no_gradient(data);
}

TensorTuple<5> LinearCrossEntropySaving::meta() const {
  check_saving(*this);
  const c10::SymInt vocab = weight.sym_size(0);
  return {new_state(x, {}), new_state(x, {}), wants_x ? new_like(x) : no_gradient(x),
          wants_weight ? new_state(x, {vocab, x.sym_size(-1)}) : no_gradient(x),
          wants_bias ? new_state(x, {vocab}) : no_gradient(x)};
}

TensorTuple<5> LinearCrossEntropySaving::kernel() const {
  const HeadInputs inputs = head_inputs(*this);
  check_saving(*this);
  check_label_values(kCrossEntropy, inputs);
  const HeadResults results =
      linear_cross_entropy_chunks(kCrossEntropy, inputs, head_gradients(*this), true, {});
  const auto [loss, scale] =
      sum_of_losses(kCrossEntropy, inputs, results.losses, reduction == "mean");
  return {loss, scale, or_no_gradient(results.dx, x), or_no_gradient(results.dweight, x),
          or_no_gradient(results.dbias, x)};
}

/// Checks what both of the backward op's functions read, and makes no results.
void check_cross_entropy_backward(const LinearCrossEntropyBackward& op) {
  check_head(kCrossEntropy, head_inputs(op));
  check_device({kCrossEntropy, "x", op.x}, "dloss", op.dloss);
  check_like({kCrossEntropy, "labels", new_like(op.labels, state_dtype(op.x.scalar_type()))},
             "dloss", op.dloss);
}

TensorTuple<3> LinearCrossEntropyBackward::meta() const {
  check_cross_entropy_backward(*this);
  return {wants_x ? new_like(x) : no_gradient(x), wants_weight ? new_like(weight) : no_gradient(x),
          wants_bias ? new_gradient(bias, x) : no_gradient(x)};
}

TensorTuple<3> LinearCrossEntropyBackward::kernel() const {
  check_cross_entropy_backward(*this);
  const at::Tensor row_gradient = dloss.contiguous();
  const HeadResults results =
      linear_cross_entropy_chunks(kCrossEntropy, head_inputs(*this), head_gradients(*this),
                                  /*losses=*/false, row_gradient);
  const auto in_dtype = [&](const at::Tensor& gradient, const OptionalTensor& argument) {
    return gradient.defined() ? gradient.to(argument->scalar_type()) : no_gradient(x);
  };
  return {or_no_gradient(results.dx, x), in_dtype(results.dweight, weight),
          in_dtype(results.dbias, bias)};
}

TensorTuple<3> LinearCrossEntropyScaled::meta() const {
  const at::ScalarType bias_dtype = is_given(bias) ? bias->scalar_type() : dbias.scalar_type();
  return {new_like(dx), new_like(dweight, weight.scalar_type()), new_like(dbias, bias_dtype)};
}

/// One pass over each gradient. The factor has a dimension, so that it takes part in the choice of
/// the type that is computed in: float32 beside 16-bit gradients, whatever the loss is scaled by.
TensorTuple<3> LinearCrossEntropyScaled::kernel() const {
  const c10::DeviceGuard guard(dx.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor factor = at::mul(dloss, scale).view({1});
  TensorTuple<3> results = meta();
  at::mul_out(std::get<0>(results), dx, factor);
  at::mul_out(std::get<1>(results), dweight, factor);
  at::mul_out(std::get<2>(results), dbias, factor);
  return results;
}

// ---- gradient ----

at::Tensor defined_or_none(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }

/// A gradient that nobody asks for is not made: a frozen head costs a product less.
HeadGradients wanted_gradients(const at::Tensor& x, const at::Tensor& weight,
                               const OptionalTensor& bias) {
  return {x.requires_grad(), weight.requires_grad(), is_given(bias) && bias->requires_grad()};
}

void save_wanted(AutogradContext* ctx, HeadGradients wanted) {
  ctx->saved_data["wants_x"] = wanted.x;
  ctx->saved_data["wants_weight"] = wanted.weight;
  ctx->saved_data["wants_bias"] = wanted.bias;
}

HeadGradients saved_wanted(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  return {data["wants_x"].toBool(), data["wants_weight"].toBool(), data["wants_bias"].toBool()};
}

at::Tensor if_wanted(bool wanted, const at::Tensor& gradient) {
  return wanted ? gradient : at::Tensor();
}

/// "mean" and "sum": the forward pass has made the gradients.
class ReducedLossFunction : public torch::autograd::Function<ReducedLossFunction> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& labels, const OptionalTensor& bias,
                            int64_t ignore_index, double label_smoothing, double z_loss,
                            std::string_view reduction) {
    const HeadGradients wanted = wanted_gradients(x, weight, bias);
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [loss, scale, dx, dweight, dbias] = Entry<LinearCrossEntropySaving>::call(
        x, weight, labels, bias, ignore_index, label_smoothing, z_loss, reduction, wanted.x,
        wanted.weight, wanted.bias);
    ctx->save_for_backward({scale, dx, dweight, dbias, x, weight, defined_or_none(bias)});
    save_wanted(ctx, wanted);
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dx, dweight, dbias] =
        Entry<LinearCrossEntropyScaled>::call(gradients[0], saved[0], saved[1], saved[2], saved[3],
                                              saved[4], saved[5], optional(saved[6]));
    const HeadGradients wanted = saved_wanted(ctx);
    return {if_wanted(wanted.x, dx),
            if_wanted(wanted.weight, dweight),
            at::Tensor(),
            if_wanted(wanted.bias, dbias),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

/// "none": a row's gradient is known in the backward pass only.
class RowLossFunction : public torch::autograd::Function<RowLossFunction> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& labels, const OptionalTensor& bias,
                            int64_t ignore_index, double label_smoothing, double z_loss) {
    ctx->save_for_backward({x, weight, labels, defined_or_none(bias)});
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->saved_data["z_loss"] = z_loss;
    save_wanted(ctx, wanted_gradients(x, weight, bias));
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Entry<LinearCrossEntropy>::call(x, weight, labels, bias, ignore_index, label_smoothing,
                                           z_loss, "none");
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const HeadGradients wanted = saved_wanted(ctx);
    auto [dx, dweight, dbias] = Entry<LinearCrossEntropyBackward>::call(
        gradients[0], saved[0], saved[1], saved[2], optional(saved[3]),
        data["ignore_index"].toInt(), data["label_smoothing"].toDouble(), data["z_loss"].toDouble(),
        wanted.x, wanted.weight, wanted.bias);
    return {if_wanted(wanted.x, dx),
            if_wanted(wanted.weight, dweight),
            at::Tensor(),
            if_wanted(wanted.bias, dbias),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

at::Tensor linear_cross_entropy_autograd(const at::Tensor& x, const at::Tensor& weight,
                                         const at::Tensor& labels, const OptionalTensor& bias,
                                         int64_t ignore_index, double label_smoothing,
                                         double z_loss, std::string_view reduction) {
  Entry<LinearCrossEntropy>::check_all_given(x, weight, labels, bias, ignore_index, label_smoothing,
                                             z_loss, reduction);
  const at::Tensor bias_or_none = defined_or_none(bias);
  const at::Tensor* const tensors[] = {&x, &weight, &bias_or_none};
  check_differentiable(kCrossEntropy, tensors);
  if (!asks_for_gradient(tensors)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Entry<LinearCrossEntropy>::call(x, weight, labels, bias, ignore_index, label_smoothing,
                                           z_loss, reduction);
  }
  check_reduction(kCrossEntropy, reduction);
  if (reduction == "none") {
    return RowLossFunction::apply(x, weight, labels, bias, ignore_index, label_smoothing, z_loss);
  }
  return ReducedLossFunction::apply(x, weight, labels, bias, ignore_index, label_smoothing, z_loss,
                                    reduction);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<LinearCrossEntropy>(m);
  register_autograd<&linear_cross_entropy_autograd>(m, kCrossEntropy);
  register_op<LinearCrossEntropySaving>(m);
  register_no_gradient(m, kOpName<LinearCrossEntropySaving>);
  register_backward<LinearCrossEntropyBackward>(m);
  register_backward<LinearCrossEntropyScaled>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& labels, const std::optional<at::Tensor>& bias,
                                int64_t ignore_index, double label_smoothing, double z_loss,
                                std::string_view reduction) {
  return ops::call_public<ops::LinearCrossEntropy>(x, weight, labels, bias, ignore_index,
                                                   label_smoothing, z_loss, reduction);
}

}  // namespace tidegate
