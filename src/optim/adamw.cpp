#include "tidegate/optim/adamw.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "src/ops/adamw.h"

namespace tidegate::optim {
namespace {

using torch::Tensor;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;

/// What one call of the fused kernel steps: parameters of one device and dtype that have made
/// equally many steps, all of them masters, whose weights are `rounded`, or none.
struct Batch {
  std::vector<Tensor> parameters, gradients, means, squares, largest, steps, rounded;
};

using BatchKey = std::tuple<c10::DeviceType, int, at::ScalarType, bool, int64_t>;

AdamWParamState& state_of(
    ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& states,
    const Tensor& parameter, bool amsgrad) {
  auto& state = states[parameter.unsafeGetTensorImpl()];
  if (state == nullptr) {
    auto fresh = std::make_unique<AdamWParamState>();
    fresh->step(0);
    fresh->exp_avg(at::zeros_like(parameter, at::MemoryFormat::Preserve));
    fresh->exp_avg_sq(at::zeros_like(parameter, at::MemoryFormat::Preserve));
    if (amsgrad) {
      fresh->max_exp_avg_sq(at::zeros_like(parameter, at::MemoryFormat::Preserve));
    }
    state = std::move(fresh);
  }
  return static_cast<AdamWParamState&>(*state);
}

/// The kernel reads all tensors of a parameter in the order in which they lie in memory: t itself,
/// or its copy. Torch's kernels compare every stride, of dimensions of size one, too.
Tensor laid_out_like(const Tensor& t, const Tensor& parameter) {
  if (t.strides() == parameter.strides() || t.sizes() != parameter.sizes()) return t;
  if (ops::lies_like(t, parameter)) return t.as_strided(parameter.sizes(), parameter.strides());
  return at::empty_like(parameter, at::MemoryFormat::Preserve).copy_(t);
}

/// Moments that a file laid out in another way stay as they are laid out here.
void lay_out(AdamWParamState& state, const Tensor& parameter, bool amsgrad) {
  state.exp_avg(laid_out_like(state.exp_avg(), parameter));
  state.exp_avg_sq(laid_out_like(state.exp_avg_sq(), parameter));
  if (amsgrad) state.max_exp_avg_sq(laid_out_like(state.max_exp_avg_sq(), parameter));
}

void add_to(Batch& batch, const Tensor& parameter, const Tensor& gradient, AdamWParamState& state,
            bool amsgrad) {
  lay_out(state, parameter, amsgrad);
  batch.parameters.push_back(parameter);
  batch.gradients.push_back(laid_out_like(gradient, parameter));
  batch.means.push_back(state.exp_avg());
  batch.squares.push_back(state.exp_avg_sq());
  if (amsgrad) batch.largest.push_back(state.max_exp_avg_sq());
}

void step_batch(Batch& batch, const AdamWOptions& options, int64_t step) {
  const auto [first, second] = options.betas();
  const Tensor& any = batch.parameters.front();
  // The kernel reads the count on the device; one number serves all parameters.
  const Tensor count =
      at::full({}, static_cast<double>(step), any.options().dtype(at::kFloat).requires_grad(false));
  batch.steps.assign(batch.parameters.size(), count);
  const bool is_ours =
      !batch.rounded.empty() ||
      (any.is_cuda() && any.scalar_type() == at::kFloat && !options.amsgrad() &&
       std::all_of(batch.parameters.begin(), batch.parameters.end(),
                   [](const Tensor& t) { return t.is_non_overlapping_and_dense(); }));
  if (is_ours) {
    const std::optional<Tensor> no_tensor;
    ops::adamw({batch.parameters, batch.gradients, batch.means, batch.squares, batch.steps,
                batch.rounded, no_tensor, options.lr(), first, second, options.weight_decay(),
                options.eps()});
    return;
  }
  at::_fused_adamw_(batch.parameters, batch.gradients, batch.means, batch.squares, batch.largest,
                    batch.steps, options.lr(), first, second, options.weight_decay(), options.eps(),
                    options.amsgrad(), /*maximize=*/false);
}

}  // namespace

Tensor AdamW::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  step_groups({});
  return loss;
}

void AdamW::step_masters(const std::vector<Tensor>& masters, const std::vector<Tensor>& weights) {
  const torch::NoGradGuard no_grad;
  TORCH_CHECK(fits_masters(masters, weights),
              "AdamW: step_masters: expected fp32 masters of bf16 weights, laid out alike, and "
              "amsgrad=false; got others");
  std::unordered_map<const void*, Tensor> by_master;
  for (size_t i = 0; i < masters.size(); ++i) {
    by_master.emplace(masters[i].unsafeGetTensorImpl(), weights[i]);
  }
  step_groups(by_master);
}

bool AdamW::fits_masters(const std::vector<Tensor>& masters,
                         const std::vector<Tensor>& weights) const {
  const auto fits = [&](size_t i) {
    return masters[i].scalar_type() == at::kFloat && masters[i].is_non_overlapping_and_dense() &&
           weights[i].scalar_type() == at::kBFloat16 && ops::lies_like(weights[i], masters[i]);
  };
  for (const auto& group : param_groups_) {
    if (static_cast<const AdamWOptions&>(group.options()).amsgrad()) return false;
  }
  if (masters.size() != weights.size()) return false;
  for (size_t i = 0; i < masters.size(); ++i) {
    if (!fits(i)) return false;
  }
  return true;
}

void AdamW::step_groups(const std::unordered_map<const void*, Tensor>& weights) {
  const auto gradient_of = [&](const Tensor& parameter) -> const Tensor& {
    const auto found = weights.find(parameter.unsafeGetTensorImpl());
    return found == weights.end() ? parameter.grad() : found->second.grad();
  };
  for (const auto& group : param_groups_) {  // before any parameter counts a step
    for (const Tensor& parameter : group.params()) {
      const Tensor& gradient = gradient_of(parameter);
      TORCH_CHECK(!gradient.defined() || !gradient.is_sparse(),
                  "AdamW: expected dense gradients; got a sparse one");
    }
  }
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    std::map<BatchKey, Batch> batches;
    for (const Tensor& parameter : group.params()) {
      const auto found = weights.find(parameter.unsafeGetTensorImpl());
      const bool is_master = found != weights.end();
      const Tensor& gradient = gradient_of(parameter);
      if (!gradient.defined()) continue;
      AdamWParamState& state = state_of(state_, parameter, options.amsgrad());
      state.step(state.step() + 1);
      const BatchKey key{parameter.device().type(), parameter.device().index(),
                         parameter.scalar_type(), is_master, state.step()};
      Batch& batch = batches[key];
      add_to(batch, parameter, gradient, state, options.amsgrad());
      if (is_master) batch.rounded.push_back(found->second);
    }
    for (auto& [key, batch] : batches) step_batch(batch, options, std::get<int64_t>(key));
  }
}

}  // namespace tidegate::optim
