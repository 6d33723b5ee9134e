#include "tidegate/nn/lru.h"
#include "tidegate/ops/init.h"
#include "tidegate/ops/linear_scan.h"
#include "tidegate/ops/lru_scan.h"

#include <cmath>

#include "src/nn/common.h"
#include "src/nn/gate_init.h"

namespace tidegate::nn {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

namespace {

LRUOptions resolve(LRUOptions options) {
  options.state(options.state().value_or(options.dim()));
  return options;
}

SLRUOptions resolve(SLRUOptions options) {
  options.state(options.state().value_or(2 * options.dim()));
  return options;
}

void check_ring(const char* owner, double r_min, double r_max) {
  TORCH_CHECK_VALUE(0 <= r_min && r_min <= r_max && r_max <= 1 && r_max > 0 && r_min < 1, owner,
                    ": r_min, r_max: expected 0 <= r_min <= r_max <= 1, not both 0 nor both 1; "
                    "got ",
                    r_min, " and ", r_max);
}

void draw_normal(const torch::nn::Linear& linear, int64_t inverse_variance) {
  init_normal_(linear->weight, 0.0, 1.0 / std::sqrt(static_cast<double>(inverse_variance)));
}

// [Re | Im] as complex numbers, and back.
Tensor to_complex(const Tensor& halves) {
  const auto parts = halves.chunk(2, -1);
  return at::complex(parts[0], parts[1]);
}

Tensor to_halves(const Tensor& z) { return at::cat({at::real(z), at::imag(z)}, -1); }

}  // namespace

template <typename Derived, typename Options>
LinearRecurrentUnit<Derived, Options>::LinearRecurrentUnit(const Options& given)
    : options(resolve(given)) {
  check_options();
  reset();
}

template <typename Derived, typename Options>
void LinearRecurrentUnit<Derived, Options>::check_options() const {
  const char* name = owner();
  check_positive(name, "dim", options.dim());
  check_positive(name, "state", *options.state());
  check_ring(name, options.r_min(), options.r_max());
  if constexpr (kIsComplex) {
    TORCH_CHECK_VALUE(options.max_phase() > 0 && std::isfinite(options.max_phase()),
                      "LRU: max_phase: expected a number above 0; got ", options.max_phase());
    TORCH_CHECK_VALUE(!options.gate() || *options.gate() == "data",
                      "LRU: gate: expected one of None, 'data'; got '", options.gate().value_or(""),
                      "'");
    check_gate_options("LRU", options.gate().has_value(), "gate='data'", options.gate_init(),
                       options.gumbel_gate(), *options.state());
    TORCH_CHECK_VALUE(!options.lower_bound() || options.gate(),
                      "LRU: lower_bound: expected False unless gate='data', whose modulus it "
                      "bounds; got True");
  }
}

template <typename Derived, typename Options>
void LinearRecurrentUnit<Derived, Options>::reset() {
  const Placement placement = options.placement();
  const int64_t state = *options.state();
  in_proj = this->register_module(
      "in_proj",
      make_linear(options.dim(), std::vector<int64_t>(kIsComplex ? 2 : 1, *options.state()), false,
                  placement));
  nu_log = this->register_parameter("nu_log", make_empty_wide({state}, placement));
  if constexpr (kIsComplex) {
    theta_log = this->register_parameter("theta_log", make_empty_wide({state}, placement));
  }
  gamma_log = this->register_parameter("gamma_log", make_empty_wide({state}, placement));
  if (options.skip()) {
    skip_weight = this->register_parameter("skip_weight", make_empty({options.dim()}, placement));
  }
  out_proj =
      this->register_module("out_proj", make_linear(state_size(), options.dim(), false, placement));
  if constexpr (kIsComplex) {
    if (options.gate()) {
      gate_proj =
          this->register_module("gate_proj", make_linear(options.dim(), state, true, placement));
    }
  }
  if (!UndrawnGuard::is_active()) reset_parameters();
}

template <typename Derived, typename Options>
void LinearRecurrentUnit<Derived, Options>::reset_parameters() {
  draw_normal(in_proj, kIsComplex ? 2 * options.dim() : options.dim());
  init_lru_nu_log_(nu_log, options.r_min(), options.r_max());
  if constexpr (kIsComplex) init_lru_theta_log_(theta_log, options.max_phase());
  init_lru_gamma_log_(gamma_log, nu_log.detach());
  if (skip_weight.defined()) init_normal_(skip_weight, 0.0, 1.0);
  draw_normal(out_proj, *options.state());
  if (gate_proj) reset_linear(gate_proj);
  reset_chosen_biases();
}

template <typename Derived, typename Options>
void LinearRecurrentUnit<Derived, Options>::reset_chosen_biases() {
  if constexpr (kIsComplex) {
    if (options.gate_init()) {
      const Tensor bias = gate_proj->bias.detach();
      parse_gate_init("LRU", *options.gate_init(), bias.numel()).draw(bias, options.dim());
      bias.neg_();  // s is what forgets
    }
  }
}

template <typename Derived, typename Options>
std::tuple<Tensor, Tensor> LinearRecurrentUnit<Derived, Options>::forward_checked(
    const Tensor& x, const OptionalTensor& state, const OptionalTensor& gamma,
    const OptionalTensor& cu_seqlens) {
  if constexpr (kIsComplex) {
    if (gate_proj) {
      const auto [entering, decay] = gated(x, gamma, this->is_training());
      const OptionalTensor h0 = state ? OptionalTensor(to_complex(widen(*state))) : std::nullopt;
      const auto [h, last] = linear_scan(entering, decay, h0, false, cu_seqlens);
      return {output(to_halves(h).to(out_proj->weight.scalar_type()), x), to_halves(last)};
    }
  }
  const auto [h, last] = lru_scan(apply_linear(in_proj, x), nu_log, normalized(theta_log),
                                  gamma_log, state, false, cu_seqlens);
  return {output(h, x), last};
}

template <typename Derived, typename Options>
Tensor LinearRecurrentUnit<Derived, Options>::step_checked(const Tensor& x, const Tensor& state,
                                                           const OptionalTensor& gamma) {
  if constexpr (kIsComplex) {
    if (gate_proj) {
      const auto [entering, decay] = gated(x, gamma, /*has_noise=*/false);
      const Tensor h = to_complex(widen(state));
      linear_scan_step(entering, decay, h);
      state.copy_(to_halves(h));
      return output(state.to(out_proj->weight.scalar_type()), x);
    }
  }
  return output(
      lru_scan_step(apply_linear(in_proj, x), nu_log, normalized(theta_log), gamma_log, state), x);
}

template <typename Derived, typename Options>
void LinearRecurrentUnit<Derived, Options>::check_gamma(const OptionalTensor& gamma) const {
  if constexpr (kIsComplex) {
    check_optional_gamma(owner(), gamma, options.lower_bound(), "state", *options.state(),
                         out_proj->weight);
  } else {
    refuse_gamma(owner(), gamma, ", since its decay has no lower bound");
  }
}

// What enters the state, and lambda_t, complex; with Gumbel-Gate's noise where there is one.
template <typename Derived, typename Options>
std::tuple<Tensor, Tensor> LinearRecurrentUnit<Derived, Options>::gated(const Tensor& x,
                                                                        const OptionalTensor& gamma,
                                                                        bool has_noise)
  requires kIsComplex
{
  Tensor logits = widen(apply_linear(gate_proj, x));
  if (has_noise && options.gumbel_gate()) logits = gumbel_gate(logits, *options.gumbel_gate());
  const Tensor modulus = bounded_decay(-nu_log.exp() * at::sigmoid(logits), gamma);
  const Tensor u = to_complex(widen(apply_linear(in_proj, x)));
  // polar() of the modulus would divide by |lambda| for its gradient, which may be subnormal.
  const Tensor theta = theta_log.exp();
  return {gamma_log.exp() * u, modulus * at::polar(at::ones_like(theta), theta)};
}

template <typename Derived, typename Options>
Tensor LinearRecurrentUnit<Derived, Options>::output(const Tensor& h, const Tensor& x) {
  const Tensor y = apply_linear(out_proj, h);
  return skip_weight.defined() ? y + skip_weight * x : y;
}

template <typename Derived, typename Options>
void LinearRecurrentUnit<Derived, Options>::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::" << owner() << "(dim=" << options.dim()
         << ", state=" << *options.state() << ", skip=" << (options.skip() ? "true" : "false")
         << ", r_min=" << options.r_min() << ", r_max=" << options.r_max();
  if constexpr (kIsComplex) {
    stream << ", max_phase=" << options.max_phase() << ", gate=" << options.gate().value_or("None")
           << ", lower_bound=" << options.lower_bound();
  }
  stream << ")";
}

template class LinearRecurrentUnit<LRUImpl, LRUOptions>;
template class LinearRecurrentUnit<SLRUImpl, SLRUOptions>;

}  // namespace tidegate::nn
