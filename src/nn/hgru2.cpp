#include "tidegate/nn/hgru2.h"
#include "tidegate/ops/hgrn2.h"

#include <algorithm>
#include <cmath>

#include "src/nn/common.h"
#include "src/nn/gate_init.h"
#include "src/nn/step_products.h"

namespace tidegate::nn {
namespace {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

struct Hgru2Preset {
  const char* name;
  const char* q_activation;
  const char* v_activation;
  bool bias;
  const char* norm;
};

constexpr Hgru2Preset kHgru2Presets[] = {
    {"paper", "sigmoid", "silu", true, "layer"},
    {"official", "silu", "none", false, "rms_no_weight"},
    {"fla", "silu", "none", false, "rms"},
};

// Narrower heads are nobody's choice but the caller's own.
constexpr int64_t kMinDefaultHeadDim = 32;

// Channels a head, by whichever of num_heads and expand_ratio is given.
int64_t head_dim(const HGRU2Options& options) {
  const int64_t dim = options.dim();
  const auto heads = options.num_heads();
  if (heads) {
    check_positive("HGRU2", "num_heads", *heads);
    TORCH_CHECK_VALUE(dim % *heads == 0, "HGRU2: num_heads: expected a divisor of dim=", dim,
                      "; got ", *heads);
  }
  auto ratio = options.expand_ratio();
  if (ratio) check_positive("HGRU2", "expand_ratio", *ratio);
  if (!ratio && !heads) {
    ratio = std::min<int64_t>(dim, 128);
    while (dim % *ratio != 0) --*ratio;
    TORCH_CHECK_VALUE(*ratio >= std::min(dim, kMinDefaultHeadDim),
                      "HGRU2: num_heads: expected a divisor of dim=", dim,
                      ", or an expand_ratio, since heads of ", kMinDefaultHeadDim,
                      " to 128 channels do not fit; got neither");
  }
  if (!ratio) ratio = dim / *heads;
  TORCH_CHECK_VALUE(*ratio <= kMaxHeadDim, "HGRU2: expand_ratio: expected at most ", kMaxHeadDim,
                    " channels a head; got ", *ratio);
  TORCH_CHECK_VALUE(dim % *ratio == 0, "HGRU2: expand_ratio: expected a divisor of dim=", dim,
                    "; got ", *ratio);
  TORCH_CHECK_VALUE(!heads || dim == *heads * *ratio,
                    "HGRU2: expand_ratio: expected dim / num_heads = ", dim / heads.value_or(1),
                    ", or only one of the two; got ", *ratio);
  return *ratio;
}

// What the preset decides and the caller did not, filled in.
HGRU2Options resolve(HGRU2Options options) {
  check_positive("HGRU2", "dim", options.dim());
  check_choice("HGRU2", "preset", options.preset(), {"paper", "official", "fla"});
  options.expand_ratio(head_dim(options));
  options.num_heads(options.dim() / *options.expand_ratio());
  for (const Hgru2Preset& preset : kHgru2Presets) {
    if (options.preset() != preset.name) continue;
    options.q_activation(options.q_activation().value_or(preset.q_activation));
    options.v_activation(options.v_activation().value_or(preset.v_activation));
    options.bias(options.bias().value_or(preset.bias));
    options.norm(options.norm().value_or(preset.norm));
  }
  check_choice("HGRU2", "q_activation", *options.q_activation(), kHgrn2Activations);
  check_choice("HGRU2", "v_activation", *options.v_activation(), kHgrn2Activations);
  check_gate_options("HGRU2", /*has_data=*/true, "", options.gate_init(), options.gumbel_gate(),
                     options.dim());
  check_choice("HGRU2", "norm", *options.norm(), kNorms);
  check_eps("HGRU2", "norm_eps", options.norm_eps());
  return options;
}

}  // namespace

HGRU2Impl::HGRU2Impl(const HGRU2Options& given) : options(resolve(given)) { reset(); }

void HGRU2Impl::reset() {
  const Placement placement = options.placement();
  const int64_t dim = options.dim();
  in_proj =
      register_module("in_proj", make_linear(dim, {dim, dim, dim}, *options.bias(), placement));
  if (options.gate_init() && !*options.bias()) {
    gate_bias = register_parameter("gate_bias", make_empty({dim}, placement));
  }
  norm = register_module("norm", Norm(NormOptions(dim)
                                          .kind(*options.norm())
                                          .eps(options.norm_eps())
                                          .device(placement.device)
                                          .dtype(placement.dtype)));
  out_proj = register_module("out_proj", make_linear(dim, dim, *options.bias(), placement));
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void HGRU2Impl::reset_parameters() {
  reset_linear(in_proj);
  reset_chosen_biases();
  if (gate_bias.defined()) draw_gate(gate_bias);
  norm->reset_parameters();
  reset_linear(out_proj);
}

// The rows of f of in_proj's bias, by gate_init.
void HGRU2Impl::reset_chosen_biases() {
  if (!options.gate_init() || !in_proj->bias.defined()) return;
  draw_gate(in_proj->bias.detach().narrow(0, options.dim(), options.dim()));
}

void HGRU2Impl::draw_gate(const Tensor& bias) const {
  parse_gate_init("HGRU2", *options.gate_init(), options.dim()).draw(bias, options.dim());
}

double HGRU2Impl::scale() const {
  return options.preset() == "fla" ? 1.0 / std::sqrt(static_cast<double>(expand_ratio())) : 1.0;
}

std::tuple<Tensor, Tensor> HGRU2Impl::forward_checked(const Tensor& x, const OptionalTensor& state,
                                                      const OptionalTensor& given_gamma,
                                                      const OptionalTensor& cu_seqlens) {
  const OptionalTensor gamma = split_gamma(given_gamma);
  const auto qfv = operands(x);
  if (options.bidirectional()) {
    const auto [ahead, first] = recur(qfv, gamma, std::nullopt, false, cu_seqlens);
    const auto [back, last] = recur(qfv, gamma, std::nullopt, true, cu_seqlens);
    return {output(ahead + back), Tensor()};
  }
  const auto [o, final_state] = recur(qfv, gamma, state, false, cu_seqlens);
  return {output(o), final_state};
}

// What the recurrence reads: the one product [B, T, 3, H, K] where nothing is done to its parts, or
// q, f, v.
std::vector<Tensor> HGRU2Impl::operands(const Tensor& x) {
  const Tensor projected = apply_linear(in_proj, x);
  const bool has_noise = options.gumbel_gate() && is_training();
  if (!gate_bias.defined() && !has_noise) {
    return {projected.unflatten(-1, {3, num_heads(), expand_ratio()})};
  }
  auto qfv = split(projected);
  if (has_noise) qfv[1] = gumbel_gate(qfv[1], *options.gumbel_gate());
  return qfv;
}

Tensor HGRU2Impl::step_checked(const Tensor& x, const Tensor& state, const OptionalTensor& gamma) {
  return output(advance(apply_linear(in_proj, x), state, gamma));
}

Tensor HGRU2Impl::residual_step_checked(NormImpl& before, const Tensor& x, const Tensor& state,
                                        const OptionalTensor& gamma) {
  Tensor o;
  if (!gate_bias.defined()) {
    o = hgrn2_token(x, in_proj, {.norm = &before}, split_gamma(gamma), state,
                    {scale(), *options.q_activation(), *options.v_activation()});
  }
  if (!o.defined()) {
    o = advance(step_product(x, in_proj, {.norm = &before}), state, gamma).flatten(-2);
  }
  return step_product(o, out_proj, {.norm = norm.get(), .residual = x});
}

// o [B, H, K] of one token.
Tensor HGRU2Impl::advance(const Tensor& projected, const Tensor& state,
                          const OptionalTensor& gamma) const {
  const auto qfv = split(projected);
  return hgrn2_step(qfv[0], qfv[1], qfv[2], split_gamma(gamma), state, scale(),
                    *options.q_activation(), *options.v_activation());
}

void HGRU2Impl::check_gamma(const OptionalTensor& gamma) const {
  check_lower_bound("HGRU2", gamma, "dim", options.dim(), out_proj->weight);
}

// The lower bound a head and channel [H, K].
OptionalTensor HGRU2Impl::split_gamma(const OptionalTensor& gamma) const {
  if (!gamma) return std::nullopt;
  return gamma->unflatten(0, {num_heads(), expand_ratio()});
}

// q, f, v [..., H, K]: views of one matrix product, but for an f with a bias of its own.
std::vector<Tensor> HGRU2Impl::split(const Tensor& projected) const {
  auto qfv = projected.unflatten(-1, {3, num_heads(), expand_ratio()}).unbind(-3);
  if (gate_bias.defined()) {
    qfv[1] = qfv[1] + gate_bias.view({num_heads(), expand_ratio()}).to(qfv[1].scalar_type());
  }
  return qfv;
}

std::tuple<Tensor, Tensor> HGRU2Impl::recur(const std::vector<Tensor>& qfv,
                                            const OptionalTensor& gamma,
                                            const OptionalTensor& state, bool reverse,
                                            const OptionalTensor& cu_seqlens) {
  const auto &q = *options.q_activation(), &v = *options.v_activation();
  if (qfv.size() == 1) {
    return hgrn2_qfv(qfv[0], gamma, state, scale(), q, v, reverse, cu_seqlens);
  }
  return hgrn2(qfv[0], qfv[1], qfv[2], gamma, state, scale(), q, v, reverse, cu_seqlens);
}

// Norm and output projection of o [..., H, K].
Tensor HGRU2Impl::output(const Tensor& o) {
  return norm->forward_projected(out_proj, o.flatten(-2));
}

void HGRU2Impl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::HGRU2(dim=" << options.dim() << ", num_heads=" << num_heads()
         << ", bidirectional=" << options.bidirectional() << ", preset=" << options.preset() << ")";
}

}  // namespace tidegate::nn
