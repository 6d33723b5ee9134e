#include "src/nn/gate_init.h"

#include "tidegate/nn/init.h"
#include "tidegate/ops/init.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/rand.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <regex>

namespace tidegate::nn {

namespace init {

void standard_(at::Tensor p, std::optional<int64_t> d) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(d.value_or(p.numel())));
  init_uniform_(p, -bound, bound);
}

void chrono_(at::Tensor p, int64_t t_max) { init_chrono_(p, t_max); }

void ugi_(at::Tensor p, std::optional<int64_t> d) {
  init_gumbel_softmax_(p, d.value_or(p.numel()), 0.0, 1.0);
}

void gumbel_softmax_(at::Tensor p, std::optional<int64_t> d, double alpha, double tau) {
  init_gumbel_softmax_(p, d.value_or(p.numel()), alpha, tau);
}

}  // namespace init

void GateInit::draw(const at::Tensor& bias, int64_t dim) const {
  if (kind == "standard") {
    init::standard_(bias, dim);
  } else if (kind == "chrono") {
    init::chrono_(bias, t_max);
  } else {
    init::gumbel_softmax_(bias, std::nullopt, alpha, tau);
  }
}

GateInit parse_gate_init(const char* owner, const std::string& text, int64_t channels,
                         const char* also) {
  static const std::regex spec(
      R"((standard|ugi)|(chrono):(\d{1,9})|(gumbel-softmax)(:(-?\d{1,9}(\.\d{1,9})?):(\d{1,9}(\.\d{1,9})?))?)");
  std::smatch match;
  if (std::regex_match(text, match, spec)) {
    GateInit found{match[1].str() + match[2].str() + match[4].str(), 2, 0.0, 0.5};
    if (match[2].matched) found.t_max = std::stoll(match[3]);
    if (match[5].matched) {
      found.alpha = std::stod(match[6]);
      found.tau = std::stod(match[8]);
    }
    if (found.kind == "ugi") found.tau = 1.0;
    if (found.t_max >= 2 && found.tau > 0.0) {
      const bool is_spread = found.kind == "ugi" || found.kind == "gumbel-softmax";
      TORCH_CHECK_VALUE(!is_spread || channels >= 2, owner,
                        ": gate_init: expected 2 or more channels with '", text,
                        "', which spreads them over (1/d, 1 - 1/d); got ", channels);
      return found;
    }
  }
  TORCH_CHECK_VALUE(false, owner, ": gate_init: expected ", also,
                    "'standard', 'ugi', 'chrono:T_max' with T_max of 2 or more, or "
                    "'gumbel-softmax:alpha:tau' with tau above 0; got '",
                    text, "'");
}

void check_gumbel_gate(const char* owner, std::optional<double> tau) {
  TORCH_CHECK_VALUE(!tau || *tau > 0.0, owner, ": gumbel_gate: expected a number above 0; got ",
                    tau.value_or(0.0));
}

void check_gate_options(const char* owner, bool has_data, const char* needed,
                        const std::optional<std::string>& gate_init,
                        std::optional<double> gumbel_gate, int64_t channels) {
  TORCH_CHECK_VALUE(has_data || !gate_init, owner, ": gate_init: expected None unless ", needed,
                    ", whose logits it changes; got '", gate_init.value_or(""), "'");
  TORCH_CHECK_VALUE(has_data || !gumbel_gate, owner, ": gumbel_gate: expected None unless ", needed,
                    ", whose logits it changes; got ", gumbel_gate.value_or(0.0));
  if (gate_init) parse_gate_init(owner, *gate_init, channels);
  check_gumbel_gate(owner, gumbel_gate);
}

at::Tensor gumbel_gate(const at::Tensor& f, double tau) {
  // Uniform numbers are multiples of 2^-24 below one: zero stands for what is half as small.
  const at::Tensor u = at::rand(f.sizes(), f.options().dtype(at::kFloat).requires_grad(false))
                           .clamp(std::ldexp(1.0, -25));
  const at::Tensor wide = f.scalar_type() == at::kDouble ? f : f.to(at::kFloat);
  return ((wide + (u.log() - (-u).log1p())) / tau).to(f.scalar_type());
}

}  // namespace tidegate::nn
