#include "tidegate/nn/hgru.h"
#include "tidegate/ops/hgru.h"
#include "tidegate/ops/init.h"
#include "tidegate/ops/linear_scan.h"

#include <algorithm>

#include "src/nn/common.h"
#include "src/nn/gate_init.h"
#include "src/nn/step_products.h"

namespace tidegate::nn {
namespace {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

struct HgruPreset {
  const char* name;
  bool complex;
  bool bias;
  const char* norm;
};

constexpr HgruPreset kHgruPresets[] = {
    {"paper", true, true, "layer"},
    {"official", true, true, "layer"},
    {"fla", false, false, "rms"},
};

// What the preset decides and the caller did not, filled in.
HGRUOptions resolve(HGRUOptions options) {
  check_positive("HGRU", "dim", options.dim());
  check_positive("HGRU", "expand", options.expand());
  check_choice("HGRU", "preset", options.preset(), {"paper", "official", "fla"});
  for (const HgruPreset& preset : kHgruPresets) {
    if (options.preset() != preset.name) continue;
    options.complex(options.complex().value_or(preset.complex && !options.expansion()));
    options.bias(options.bias().value_or(preset.bias));
    options.norm(options.norm().value_or(preset.norm));
  }
  if (*options.complex() && !options.theta()) options.theta("learned");
  return options;
}

}  // namespace

HGRUImpl::HGRUImpl(const HGRUOptions& given) : options(resolve(given)) {
  check_options();
  reset();
}

void HGRUImpl::check_options() const {
  check_choice("HGRU", "input_gate", options.input_gate(), {"tied", "free", "none"});
  check_choice("HGRU", "forget_gate", options.forget_gate(), {"data", "bound", "none"});
  check_expansion();
  if (*options.complex()) {
    check_choice("HGRU", "theta", *options.theta(), {"learned", "fixed", "data"});
  } else {
    TORCH_CHECK_VALUE(!options.theta(),
                      "HGRU: theta: expected none with complex=False, since a real state is not "
                      "rotated; got '",
                      options.theta().value_or(""), "'");
  }
  TORCH_CHECK_VALUE(options.forget_gate() != "none" || options.input_gate() != "tied",
                    "HGRU: input_gate: expected 'free' or 'none' with forget_gate='none': the tied "
                    "gate is 1 - lambda = 0, so nothing would enter the state; got 'tied'");
  check_gate_options("HGRU", options.forget_gate() == "data", "forget_gate='data'",
                     options.gate_init(), options.gumbel_gate(), channels());
  check_choice("HGRU", "norm", *options.norm(), kNorms);
  check_eps("HGRU", "norm_eps", options.norm_eps());
}

void HGRUImpl::check_expansion() const {
  const std::string kind = options.expansion().value_or("naive");
  const auto kinds = {"naive", "lr", "glt", "glti", "krp", "kp"};
  TORCH_CHECK_VALUE(std::find(kinds.begin(), kinds.end(), kind) != kinds.end(),
                    "HGRU: expansion: expected one of None, 'naive', 'lr', 'glt', 'glti', 'krp', "
                    "'kp'; got '",
                    kind, "'");
  TORCH_CHECK_VALUE(!options.rank() || options.expansion() == "lr",
                    "HGRU: rank: expected none unless expansion='lr', which alone has one; got ",
                    options.rank().value_or(0));
  TORCH_CHECK_VALUE(!options.expansion() || !*options.complex(),
                    "HGRU: complex: expected False with an expansion; got True");
}

int64_t HGRUImpl::theta_rows() const {
  if (options.theta() != "data") return 0;
  return options.bidirectional() ? 2 * channels() : channels();
}

void HGRUImpl::reset() {
  const Placement placement = options.placement();
  const int64_t s = channels();
  int64_t rows = state_size() + theta_rows();
  if (options.forget_gate() == "data") rows += s;
  if (options.output_gate()) rows += state_size();
  if (options.input_gate() == "free") rows += s;
  if (options.expansion()) {
    const UndrawnGuard undrawn;
    expansion = register_module(
        "in_proj", StateExpansion(StateExpansionOptions(*options.expansion(), options.dim(),
                                                        options.expand(), rows / s)
                                      .rank(options.rank())
                                      .bias(*options.bias())
                                      .device(placement.device)
                                      .dtype(placement.dtype)));
  } else {
    in_proj = register_module(
        "in_proj",
        make_linear(options.dim(), std::vector<int64_t>(rows / s, s), *options.bias(), placement));
  }
  if (options.gate_init() && !*options.bias()) {
    const int64_t gates = options.input_gate() == "free" ? 2 : 1;
    gate_bias = register_parameter("gate_bias", make_empty({gates * s}, placement));
  }
  if (options.theta() == "learned" || options.theta() == "fixed") {
    const Tensor empty = options.bidirectional() ? make_empty_wide({2, s}, placement)
                                                 : make_empty_wide({s}, placement);
    theta = options.theta() == "learned" ? register_parameter("theta", empty)
                                         : register_buffer("theta", empty);
  }
  const int64_t width = options.expansion() ? options.dim() : state_size();
  norm = register_module("norm", Norm(NormOptions(width)
                                          .kind(*options.norm())
                                          .eps(options.norm_eps())
                                          .device(placement.device)
                                          .dtype(placement.dtype)));
  out_proj =
      register_module("out_proj", make_linear(width, options.dim(), *options.bias(), placement));
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void HGRUImpl::reset_parameters() {
  if (expansion) {
    expansion->reset_parameters();
  } else {
    reset_linear(in_proj);
  }
  reset_chosen_biases();
  if (gate_bias.defined()) {
    const auto rows = gate_bias.detach().split(channels());
    draw_gates(rows[0], rows.size() > 1 ? rows[1] : Tensor());
  }
  if (theta.defined()) draw_phases(theta.detach());
  norm->reset_parameters();
  reset_linear(out_proj);
}

// The rows of f and i of in_proj's bias by gate_init, and those of theta.
void HGRUImpl::reset_chosen_biases() {
  const Tensor bias = expansion ? expansion->bias : in_proj->bias;
  if (!bias.defined()) return;
  const Tensor rows = bias.detach().view(-1);
  if (options.gate_init()) {
    const int64_t s = channels();
    const int64_t i = state_size() + s + (options.output_gate() ? state_size() : 0);
    draw_gates(rows.narrow(0, state_size(), s),
               options.input_gate() == "free" ? rows.narrow(0, i, s) : Tensor());
  }
  if (theta_rows() > 0) draw_phases(rows.slice(0, -theta_rows()));
}

// RoPE's angles, in every row of as many as there are channels.
void HGRUImpl::draw_phases(const Tensor& phases) const {
  for (const Tensor& row : phases.view({-1, channels()}).unbind(0)) init_rope_theta_(row);
}

// The bias of f by gate_init, and its negative for i where there is one.
void HGRUImpl::draw_gates(const Tensor& f, const Tensor& i) const {
  parse_gate_init("HGRU", *options.gate_init(), channels()).draw(f, options.dim());
  if (i.defined()) i.copy_(f).neg_();
}

std::tuple<Tensor, Tensor> HGRUImpl::forward_checked(const Tensor& x, const OptionalTensor& state,
                                                     const OptionalTensor& gamma,
                                                     const OptionalTensor& cu_seqlens) {
  Parts parts = project(x);
  if (options.gumbel_gate() && is_training()) {
    parts.f = gumbel_gate(parts.f, *options.gumbel_gate());
  }
  if (options.bidirectional()) {
    const auto [ahead, first] = recur(parts, gamma, std::nullopt, 0, cu_seqlens);
    const auto [back, last] = recur(parts, gamma, std::nullopt, 1, cu_seqlens);
    return {output(ahead + back, parts.g), Tensor()};
  }
  const auto [h, final_state] = recur(parts, gamma, state, 0, cu_seqlens);
  return {output(h, parts.g), final_state};
}

Tensor HGRUImpl::step_checked(const Tensor& x, const Tensor& state, const OptionalTensor& gamma) {
  const Parts parts = project(x);
  return output(advance(parts, state, gamma), parts.g);
}

Tensor HGRUImpl::residual_step_checked(NormImpl& before, const Tensor& x, const Tensor& state,
                                       const OptionalTensor& gamma) {
  if (expansion) return x + step_checked(before.forward(x), state, gamma);
  const bool gate_first = options.preset() == "paper";
  const char* const activation = gate_first ? "sigmoid" : "silu";
  if (is_fused() && options.output_gate() && !gate_bias.defined()) {
    const OptionalTensor turn = optional(rotation({}, 0));
    const HgruLayer layer{in_proj, out_proj, before, gamma, turn, *norm, activation, gate_first};
    const Tensor y = hgru_layer_token(layer, x, state);
    if (y.defined()) return y;
  }
  const Parts parts = split(step_product(x, in_proj, {.norm = &before}));
  if (is_fused()) {
    const OptionalTensor theta = optional(rotation(parts, 0));
    const Tensor y =
        hgru_token({parts.c, parts.f, gamma, theta, *norm, parts.g, activation, gate_first}, state);
    if (y.defined()) return step_product(y, out_proj, {.residual = x});
  }
  const Tensor h = advance(parts, state, gamma);
  return step_product(h, out_proj,
                      {.norm = norm.get(),
                       .gate = parts.g,
                       .gate_activation = activation,
                       .gate_first = gate_first,
                       .residual = x});
}

// h of one token.
Tensor HGRUImpl::advance(const Parts& parts, const Tensor& state,
                         const OptionalTensor& gamma) const {
  if (is_fused()) return hgru_step(parts.c, parts.f, gamma, optional(rotation(parts, 0)), state);
  const auto [u, a] = scan_operands(parts, gamma, 0);
  return scan_step(u, a, state).to(parts.c.scalar_type());
}

void HGRUImpl::check_gamma(const OptionalTensor& gamma) const {
  TORCH_CHECK_VALUE(gamma || !needs_gamma(),
                    "HGRU: gamma: expected the lower bound, which is the whole forget gate with "
                    "forget_gate='bound'; got None");
  if (!takes_gamma()) refuse_gamma("HGRU", gamma, " with forget_gate='none'");
  check_lower_bound("HGRU", gamma, "expand*dim", channels(), out_proj->weight);
}

// All projections by one matrix product.
HGRUImpl::Parts HGRUImpl::project(const Tensor& x) {
  return split(expansion ? expansion->forward(x) : apply_linear(in_proj, x));
}

// The parts are views of `all`.
HGRUImpl::Parts HGRUImpl::split(const Tensor& all) const {
  int64_t next = 0;
  const auto take = [&](bool wanted, int64_t rows) {
    if (!wanted) return Tensor();
    if (expansion) return all.select(0, next++);
    next += rows;
    return all.narrow(-1, next - rows, rows);
  };
  Parts parts;
  parts.c = take(true, state_size());
  parts.f = take(options.forget_gate() == "data", channels());
  parts.g = take(options.output_gate(), state_size());
  parts.i = take(options.input_gate() == "free", channels());
  parts.theta = take(theta_rows() > 0, theta_rows());
  if (gate_bias.defined()) {
    const auto rows = gate_bias.to(all.scalar_type()).split(channels());
    parts.f = parts.f + rows[0];
    if (rows.size() > 1) parts.i = parts.i + rows[1];
  }
  return parts;
}

// Gate, norm and output projection of h [..., S or 2S].
Tensor HGRUImpl::output(Tensor h, const Tensor& gate) {
  if (expansion) {
    if (gate.defined()) h = h * (options.preset() == "paper" ? at::sigmoid(gate) : at::silu(gate));
    h = norm->forward(h.unflatten(-1, {options.expand(), options.dim()}).sum(-2));
  } else {
    const bool gate_first = options.preset() == "paper";
    return norm->forward_projected(out_proj, h, gate, gate_first ? "sigmoid" : "silu", gate_first);
  }
  return apply_linear(out_proj, h);
}

// Whether the fused hgru op computes these options; the others compose linear_scan.
bool HGRUImpl::is_fused() const {
  return options.input_gate() == "tied" && options.forget_gate() == "data" && theta_rows() == 0;
}

// The rotation a step of a direction: [S], [..., S] when it is the data's, undefined when real.
Tensor HGRUImpl::rotation(const Parts& parts, int64_t direction) const {
  if (!*options.complex()) return {};
  if (parts.theta.defined()) {
    return widen(parts.theta.narrow(-1, direction * channels(), channels()));
  }
  return options.bidirectional() ? theta.select(0, direction) : theta;
}

// h over the whole sequence ([Re | Im] when complex) and the final state.
std::tuple<Tensor, Tensor> HGRUImpl::recur(const Parts& parts, const OptionalTensor& gamma,
                                           const OptionalTensor& state, int64_t direction,
                                           const OptionalTensor& cu_seqlens) {
  const bool reverse = direction == 1;
  if (is_fused()) {
    return hgru(parts.c, parts.f, gamma, optional(rotation(parts, direction)), state, "silu",
                reverse, cu_seqlens);
  }
  const auto [u, a] = scan_operands(parts, gamma, direction);
  const OptionalTensor h0 = state ? OptionalTensor(to_scan(*state)) : std::nullopt;
  const auto [h, final_state] = linear_scan(u, a, h0, reverse, cu_seqlens);
  return {from_scan(h).to(parts.c.scalar_type()), from_scan(final_state)};
}

// lambda and the input gate; undefined stands for one.
std::tuple<Tensor, Tensor> HGRUImpl::gates(const Parts& parts, const OptionalTensor& gamma) const {
  Tensor decay, rest;
  if (options.forget_gate() == "bound") {
    decay = *gamma;
    rest = 1 - *gamma;
  } else if (options.forget_gate() == "data") {
    const Tensor f = widen(parts.f);
    // sigmoid(-f), not 1 - sigmoid(f): the latter loses its digits when the gate is open.
    decay = at::sigmoid(f);
    rest = at::sigmoid(-f);
    if (gamma) {
      // An open gate likewise: next to one, gamma + (1 - gamma) * decay would be off by roundings
      // that every step repeats.
      rest = (1 - *gamma) * rest;
      decay = at::where(f < 0, *gamma + (1 - *gamma) * decay, 1 - rest);
    }
  }
  if (options.input_gate() == "free") return {decay, at::sigmoid(widen(parts.i))};
  return {decay, options.input_gate() == "tied" ? rest : Tensor()};
}

// What enters the state ([..., S], complex where h is) and its decay ([..., S], or [S] when it does
// not depend on the input), in fp32 or fp64.
std::tuple<Tensor, Tensor> HGRUImpl::scan_operands(const Parts& parts, const OptionalTensor& gamma,
                                                   int64_t direction) const {
  const auto [decay, entering] = gates(parts, gamma);
  Tensor u = at::silu(widen(parts.c));
  if (!*options.complex()) {
    if (entering.defined()) u = u * entering;
    return {u, decay.defined() ? decay.to(u.scalar_type())
                               : at::ones({channels()}, u.options().requires_grad(false))};
  }
  const auto halves = u.chunk(2, -1);
  Tensor re = halves[0], im = halves[1];
  if (entering.defined()) {
    re = re * entering;
    im = im * entering;
  }
  const Tensor phase = rotation(parts, direction).to(u.scalar_type());
  Tensor cos = phase.cos(), sin = phase.sin();
  if (decay.defined()) {
    cos = cos * decay;
    sin = sin * decay;
  }
  return {at::complex(re, im), at::complex(cos, sin)};
}

// One step of linear_scan on a state kept as [Re | Im].
Tensor HGRUImpl::scan_step(const Tensor& u, const Tensor& a, const Tensor& state) const {
  if (!*options.complex()) return linear_scan_step(u, a, state);
  Tensor z = to_scan(state);
  const Tensor h = linear_scan_step(u, a, z);
  state.copy_(from_scan(z));
  return from_scan(h);
}

// [Re | Im] -> complex.
Tensor HGRUImpl::to_scan(const Tensor& state) const {
  if (!*options.complex()) return state;
  const auto halves = state.chunk(2, -1);
  return at::complex(halves[0], halves[1]);
}

// complex -> [Re | Im].
Tensor HGRUImpl::from_scan(const Tensor& h) const {
  return *options.complex() ? at::cat({at::real(h), at::imag(h)}, -1) : h;
}

void HGRUImpl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::HGRU(dim=" << options.dim() << ", complex=" << *options.complex()
         << ", theta=" << options.theta().value_or("none")
         << ", input_gate=" << options.input_gate() << ", forget_gate=" << options.forget_gate()
         << ", output_gate=" << options.output_gate() << ", expand=" << options.expand()
         << ", expansion=" << options.expansion().value_or("none")
         << ", bidirectional=" << options.bidirectional() << ", preset=" << options.preset() << ")";
}

}  // namespace tidegate::nn
