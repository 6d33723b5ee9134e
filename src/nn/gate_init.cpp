#include "src/nn/gate_init.h"

#include "tidegate/nn/init.h"
#include "tidegate/ops/init.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/rand.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

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

std::vector<std::string_view> split_at_colons(std::string_view text) {
  std::vector<std::string_view> parts;
  for (size_t end = text.find(':'); end != std::string_view::npos; end = text.find(':')) {
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.push_back(text);
  return parts;
}

bool is_plain_number(std::string_view text, PlainNumber kind) {
  const auto are_digits = [](std::string_view digits) {
    return !digits.empty() && digits.size() <= 9 &&
           std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  };
  if (kind == PlainNumber::kSigned && !text.empty() && text[0] == '-') text.remove_prefix(1);
  const size_t point = text.find('.');
  if (kind == PlainNumber::kWhole || point == std::string_view::npos) return are_digits(text);
  return are_digits(text.substr(0, point)) && are_digits(text.substr(point + 1));
}

GateInit parse_gate_init(const char* owner, const std::string& text, int64_t channels,
                         const char* also) {
  const std::vector<std::string_view> parts = split_at_colons(text);
  GateInit found{std::string(parts[0]), 2, 0.0, 0.5};
  bool is_known = false;
  if (found.kind == "chrono") {
    is_known = parts.size() == 2 && is_plain_number(parts[1], PlainNumber::kWhole);
    if (is_known) found.t_max = std::stoll(std::string(parts[1]));
  } else if (found.kind == "gumbel-softmax" && parts.size() == 3) {
    is_known = is_plain_number(parts[1], PlainNumber::kSigned) && is_plain_number(parts[2]);
    if (is_known) {
      found.alpha = std::stod(std::string(parts[1]));
      found.tau = std::stod(std::string(parts[2]));
    }
  } else {
    is_known = parts.size() == 1 &&
               (found.kind == "standard" || found.kind == "ugi" || found.kind == "gumbel-softmax");
  }
  if (is_known) {
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
  TORCH_CHECK_VALUE(!tau || (*tau > 0.0 && std::isfinite(*tau)), owner,
                    ": gumbel_gate: expected a number above 0; got ", tau.value_or(0.0));
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
