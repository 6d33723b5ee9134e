#include "tidegate/nn/expansion.h"
#include "tidegate/ops/init.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "src/nn/common.h"

namespace tidegate::nn {

using torch::Tensor;

StateExpansionImpl::StateExpansionImpl(const StateExpansionOptions& given) : options(given) {
  const bool is_grouped = options.kind() == "glt" || options.kind() == "glti";
  TORCH_CHECK_VALUE(!is_grouped || options.dim() % options.expand() == 0,
                    "HGRU: expand: expected a divisor of dim=", options.dim(), " with expansion='",
                    options.kind(), "'; got ", options.expand());
  if (!options.rank()) {
    options.rank(std::max<int64_t>(1, options.dim() / (options.expand() + 1)));
  }
  check_positive("HGRU", "rank", *options.rank());
  reset();
}

void StateExpansionImpl::reset() {
  const int64_t p = options.parts(), n = options.expand(), d = options.dim(), r = *options.rank();
  const auto make = [&](const char* name, std::vector<int64_t> shape) {
    return register_parameter(name, make_empty(shape, options.placement()));
  };
  const std::string& kind = options.kind();
  if (kind == "naive") weight = make("weight", {p, n, d, d});
  if (kind == "lr") {
    down = make("down", {p, r, d});
    up = make("up", {p, n, d, r});
  }
  if (kind == "glt" || kind == "glti") weight = make("weight", {p, n, d, d / n});
  if (kind == "glti") mix = make("mix", {p, n, n});
  if (kind == "krp" || kind == "kp") weight = make("weight", {p, d, d});
  if (kind == "krp") scale = make("scale", {p, n, d});
  if (kind == "kp") scale = make("scale", {p, n});
  if (options.bias()) bias = make("bias", {p, n, d});
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void StateExpansionImpl::reset_parameters() {
  const auto uniform = [](const Tensor& parameter, int64_t fan_in) {
    if (!parameter.defined()) return;
    const double bound = 1.0 / std::sqrt(static_cast<double>(fan_in));
    init_uniform_(parameter, -bound, bound);
  };
  for (const Tensor& parameter : {weight, down, up}) {
    if (parameter.defined()) uniform(parameter, parameter.size(-1));
  }
  if (mix.defined()) init_normal_(mix, 0.0, 1.0 / std::sqrt(static_cast<double>(mix.size(-1))));
  if (scale.defined()) init_normal_(scale, 0.0, 1.0);
  uniform(bias, options.dim());
}

// [P, ..., n, d] without the bias.
Tensor StateExpansionImpl::expanded(const Tensor& x) const {
  const int64_t p = options.parts(), n = options.expand(), d = options.dim();
  const std::string& kind = options.kind();
  if (kind == "naive") {
    return at::linear(x, weight.flatten(0, 2)).unflatten(-1, {p, n, d}).movedim(-3, 0);
  }
  if (kind == "lr") {
    const Tensor low = at::linear(x, down.flatten(0, 1)).unflatten(-1, {p, *options.rank()});
    return at::einsum("...pr,pidr->p...id", {low, up});
  }
  if (kind == "glt" || kind == "glti") {
    const Tensor groups = x.unflatten(-1, {n, d / n});
    const Tensor y = at::einsum("...ie,pide->p...id", {groups, weight});
    return kind == "glt" ? y : at::einsum("p...id,pim->p...md", {y, mix});
  }
  const Tensor one = at::linear(x, weight.flatten(0, 1)).unflatten(-1, {p, d});
  return at::einsum(kind == "krp" ? "...pd,pid->p...id" : "...pd,pi->p...id", {one, scale});
}

Tensor StateExpansionImpl::forward(const Tensor& x) {
  Tensor y = expanded(x);
  if (bias.defined()) {
    std::vector<int64_t> shape(y.dim(), 1);
    shape.front() = options.parts();
    shape[y.dim() - 2] = options.expand();
    shape.back() = options.dim();
    y = y + bias.view(shape);
  }
  return y.flatten(-2);
}

}  // namespace tidegate::nn
