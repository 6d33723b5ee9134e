#include "src/nn/step_products.h"

#include "tidegate/ops/glu.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "kernels/product/product.h"
#include "src/nn/common.h"
#include "src/nn/products.h"
#include "src/ops/gla.h"
#include "src/ops/launch.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/gla/token_product_cuda.h"
#include "kernels/product/product_cuda.h"
#include "kernels/scan/hgru_token_cuda.h"
#endif

namespace tidegate::nn {
namespace {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

// Rows that the kernel takes at most.
constexpr int64_t kMostRows = 64;
constexpr int64_t kPack = 8;
// So many take long enough that a second product costs less than it saves.
constexpr int64_t kManyChannels = 4096;
// So many of a batch are the library's: they are heads, of which its kernels read the weights
// faster than ours, which keep little of them under way at a time.
constexpr int64_t kLibraryChannels = 16384;

bool is_16_bit(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

#ifdef TIDEGATE_WITH_CUDA

namespace product = kernels::product;
using kernels::norm::Activation;

static_assert(kMostRows == product::kMostFusedRows);

Activation activation_of(std::string_view name) {
  return name == "sigmoid" ? Activation::kSigmoid
         : name == "silu"  ? Activation::kSilu
                           : Activation::kNone;
}

// Undefined tensors are none.
bool are_like(const Tensor& x, std::initializer_list<Tensor> tensors) {
  for (const Tensor& t : tensors) {
    if (!t.defined()) continue;
    if (t.scalar_type() != x.scalar_type() || t.device() != x.device()) return false;
    if (t.stride(-1) != 1 && t.size(-1) > 1) return false;
  }
  return true;
}

// Whether the further weights are as x and the kernel want them.
bool are_apart(const Tensor& x, const StepProduct& around) {
  if (around.more.size() > product::FusedProductParams::kMore) return false;
  for (const Tensor& weight : around.more) {
    if (!are_like(x, {weight}) || weight.size(1) != x.size(1)) return false;
  }
  return true;
}

// What the kernel is to compute of tensors that are all of x's type and device; y is not there yet.
product::FusedProductParams params_of(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                      const StepProduct& around) {
  product::FusedProductParams params;
  product::FewRowsParams& p = params.product;
  params.is_glu = around.glu != nullptr;
  p.rows = x.size(0);
  p.inner = weight.size(1);
  p.outer = params.is_glu ? weight.size(0) / 2 : weight.size(0);
  p.dtype = ops::kernel_dtype(x.scalar_type());
  p.x = x.const_data_ptr();
  p.stride_x = x.stride(0);
  p.w = weight.const_data_ptr();
  p.stride_w = weight.stride(0);
  p.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  if (params.is_glu) params.activation = activation_of(around.glu);
  if (around.norm != nullptr && around.norm->options.kind() != "none") {
    const NormImpl& norm = *around.norm;
    params.has_norm = true;
    params.norm_kind = norm.options.kind() == "layer" ? kernels::norm::NormKind::kLayer
                                                      : kernels::norm::NormKind::kRms;
    params.eps = norm.options.eps();
    if (norm.weight.defined()) params.norm_weight = norm.weight.const_data_ptr();
    if (norm.bias.defined()) params.norm_bias = norm.bias.const_data_ptr();
  }
  if (around.gate.defined()) {
    params.gate = around.gate.const_data_ptr();
    params.stride_gate = around.gate.stride(0);
    params.gate_activation = activation_of(around.gate_activation);
    params.gate_first = around.gate_first;
  }
  int64_t first = weight.size(0);
  for (size_t i = 0; i < around.more.size(); ++i) {
    params.more[i] = {around.more[i].const_data_ptr(), around.more[i].stride(0), first};
    first += around.more[i].size(0);
  }
  if (!around.more.empty()) p.outer = first;
  if (around.residual.defined()) {
    params.residual = around.residual.const_data_ptr();
    params.stride_residual = around.residual.stride(0);
  }
  return params;
}

// What the kernels would be given; none where they are not made for these tensors.
std::optional<product::FusedProductParams> planned(const Tensor& x, const Tensor& weight,
                                                   const OptionalTensor& given_bias,
                                                   const StepProduct& around) {
  if (!x.is_cuda() || !is_16_bit(x) || x.dim() != 2 || x.size(0) == 0 || x.size(0) > kMostRows ||
      x.size(1) != weight.size(1) || at::autocast::is_autocast_enabled(at::kCUDA)) {
    return std::nullopt;
  }
  const Tensor bias = given_bias.value_or(Tensor());
  const bool has_norm = around.norm != nullptr && around.norm->options.kind() != "none";
  if (around.gate.defined() && !has_norm) return std::nullopt;
  if (has_norm && around.norm->options.heads() != 1) return std::nullopt;
  const Tensor norm_weight = has_norm ? around.norm->weight : Tensor();
  const Tensor norm_bias = has_norm ? around.norm->bias : Tensor();
  if (!are_like(
          x, {x, weight, bias, norm_weight, norm_bias, around.gate, around.residual, around.out}) ||
      !are_apart(x, around)) {
    return std::nullopt;
  }
  return params_of(x, weight, bias, around);
}

// y by one launch; undefined where the kernel is not made for these tensors.
Tensor fused(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
             const StepProduct& around) {
  auto params = planned(x, weight, bias, around);
  if (!params) return {};
  const bool is_head = around.glu == nullptr && !around.residual.defined() && around.more.empty();
  if (is_head && x.size(0) > product::kFewFusedRows && weight.size(0) >= kLibraryChannels) {
    return {};
  }
  const c10::DeviceGuard guard(x.device());
  bool fits = false;
  ops::check_launch("step product", "plan", product::fused_product_fits(*params, &fits));
  if (!fits) return {};
  Tensor y = around.out.defined() ? around.out
                                  : at::empty({x.size(0), params->product.outer}, x.options());
  params->product.y = y.data_ptr();
  params->product.stride_y = y.stride(0);
  ops::check_launch("step product", "launch",
                    product::fused_product_cuda(*params, ops::current_stream(x.device())));
  return y;
}

// Rows that the kernels take on the device.
int64_t most_rows(const Tensor& x) {
  const c10::DeviceGuard guard(x.device());
  int64_t rows = 0;
  ops::check_launch("step product", "plan", product::most_fused_rows(&rows));
  return rows;
}

bool is_state(const Tensor& t, const Tensor& x) {
  return t.scalar_type() == at::kFloat && t.device() == x.device() && t.is_contiguous();
}

#else

Tensor fused(const Tensor&, const Tensor&, const OptionalTensor&, const StepProduct&) { return {}; }

int64_t most_rows(const Tensor&) { return 0; }

#endif

// The library's product, into rows that it can write: `out` spares a copy of what may be a large
// result.
bool can_write(const Tensor& x, const Tensor& weight, const StepProduct& around) {
  const Tensor& out = around.out;
  return out.defined() && around.glu == nullptr && !around.residual.defined() && out.is_cuda() &&
         x.dim() == 2 && out.stride(-1) == 1 && x.scalar_type() == weight.scalar_type() &&
         x.scalar_type() == out.scalar_type() && !at::autocast::is_autocast_enabled(at::kCUDA);
}

// x weight^T into `out`. Libraries have kernels for an even number of packs of 16 bytes that are
// several times as fast as those for any other: the last few channels go apart.
Tensor write_product(const Tensor& x, const Tensor& weight, Tensor out) {
  const int64_t outer = weight.size(0), whole = outer - outer % kPack;
  if (whole == outer || whole < kManyChannels) return at::mm_out(out, x, weight.t());
  Tensor most = out.narrow(1, 0, whole), rest = out.narrow(1, whole, outer - whole);
  at::mm_out(most, x, weight.narrow(0, 0, whole).t());
  at::mm_out(rest, x, weight.narrow(0, whole, outer - whole).t());
  return out;
}

Tensor composed(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                const StepProduct& around) {
  const Tensor u =
      around.norm == nullptr
          ? x
          : around.norm->forward_gated(x, around.gate, around.gate_activation, around.gate_first);
  if (!bias && can_write(u, weight, around)) return write_product(u, weight, around.out);
  Tensor y = nn::linear(u, weight, bias);
  if (!around.more.empty()) {
    std::vector<Tensor> parts = {y};
    for (const Tensor& more : around.more) parts.push_back(nn::linear(u, more, std::nullopt));
    y = at::cat(parts, -1);
  }
  if (around.glu != nullptr) y = tidegate::glu(y, around.glu);
  if (around.residual.defined()) y = around.residual + y;
  return around.out.defined() ? around.out.copy_(y) : y;
}

}  // namespace

Tensor step_product(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                    const StepProduct& around) {
  const Tensor y = fused(x, weight, bias, around);
  return y.defined() ? y : composed(x, weight, bias, around);
}

Tensor step_product(const Tensor& x, const torch::nn::Linear& linear, const StepProduct& around) {
  return step_product(x, linear->weight, optional(linear->bias), around);
}

bool makes_step_products(const Tensor& x) {
  const char* const set = std::getenv("TIDEGATE_STEP_PRODUCTS");
  if (set != nullptr && (std::strcmp(set, "0") == 0 || std::strcmp(set, "1") == 0)) {
    return set[0] == '1';
  }
  return FewRowsGuard::is_active() && x.is_cuda() && is_16_bit(x) && x.dim() == 2 &&
         x.size(0) <= most_rows(x) && !at::autocast::is_autocast_enabled(at::kCUDA);
}

#ifdef TIDEGATE_WITH_CUDA

Tensor hgrn2_token(const Tensor& x, const torch::nn::Linear& in_proj, const StepProduct& around,
                   const OptionalTensor& gamma, const Tensor& state, const Hgrn2Token& token) {
  namespace gla = kernels::gla;
  const auto product = planned(x, in_proj->weight, optional(in_proj->bias), around);
  if (!product || !is_state(state, x) || (gamma && !is_state(*gamma, x))) return {};
  const int64_t heads = state.size(1), dim = state.size(2);
  gla::TokenProductParams params;
  params.product = *product;
  gla::GlaParams& p = params.step;
  p.layout.batch = p.layout.sequences = x.size(0);
  p.layout.time = 1;
  p.heads = heads;
  p.key_dim = dim;
  p.value_dim = state.size(3);
  p.channels = heads * dim;
  p.scale = token.scale;
  p.gate_kind = gla::GateKind::kLogit;
  p.q_activation = ops::parse_input_activation("hgrn2_step", "q_activation", token.q_activation);
  p.v_activation = ops::parse_input_activation("hgrn2_step", "v_activation", token.v_activation);
  p.gamma = gamma ? gamma->const_data_ptr() : nullptr;
  p.h0 = p.h_final = state.data_ptr();
  const c10::DeviceGuard guard(x.device());
  bool fits = false;
  ops::check_launch("hgrn2_step", "plan", gla::token_product_fits(params, &fits));
  if (!fits) return {};
  Tensor o = at::empty({x.size(0), heads * dim}, x.options());
  p.o = {o.data_ptr(), o.stride(0), o.stride(0), dim, product->product.dtype};
  ops::check_launch("hgrn2_step", "launch",
                    gla::token_product(params, ops::current_stream(x.device())));
  // As hgrn2_step does: autograd would take the new state for the old one, where it has saved that.
  torch::autograd::increment_version(state);
  return o;
}

Tensor hgru_token(const HgruToken& token, const Tensor& state) {
  namespace scan = kernels::scan;
  const auto kind = token.norm.options.kind();
  const Tensor &c = token.c, weight = token.norm.weight, bias = token.norm.bias;
  if (!c.is_cuda() || !is_16_bit(c) || kind == "none" || token.norm.options.heads() != 1 ||
      at::autocast::is_autocast_enabled(at::kCUDA) || !is_state(state, c) ||
      !are_like(c, {c, token.f, token.gate, weight, bias}) ||
      (token.gamma && !is_state(*token.gamma, c)) || (token.theta && !is_state(*token.theta, c))) {
    return {};
  }
  scan::HgruTokenParams params;
  const auto dtype = ops::kernel_dtype(c.scalar_type());
  const auto row = [&](const Tensor& t) {
    if (!t.defined()) return kernels::TimeSeries{};
    return kernels::TimeSeries{t.data_ptr(), t.stride(0), t.stride(0), dtype};
  };
  Tensor y = at::empty(c.sizes(), c.options());
  scan::HgruParams& p = params.step;
  p.layout.batch = p.layout.sequences = c.size(0);
  p.layout.time = 1;
  p.channels = token.f.size(1);
  p.c = row(c);
  p.f = row(token.f);
  p.gamma = token.gamma ? token.gamma->const_data_ptr() : nullptr;
  p.theta = token.theta ? token.theta->const_data_ptr() : nullptr;
  p.h0 = p.h_final = state.data_ptr();
  params.norm_kind =
      kind == "layer" ? kernels::norm::NormKind::kLayer : kernels::norm::NormKind::kRms;
  params.eps = token.norm.options.eps();
  if (weight.defined()) params.norm_weight = weight.const_data_ptr();
  if (bias.defined()) params.norm_bias = bias.const_data_ptr();
  params.gate = row(token.gate);
  params.gate_activation = activation_of(token.gate_activation);
  params.gate_first = token.gate_first;
  params.y = row(y);
  params.h0_is_settled = ops::SettledStatesGuard::is_active();
  if (!scan::hgru_token_fits(params)) return {};
  const c10::DeviceGuard guard(c.device());
  ops::check_launch("hgru_step", "launch",
                    scan::hgru_token_cuda(params, ops::current_stream(c.device())));
  torch::autograd::increment_version(state);
  return y;
}

Tensor hgru_layer_token(const HgruLayer& layer, const Tensor& x, const Tensor& state) {
  namespace scan = kernels::scan;
  const auto& kind = layer.norm.options.kind();
  const Tensor weight = layer.norm.weight;
  const auto in =
      planned(x, layer.in_proj->weight, optional(layer.in_proj->bias), {.norm = &layer.before});
  if (!in || kind == "none" || kind == "layer" || layer.norm.options.heads() != 1 ||
      !is_state(state, x) || !are_like(x, {weight}) ||
      (layer.gamma && !is_state(*layer.gamma, x)) || (layer.theta && !is_state(*layer.theta, x))) {
    return {};
  }
  const int64_t width = state.size(1), channels = layer.theta ? width / 2 : width;
  Tensor y = at::empty({x.size(0), width}, x.options());
  Tensor squares =
      at::empty({scan::hgru_square_parts(channels), kMostRows}, x.options().dtype(at::kFloat));
  scan::HgruTokenProductParams params;
  params.product = *in;
  params.squares = squares.mutable_data_ptr<float>();
  scan::HgruTokenParams& token = params.token;
  token.step.layout.batch = token.step.layout.sequences = x.size(0);
  token.step.layout.time = 1;
  token.step.channels = channels;
  token.step.gamma = layer.gamma ? layer.gamma->const_data_ptr() : nullptr;
  token.step.theta = layer.theta ? layer.theta->const_data_ptr() : nullptr;
  token.step.h0 = token.step.h_final = state.data_ptr();
  token.norm_weight = weight.defined() ? weight.const_data_ptr() : nullptr;
  token.gate_activation = activation_of(layer.gate_activation);
  token.gate_first = layer.gate_first;
  token.y = {y.data_ptr(), y.stride(0), y.stride(0), in->product.dtype};
  token.h0_is_settled = ops::SettledStatesGuard::is_active();

  auto out = planned(y, layer.out_proj->weight, optional(layer.out_proj->bias), {.residual = x});
  if (!out) return {};
  out->has_norm = true;
  out->eps = layer.norm.options.eps();
  out->squares = params.squares;
  out->square_parts = squares.size(0);
  Tensor mixed = at::empty({x.size(0), out->product.outer}, x.options());
  out->product.y = mixed.data_ptr();
  out->product.stride_y = mixed.stride(0);

  const c10::DeviceGuard guard(x.device());
  bool fits = false;
  ops::check_launch("hgru_step", "plan", scan::hgru_token_product_fits(params, &fits));
  if (!fits) return {};
  ops::check_launch("hgru_step", "plan", product::fused_product_fits(*out, &fits));
  if (!fits) return {};
  const auto stream = ops::current_stream(x.device());
  ops::check_launch("hgru_step", "launch", scan::hgru_token_product(params, stream));
  ops::check_launch("step product", "launch", product::fused_product_cuda(*out, stream));
  torch::autograd::increment_version(state);
  return mixed;
}

#else

Tensor hgru_token(const HgruToken&, const Tensor&) { return {}; }

Tensor hgru_layer_token(const HgruLayer&, const Tensor&, const Tensor&) { return {}; }

Tensor hgrn2_token(const Tensor&, const torch::nn::Linear&, const StepProduct&,
                   const OptionalTensor&, const Tensor&, const Hgrn2Token&) {
  return {};
}

#endif

}  // namespace tidegate::nn
