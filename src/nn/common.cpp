#include "src/nn/common.h"

#include "tidegate/nn/glu.h"
#include "tidegate/nn/lower_bounds.h"
#include "tidegate/nn/norm.h"
#include "tidegate/ops/glu.h"
#include "tidegate/ops/init.h"
#include "tidegate/ops/linear.h"
#include "tidegate/ops/norm.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <sstream>
#include <utility>
#include <vector>

#include "src/nn/products.h"
#include "src/nn/states.h"
#include "src/ops/checks.h"
#include "src/ops/recipes.h"

// Small modules live here together: a unit that includes torch's module headers costs twelve
// seconds before its first own line.

namespace tidegate::nn {
namespace {

torch::ScalarType dtype_of(const Placement& placement) {
  return placement.dtype.value_or(torch::typeMetaToScalarType(torch::get_default_dtype()));
}

Placement placement_of(const torch::Tensor& tensor) {
  return {tensor.device(), tensor.scalar_type()};
}

/// Whether autocast gives x and `weight` one dtype: it casts all but fp64.
bool is_cast(const torch::Tensor& x, const torch::Tensor& weight) {
  const bool is_wide = x.scalar_type() == torch::kDouble || weight.scalar_type() == torch::kDouble;
  return x.is_floating_point() && !is_wide && is_autocast(x);
}

/// Whether an op that makes rows like x and multiplies them by a linear layer's weight does what
/// the two apart would, but for what is kept between them for the backward pass.
bool can_project(const torch::nn::Linear& linear, const torch::Tensor& x) {
  const torch::ScalarType dtype = linear->weight.scalar_type();
  return torch::GradMode::is_enabled() &&
         (dtype == x.scalar_type() || (is_autocast(x) && dtype == torch::kFloat));
}

thread_local int undrawn_guards = 0;

// f = gamma + (1 - gamma) * exp(log_decay) and 1 - f, each exact where it is the smaller.
std::pair<torch::Tensor, torch::Tensor> kept_and_lost(const torch::Tensor& log_decay,
                                                      const torch::Tensor& gamma) {
  const torch::Tensor decay = log_decay.exp();
  // What expm1 has for a derivative, 1 + expm1, has no digits left where the gate is shut.
  const torch::Tensor rest = at::where(log_decay < -1, 1 - decay, -at::expm1(log_decay));
  return {gamma + (1 - gamma) * decay, (1 - gamma) * rest};
}

// Gives a clone its own copies of the values.
template <typename Module>
std::shared_ptr<torch::nn::Module> with_values_of(const torch::nn::Module& original,
                                                  const std::shared_ptr<Module>& copy,
                                                  const std::optional<torch::Device>& device) {
  const torch::NoGradGuard no_grad;
  auto own = copy->named_parameters();
  for (const auto& item : original.named_parameters()) {
    const torch::Tensor& values = item.value();
    own[item.key()].set_data(device ? values.to(*device, values.scalar_type(), false, true)
                                    : values.clone());
  }
  copy->train(original.is_training());
  return copy;
}

// torch::nn::Linear and Embedding draw their weights in the constructor and in clone(), and take no
// device. These are the same classes, built with no rows (which draws nothing) and then given their
// storage.
class UndrawnLinear : public StackedLinearImpl {
 public:
  UndrawnLinear(int64_t in, std::vector<int64_t> rows, bool has_bias, const Placement& placement)
      : StackedLinearImpl(torch::nn::LinearOptions(1, 0).bias(has_bias), std::move(rows)) {
    const int64_t out = std::reduce(stacked_rows().begin(), stacked_rows().end());
    options.in_features(in).out_features(out);
    weight = parameters_["weight"] = make_empty({out, in}, placement).requires_grad_();
    if (has_bias) bias = parameters_["bias"] = make_empty({out}, placement).requires_grad_();
  }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device) const override {
    const auto copy = std::make_shared<UndrawnLinear>(options.in_features(), stacked_rows(),
                                                      bias.defined(), placement_of(weight));
    return with_values_of(*this, copy, device);
  }
};

class UndrawnEmbedding : public torch::nn::EmbeddingImpl {
 public:
  UndrawnEmbedding(int64_t entries, int64_t dim, const Placement& placement)
      : EmbeddingImpl(torch::nn::EmbeddingOptions(0, 1)) {
    options.num_embeddings(entries).embedding_dim(dim);
    weight = parameters_["weight"] = make_empty({entries, dim}, placement).requires_grad_();
  }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device) const override {
    const auto copy = std::make_shared<UndrawnEmbedding>(
        options.num_embeddings(), options.embedding_dim(), placement_of(weight));
    return with_values_of(*this, copy, device);
  }
};

}  // namespace

UndrawnGuard::UndrawnGuard() { ++undrawn_guards; }
UndrawnGuard::~UndrawnGuard() { --undrawn_guards; }
bool UndrawnGuard::is_active() { return undrawn_guards > 0; }

void check_choice(const char* owner, const char* option, const std::string& value,
                  std::initializer_list<const char*> allowed) {
  std::string names;
  for (const char* name : allowed) {
    if (value == name) return;
    names += (names.empty() ? "'" : ", '") + std::string(name) + "'";
  }
  TORCH_CHECK_VALUE(false, owner, ": ", option, ": expected one of ", names, "; got '", value, "'");
}

void check_positive(const char* owner, const char* option, int64_t value) {
  TORCH_CHECK_VALUE(value >= 1, owner, ": ", option, ": expected a positive integer; got ", value);
}

void check_eps(const char* owner, const char* option, double eps) {
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), owner, ": ", option,
                    ": expected 0 or more; got ", eps);
}

std::string shape_text(torch::IntArrayRef sizes) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

void check_mixer_input(const char* owner, const torch::Tensor& x, int64_t dim,
                       const torch::Tensor& weight, bool time) {
  const char* const before = time ? "[B, T, dim=" : "[B, dim=";
  TORCH_CHECK_VALUE(x.defined(), owner, ": x: expected a tensor ", before, dim,
                    "]; got an undefined one");
  TORCH_CHECK_VALUE(x.dim() == (time ? 3 : 2) && x.size(-1) == dim, owner, ": x: expected ", before,
                    dim, "]; got ", shape_text(x));
  if (x.scalar_type() == weight.scalar_type()) return;
  TORCH_CHECK_VALUE(is_cast(x, weight), owner, ": x: expected ",
                    ops::dtype_name(weight.scalar_type()), ", as the module's weights; got ",
                    ops::dtype_name(x.scalar_type()));
}

void refuse_gradients(const std::string& owner, const torch::nn::Module& module,
                      at::TensorList tensors) {
  if (!torch::GradMode::is_enabled()) return;
  const auto wants = [](const torch::Tensor& t) { return t.requires_grad(); };
  const auto parameters = module.parameters();
  TORCH_CHECK(std::none_of(tensors.begin(), tensors.end(), wants) &&
                  std::none_of(parameters.begin(), parameters.end(), wants),
              owner,
              ": a step has no gradient, but one is recorded: call it under torch.no_grad(), or "
              "forward() over whole sequences");
}

void refuse_gamma(const char* owner, const std::optional<torch::Tensor>& gamma, const char* why) {
  TORCH_CHECK_VALUE(!normalized(gamma), owner, ": gamma: expected None", why, "; got a tensor");
}

bool is_autocast(const torch::Tensor& x) {
  return (x.is_cpu() || x.is_cuda()) && at::autocast::is_autocast_enabled(x.device().type());
}

void check_lower_bound(const char* owner, const std::optional<torch::Tensor>& gamma,
                       const char* axis, int64_t size, const torch::Tensor& weight) {
  if (!normalized(gamma)) return;
  TORCH_CHECK_VALUE(gamma->dim() == 1 && gamma->size(0) == size, owner, ": gamma: expected [", axis,
                    "=", size, "]; got ", shape_text(*gamma));
  const torch::ScalarType own = weight.scalar_type(), given = gamma->scalar_type();
  if (given == torch::kFloat || given == own) return;
  TORCH_CHECK_VALUE(is_cast(*gamma, weight), owner, ": gamma: expected float32",
                    own == torch::kFloat ? "" : " or ",
                    own == torch::kFloat ? "" : ops::dtype_name(own), "; got ",
                    ops::dtype_name(given));
}

void check_optional_gamma(const char* owner, const std::optional<torch::Tensor>& gamma,
                          bool lower_bound, const char* axis, int64_t size,
                          const torch::Tensor& weight) {
  if (!lower_bound) refuse_gamma(owner, gamma, " with lower_bound=False");
  check_lower_bound(owner, gamma, axis, size, weight);
}

std::optional<torch::Tensor> optional(const torch::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

std::optional<torch::Tensor> normalized(const std::optional<torch::Tensor>& tensor) {
  return tensor && tensor->defined() ? tensor : std::nullopt;
}

torch::Tensor make_empty(torch::IntArrayRef shape, const Placement& placement) {
  const torch::Device device = placement.device.value_or(torch::Device(torch::kCPU));
  TORCH_CHECK_VALUE(!device.is_cuda() || at::hasCUDA(),
                    "device: expected cpu, since torch sees no CUDA device; got ", device);
  return at::empty(shape, at::TensorOptions(dtype_of(placement)).device(device));
}

torch::Tensor make_empty_wide(torch::IntArrayRef shape, const Placement& placement) {
  return make_empty(shape, {placement.device, wide_dtype(dtype_of(placement))});
}

StackedLinearImpl::StackedLinearImpl(int64_t in_features, std::vector<int64_t> rows, bool bias)
    : LinearImpl(
          torch::nn::LinearOptions(in_features, std::reduce(rows.begin(), rows.end())).bias(bias)),
      rows_(std::move(rows)) {}

StackedLinearImpl::StackedLinearImpl(const torch::nn::LinearOptions& empty,
                                     std::vector<int64_t> rows)
    : LinearImpl(empty), rows_(std::move(rows)) {}

std::shared_ptr<torch::nn::Module> StackedLinearImpl::clone(
    const std::optional<torch::Device>& device) const {
  const auto copy = std::make_shared<UndrawnLinear>(options.in_features(), rows_, bias.defined(),
                                                    placement_of(weight));
  return with_values_of(*this, copy, device);
}

std::vector<int64_t> stacked_rows(const torch::nn::LinearImpl& linear) {
  const auto* stacked = dynamic_cast<const StackedLinearImpl*>(&linear);
  return stacked ? stacked->stacked_rows() : std::vector{linear.options.out_features()};
}

torch::nn::Linear make_linear(int64_t in_features, at::IntArrayRef rows, bool bias,
                              const Placement& placement) {
  std::shared_ptr<torch::nn::LinearImpl> linear =
      std::make_shared<UndrawnLinear>(in_features, rows.vec(), bias, placement);
  return torch::nn::Linear(std::move(linear));
}

torch::nn::Embedding make_embedding(int64_t entries, int64_t dim, const Placement& placement) {
  std::shared_ptr<torch::nn::EmbeddingImpl> embedding =
      std::make_shared<UndrawnEmbedding>(entries, dim, placement);
  return torch::nn::Embedding(std::move(embedding));
}

void reset_linear(const torch::nn::Linear& linear) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(linear->options.in_features()));
  init_uniform_(linear->weight, -bound, bound);
  if (linear->bias.defined()) init_uniform_(linear->bias, -bound, bound);
}

torch::Tensor apply_linear(const torch::nn::Linear& linear, const torch::Tensor& x) {
  return nn::linear(x, linear->weight, optional(linear->bias));
}

torch::Tensor widen(const torch::Tensor& x) {
  return x.scalar_type() == torch::kDouble ? x : x.to(torch::kFloat);
}

double smallest_normal(torch::ScalarType type) {
  return type == torch::kDouble ? std::numeric_limits<double>::min()
                                : std::numeric_limits<float>::min();
}

torch::Tensor bounded_decay(const torch::Tensor& log_decay,
                            const std::optional<torch::Tensor>& gamma) {
  if (!normalized(gamma)) return log_decay.exp();
  const auto [kept, lost] = kept_and_lost(log_decay, *gamma);
  return at::where(lost <= 0.5, 1 - lost, kept);
}

torch::Tensor bounded_log_gate(const torch::Tensor& log_gate,
                               const std::optional<torch::Tensor>& gamma) {
  if (!normalized(gamma)) return log_gate;
  const auto [kept, lost] = kept_and_lost(log_gate, *gamma);
  const double tiny = smallest_normal(kept.scalar_type());
  // Where the sum underflows, gamma is as good as zero, and what is left is the gate without it.
  const torch::Tensor shut = at::where(kept < tiny, log_gate, kept.clamp_min(tiny).log());
  // The branch that is not taken is kept away from where its derivative is infinite.
  return at::where(lost <= 0.5, at::log1p(-lost.clamp_max(0.5)), shut);
}

NormImpl::NormImpl(const NormOptions& options) : options(options) {
  check_choice("norm", "kind", options.kind(), kNormsOrNone);
  check_eps("norm", "eps", options.eps());
  reset();
}

void NormImpl::reset() {
  const bool is_layer = options.kind() == "layer";
  if (is_layer || options.kind() == "rms") {
    weight = register_parameter("weight",
                                make_empty({options.heads() * options.dim()}, options.placement()));
  }
  if (is_layer) {
    bias = register_parameter("bias", make_empty({options.dim()}, options.placement()));
  }
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void NormImpl::reset_parameters() {
  if (weight.defined()) init_constant_(weight, 1.0);
  if (bias.defined()) init_constant_(bias, 0.0);
}

// The weight as the ops take it: a row a head.
std::optional<torch::Tensor> NormImpl::weight_rows() const {
  if (options.heads() == 1) return optional(weight);
  return weight.view({options.heads(), options.dim()});
}

torch::Tensor NormImpl::forward(const torch::Tensor& x) { return forward_gated(x, {}, "silu"); }

torch::Tensor NormImpl::forward_gated(const torch::Tensor& x, const torch::Tensor& gate,
                                      std::string_view activation, bool gate_first) {
  if (options.kind() == "none") {
    if (!gate.defined()) return x;
    return x * (activation == "sigmoid" ? at::sigmoid(gate) : at::silu(gate));
  }
  // 16-bit x beside fp32 weights outside autocast: in fp32, in which what follows has its weights.
  const bool is_mixed = weight.defined() && weight.scalar_type() != x.scalar_type();
  const bool widens = is_mixed && !is_autocast(x);
  const torch::Tensor data =
      widens ? x.to(c10::promoteTypes(x.scalar_type(), weight.scalar_type())) : x;
  const torch::Tensor given = gate.defined() ? gate.to(data.scalar_type()) : gate;
  const torch::Tensor y = tidegate::norm(data, weight_rows(), optional(bias), optional(given),
                                         op_kind(), activation, gate_first, options.eps());
  // Where autocast casts x beside a gate, the op keeps the copy, not x.
  if (!given.defined() || data.scalar_type() == y.scalar_type()) {
    remember(y, data, given, activation, gate_first);
  }
  return y;
}

// Says how y follows from x and gate, in y's dtype, autocast or not.
void NormImpl::remember(const torch::Tensor& y, const torch::Tensor& x, const torch::Tensor& gate,
                        std::string_view activation, bool gate_first) const {
  if (!ops::is_recomputing()) return;
  const auto make = [kind = op_kind(), activation = std::string(activation), gate_first,
                     eps = options.eps(), dtype = y.scalar_type()](const auto& inputs) {
    return tidegate::norm(inputs[0], optional(inputs[1]), optional(inputs[2]), optional(inputs[3]),
                          kind, activation, gate_first, eps, dtype);
  };
  ops::remember(y, {x, weight_rows().value_or(torch::Tensor()), bias, gate}, make);
}

torch::Tensor NormImpl::forward_projected(const torch::nn::Linear& linear, const torch::Tensor& x,
                                          const torch::Tensor& gate, std::string_view activation,
                                          bool gate_first) {
  const bool is_mixed = weight.defined() && weight.scalar_type() != x.scalar_type();
  if (options.kind() == "none" || (is_mixed && !is_autocast(x)) || !can_project(linear, x)) {
    return apply_linear(linear, forward_gated(x, gate, activation, gate_first));
  }
  const auto given = gate.defined() ? optional(gate.to(x.scalar_type())) : std::nullopt;
  return tidegate::norm_linear(x, linear->weight, optional(linear->bias), weight_rows(),
                               optional(bias), given, op_kind(), activation, gate_first,
                               options.eps());
}

std::tuple<torch::Tensor, torch::Tensor> NormImpl::forward_added(const torch::Tensor& x,
                                                                 const torch::Tensor& residual) {
  if (!x.defined()) return {forward(residual), residual};
  // Whether add_norm returns what torch's own sum and norm would.
  const bool has_weight = weight.defined();
  const bool is_one_dtype = !has_weight || weight.scalar_type() == x.scalar_type();
  const bool is_stream = residual.scalar_type() == x.scalar_type() ||
                         residual.scalar_type() == wide_dtype(x.scalar_type());
  if (options.kind() == "none" || !(is_autocast(x) || (is_one_dtype && is_stream))) {
    const torch::Tensor sum = residual + x;
    return {forward(sum), sum};
  }
  const auto [y, sum] =
      tidegate::add_norm(x, residual, weight_rows(), optional(bias), op_kind(), options.eps());
  remember(y, sum, /*gate=*/{}, "silu", /*gate_first=*/false);
  return {y, sum};
}

const char* NormImpl::op_kind() const { return options.kind() == "layer" ? "layer" : "rms"; }

GLUImpl::GLUImpl(const GLUOptions& given) : options(given) {
  check_positive("GLU", "dim", options.dim());
  if (!options.hidden()) options.hidden(2 * options.dim());
  check_positive("GLU", "hidden", *options.hidden());
  check_choice("GLU", "activation", options.activation(), kGluActivations);
  reset();
}

void GLUImpl::reset() {
  const int64_t hidden = *options.hidden();
  const Placement placement = options.placement();
  in_proj = register_module(
      "in_proj", make_linear(options.dim(), {hidden, hidden}, options.bias(), placement));
  out_proj =
      register_module("out_proj", make_linear(hidden, options.dim(), options.bias(), placement));
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void GLUImpl::reset_parameters() {
  reset_linear(in_proj);
  reset_linear(out_proj);
}

torch::Tensor GLUImpl::forward(const torch::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == options.dim(),
                    "GLU: x: expected [..., dim=", options.dim(), "]; got ", shape_text(x));
  const torch::Tensor projected = apply_linear(in_proj, x);
  if (can_project(out_proj, projected)) {
    return tidegate::glu_linear(projected, out_proj->weight, optional(out_proj->bias),
                                options.activation());
  }
  const torch::Tensor product = tidegate::glu(projected, options.activation());
  if (ops::is_recomputing() && projected.scalar_type() == product.scalar_type()) {
    ops::remember(product, {projected}, [activation = options.activation()](const auto& inputs) {
      return tidegate::glu(inputs[0], activation);
    });
  }
  return apply_linear(out_proj, product);
}

void GLUImpl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::GLU(dim=" << options.dim() << ", hidden=" << *options.hidden()
         << ", activation=" << options.activation() << ")";
}

LowerBoundsImpl::LowerBoundsImpl(const LowerBoundsOptions& given) : options(given) {
  check_positive("LowerBounds", "layers", options.layers());
  check_positive("LowerBounds", "dim", options.dim());
  check_choice("LowerBounds", "mode", options.mode(), kLowerBoundModes);
  reset();
}

void LowerBoundsImpl::reset() {
  if (options.mode() != "none") {
    logits = register_parameter(
        "logits", make_empty_wide({options.layers(), options.dim()}, options.placement()));
  }
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void LowerBoundsImpl::reset_parameters() {
  if (logits.defined()) init_constant_(logits, 0.0);
}

torch::Tensor LowerBoundsImpl::forward() {
  if (!logits.defined()) return {};
  torch::Tensor bounds;
  if (options.mode() == "independent") {
    bounds = at::sigmoid(logits);
  } else {
    const auto p = at::softmax(logits, 0);
    // Summing from the second layer on, instead of subtracting P_1, keeps the first row exactly
    // zero and no row negative.
    const auto first = p.slice(0, 0, 1);
    bounds = at::cat({at::zeros_like(first), p.slice(0, 1).cumsum(0)});
    if (options.mode() == "decreasing") bounds = bounds.flip(0);
  }
  const double epsilon = bounds.scalar_type() == torch::kDouble
                             ? std::numeric_limits<double>::epsilon()
                             : std::numeric_limits<float>::epsilon();
  return bounds.clamp_max(1.0 - epsilon / 2);
}

void LowerBoundsImpl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::LowerBounds(layers=" << options.layers() << ", dim=" << options.dim()
         << ", mode=" << options.mode() << ")";
}

}  // namespace tidegate::nn
