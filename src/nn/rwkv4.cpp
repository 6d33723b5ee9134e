#include "tidegate/nn/rwkv4.h"
#include "tidegate/ops/init.h"
#include "tidegate/ops/wkv4.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "src/nn/common.h"
#include "src/nn/products.h"
#include "src/ops/checks.h"

namespace tidegate::nn {
namespace {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

void write(const Tensor& parameter, const std::vector<double>& values) {
  const torch::NoGradGuard no_grad;
  parameter.copy_(at::tensor(values, at::kDouble).view(parameter.sizes()));
}

/// The token before each one of x [B, T, D], and the last of every sequence [N, 1, D]. last
/// [N, 1, D]: the tokens before the first ones; undefined: zeros.
std::pair<Tensor, Tensor> previous_tokens(const Tensor& x, const Tensor& last,
                                          const OptionalTensor& cu_seqlens) {
  Tensor bounds;
  if (cu_seqlens) bounds = ops::packed_bounds({"RWKV4", "x", x}, *cu_seqlens);
  const int64_t count = cu_seqlens ? bounds.numel() - 1 : x.size(0);
  const Tensor first =
      last.defined() ? last.to(x.scalar_type()) : at::zeros({count, 1, x.size(2)}, x.options());
  if (!cu_seqlens) {
    const Tensor whole = at::cat({first, x}, 1);
    return {whole.narrow(1, 0, x.size(1)), whole.narrow(1, x.size(1), 1)};
  }
  if (x.size(1) == 0 || count == 0) return {x, first};
  const Tensor here = at::arange(x.size(1), bounds.options());
  const Tensor sequence =
      at::searchsorted(bounds, here, /*out_int32=*/false, /*right=*/true).sub(1);
  const Tensor begins = here.eq(bounds.index_select(0, sequence)).view({1, -1, 1});
  const Tensor entering = first.select(1, 0).index_select(0, sequence).unsqueeze(0);
  const Tensor before = at::where(begins, entering, at::roll(x, 1, 1));
  const Tensor has_tokens = bounds.diff().gt(0).view({-1, 1, 1});
  const Tensor ends = bounds.narrow(0, 1, count).sub(1).clamp_min(0);
  return {before, at::where(has_tokens, x.select(0, 0).index_select(0, ends).unsqueeze(1), first)};
}

}  // namespace

RWKV4Impl::RWKV4Impl(const RWKV4Options& given) : options(given) {
  check_positive("RWKV4", "dim", options.dim());
  check_choice("RWKV4", "decay_init", options.decay_init(), {"speed", "uniform"});
  TORCH_CHECK_VALUE(options.depth() >= 0.0 && options.depth() <= 1.0,
                    "RWKV4: depth: expected a number from 0 to 1; got ", options.depth());
  reset();
}

void RWKV4Impl::reset() {
  const int64_t dim = options.dim();
  const Placement placement = options.placement();
  in_proj = register_module("in_proj", make_linear(dim, {dim, dim, dim}, false, placement));
  out_proj = register_module("out_proj", make_linear(dim, dim, false, placement));
  w_log = register_parameter("w_log", make_empty_wide({dim}, placement));
  u = register_parameter("u", make_empty_wide({dim}, placement));
  if (options.time_shift()) mix = register_parameter("mix", make_empty({3, dim}, placement));
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void RWKV4Impl::reset_parameters() {
  reset_linear(in_proj);
  reset_linear(out_proj);
  const int64_t dim = options.dim();
  if (options.decay_init() == "uniform") {
    init_uniform_(w_log, -5.0, 3.0);
    init_constant_(u, 0.0);
  } else {
    const double power = 0.7 + 1.3 * options.depth();
    const auto last = static_cast<double>(std::max<int64_t>(dim - 1, 1));
    const double bonus = std::log(0.3);
    std::vector<double> rates, bonuses;
    for (int64_t j = 0; j < dim; ++j) {
      rates.push_back(-5.0 + 8.0 * std::pow(static_cast<double>(j) / last, power));
      bonuses.push_back(bonus + 0.5 * static_cast<double>((j + 1) % 3 - 1));
    }
    write(w_log, rates);
    write(u, bonuses);
  }
  if (!mix.defined()) return;
  const double rest = 1.0 - options.depth();
  std::vector<double> gates, keys, values;
  for (int64_t j = 0; j < dim; ++j) {
    const double place = static_cast<double>(j) / static_cast<double>(dim);
    gates.push_back(std::pow(place, 0.5 * rest));
    keys.push_back(std::pow(place, rest));
    values.push_back(keys.back() + 0.3 * options.depth());
  }
  gates.insert(gates.end(), keys.begin(), keys.end());
  gates.insert(gates.end(), values.begin(), values.end());
  write(mix, gates);
}

std::vector<Tensor> RWKV4Impl::project(const Tensor& x, const Tensor& before) const {
  if (!before.defined()) return apply_linear(in_proj, x).chunk(3, -1);
  const std::vector<Tensor> weights = in_proj->weight.chunk(3);
  std::vector<Tensor> parts;
  for (int64_t i = 0; i < 3; ++i) {
    const Tensor mixed = at::lerp(before, x, mix.select(0, i).to(x.scalar_type()));
    parts.push_back(nn::linear(mixed, weights[i], std::nullopt));
  }
  return parts;
}

std::tuple<Tensor, Tensor> RWKV4Impl::forward_checked(const Tensor& x, const OptionalTensor& state,
                                                      const OptionalTensor& /*gamma*/,
                                                      const OptionalTensor& cu_seqlens) {
  Tensor before, last;
  OptionalTensor given_sums;
  if (state) {
    last = options.time_shift() ? state->narrow(1, 3, 1) : Tensor();
    given_sums = state->narrow(1, 0, 3);
  }
  if (options.time_shift()) std::tie(before, last) = previous_tokens(x, last, cu_seqlens);
  const auto parts = project(x, before);
  auto [o, sums] = wkv4(w_log.exp(), u, parts[1], parts[2], given_sums, cu_seqlens);
  if (options.time_shift()) sums = at::cat({sums, last.to(sums.scalar_type())}, 1);
  return {apply_linear(out_proj, at::sigmoid(parts[0]) * o), sums};
}

Tensor RWKV4Impl::step_checked(const Tensor& x, const Tensor& state,
                               const OptionalTensor& /*gamma*/) {
  const Tensor before = options.time_shift() ? state.select(1, 3).to(x.scalar_type()) : Tensor();
  const auto parts = project(x, before);
  const Tensor o = wkv4_step(w_log.exp(), u, parts[1], parts[2], state.narrow(1, 0, 3));
  if (options.time_shift()) state.select(1, 3).copy_(x);
  return apply_linear(out_proj, at::sigmoid(parts[0]) * o);
}

void RWKV4Impl::check_gamma(const OptionalTensor& gamma) const {
  refuse_gamma("RWKV4", gamma, ", since it has no lower bound");
}

void RWKV4Impl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::RWKV4(dim=" << options.dim()
         << ", time_shift=" << (options.time_shift() ? "true" : "false")
         << ", decay_init=" << options.decay_init() << ", depth=" << options.depth() << ")";
}

}  // namespace tidegate::nn
