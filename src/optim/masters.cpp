#include "tidegate/optim/masters.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "src/nn/common.h"
#include "src/ops/scale.h"

namespace tidegate::optim {
namespace {

using torch::Tensor;

/// Gradients by device and dtype.
using Kinds = std::map<std::tuple<c10::DeviceType, int, at::ScalarType>, std::vector<Tensor>>;

Kinds gradients_of(const std::vector<Tensor>& parameters) {
  Kinds kinds;
  for (const Tensor& p : parameters) {
    const Tensor& gradient = p.grad();
    if (!gradient.defined()) continue;
    kinds[{gradient.device().type(), gradient.device().index(), gradient.scalar_type()}].push_back(
        gradient);
  }
  return kinds;
}

/// The norm of all gradients together, in fp32, on the first one's device.
Tensor norm_of(const Kinds& kinds) {
  std::vector<Tensor> norms;
  for (const auto& [kind, gradients] : kinds) {
    for (const Tensor& norm : at::_foreach_norm(gradients, 2, at::kFloat)) {
      norms.push_back(norms.empty() ? norm : norm.to(norms.front().device()));
    }
  }
  return norms.empty() ? at::zeros({}) : at::linalg_vector_norm(at::stack(norms));
}

/// Multiplies by a factor in fp32, whatever the gradients' type.
void scale(const Kinds& kinds, const Tensor& factor) {
  for (const auto& [kind, gradients] : kinds) {
    const at::ScalarType dtype = gradients.front().scalar_type();
    const Tensor own = factor.to(gradients.front().device());
    if (at::elementSize(dtype) < sizeof(float)) {
      ops::scale(gradients, own);  // at::_foreach_mul_ would round the factor to 16 bits
    } else {
      at::_foreach_mul_(gradients, own.to(dtype));
    }
  }
}

void check_dense(const std::vector<Tensor>& parameters) {
  for (const Tensor& p : parameters) {
    TORCH_CHECK_VALUE(
        !p.grad().defined() || p.grad().layout() == at::kStrided,
        "MasterWeights: expected dense gradients; got a sparse one of a parameter of shape ",
        nn::shape_text(p));
  }
}

}  // namespace

MasterWeights::MasterWeights(torch::nn::Module& model, torch::optim::Optimizer& optimizer)
    : MasterWeights(model, std::vector<torch::optim::Optimizer*>{&optimizer}) {}

MasterWeights::MasterWeights(torch::nn::Module& model, MuonAdamW& optimizer)
    : MasterWeights(model,
                    std::vector<torch::optim::Optimizer*>{&optimizer.muon, &optimizer.adamw}) {}

MasterWeights::MasterWeights(torch::nn::Module& model,
                             std::vector<torch::optim::Optimizer*> optimizers)
    : optimizers_(std::move(optimizers)) {
  std::unordered_map<const void*, Tensor> wide;
  for (torch::optim::Optimizer* optimizer : optimizers_) {
    TORCH_CHECK_VALUE(optimizer->state().empty(),
                      "MasterWeights: optimizer: expected one that has not stepped yet; got one "
                      "with states of ",
                      optimizer->state().size(), " parameters");
    for (const auto& group : optimizer->param_groups()) {
      for (const Tensor& p : group.params()) {
        TORCH_CHECK_VALUE(p.scalar_type() != at::kBFloat16 && p.scalar_type() != at::kHalf,
                          "MasterWeights: model: expected parameters in float32, of which masters "
                          "are made; got one of shape ",
                          nn::shape_text(p), " in ", p.scalar_type());
        wide.emplace(p.unsafeGetTensorImpl(), p.detach());
      }
    }
  }
  model.to(torch::kBFloat16);
  for (torch::optim::Optimizer* optimizer : optimizers_) {
    for (auto& group : optimizer->param_groups()) {
      for (Tensor& p : group.params()) {
        const Tensor& before = wide.at(p.unsafeGetTensorImpl());
        if (p.scalar_type() == before.scalar_type()) {
          own_.push_back(p);
          continue;
        }
        weights_.push_back(p);
        masters_.push_back(before.requires_grad_());
        p = before;
      }
    }
  }
}

AdamW* MasterWeights::one_pass() const {
  AdamW* const adamw =
      optimizers_.size() == 1 ? dynamic_cast<AdamW*>(optimizers_.front()) : nullptr;
  return adamw != nullptr && adamw->fits_masters(masters_, weights_) ? adamw : nullptr;
}

void MasterWeights::take_gradients() {
  const torch::NoGradGuard no_grad;
  check_dense(weights_);
  check_dense(own_);
  std::vector<Tensor> wide, narrow;
  for (size_t i = 0; i < weights_.size(); ++i) {
    Tensor& gradient = weights_[i].mutable_grad();
    if (!gradient.defined()) continue;
    if (masters_[i].grad().defined()) {  // taken before, and not stepped by yet
      masters_[i].mutable_grad().add_(gradient);
    } else {
      narrow.push_back(gradient);
      wide.push_back(at::empty_like(masters_[i]));
      masters_[i].mutable_grad() = wide.back();
    }
    gradient = Tensor();
  }
  if (!wide.empty()) at::_foreach_copy_(wide, narrow);
}

Tensor MasterWeights::clip_gradients(double largest) {
  const torch::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(largest >= 0,
                    "MasterWeights: clip_gradients: largest: expected a number of at least 0, got ",
                    largest);
  check_dense(weights_);
  check_dense(own_);
  const bool in_place = one_pass() != nullptr;
  if (!in_place) take_gradients();
  std::vector<Tensor> all = in_place ? weights_ : masters_;
  all.insert(all.end(), own_.begin(), own_.end());
  const Kinds kinds = gradients_of(all);
  const Tensor norm = norm_of(kinds);
  if (std::isfinite(largest)) scale(kinds, (largest / (norm + 1e-6)).clamp_max(1.0));
  return norm;
}

void MasterWeights::step() {
  const torch::NoGradGuard no_grad;
  if (AdamW* const adamw = one_pass()) {
    adamw->step_masters(masters_, weights_);
  } else {
    take_gradients();
    for (torch::optim::Optimizer* optimizer : optimizers_) optimizer->step();
    round_weights();
  }
  for (auto* all : {&weights_, &masters_, &own_}) {
    for (Tensor& parameter : *all) parameter.mutable_grad() = Tensor();
  }
}

void MasterWeights::zero_grad() {
  for (torch::optim::Optimizer* optimizer : optimizers_) optimizer->zero_grad();
  for (Tensor& weight : weights_) weight.mutable_grad() = Tensor();
}

void MasterWeights::round_weights() {
  if (!weights_.empty()) at::_foreach_copy_(weights_, masters_);
}

void MasterWeights::save(torch::serialize::OutputArchive& archive) const {
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    torch::serialize::OutputArchive one(archive.compilation_unit());
    optimizers_[i]->save(one);
    archive.write("optimizer" + std::to_string(i), one);
  }
  for (size_t i = 0; i < masters_.size(); ++i) {
    archive.write("master" + std::to_string(i), masters_[i].detach());
  }
}

void MasterWeights::load(torch::serialize::InputArchive& archive) {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> given(masters_.size());
  for (size_t i = 0; i < masters_.size(); ++i) {
    archive.read("master" + std::to_string(i), given[i]);
    TORCH_CHECK_VALUE(given[i].sizes() == masters_[i].sizes(), "MasterWeights: master", i,
                      ": expected the shape ", masters_[i].sizes(), "; got ", given[i].sizes());
  }
  Tensor more;
  TORCH_CHECK_VALUE(!archive.try_read("master" + std::to_string(masters_.size()), more),
                    "MasterWeights: masters: expected ", masters_.size(), "; got more");
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    torch::serialize::InputArchive one;
    archive.read("optimizer" + std::to_string(i), one);
    optimizers_[i]->load(one);
  }
  for (size_t i = 0; i < masters_.size(); ++i) masters_[i].copy_(given[i]);
  round_weights();
}

}  // namespace tidegate::optim
