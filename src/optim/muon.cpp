#include "tidegate/optim/muon.h"

#include <ATen/Context.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <unordered_map>
#include <utility>

#include "src/nn/common.h"
#include "tidegate/nn/lower_bounds.h"
#include "tidegate/nn/stacked_linear.h"

namespace tidegate::optim {
namespace {

using torch::Tensor;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

// Quintic Newton-Schulz iteration: steepest at zero, singular values end in about [0.7, 1.2].
constexpr double kLinear = 3.4445, kCubic = -4.7750, kQuintic = 2.0315;
constexpr int kIterations = 5;

/// Whether the CPU multiplies bf16 matrices about twice as fast as fp32: AMX tiles, or AVX512-BF16
/// but for Intel's, which without AMX is slower than fp32.
bool cpu_has_fast_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("amx-tile") ||
         (__builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel"));
#else
  return false;
#endif
}

const void* key_of(const Tensor& t) { return t.unsafeGetTensorImpl(); }

/// Weights and directions of matrices that are orthogonalised together: of one shape, device and
/// dtype.
struct Matrices {
  std::vector<Tensor> weights, directions;

  bool fit(const Tensor& other) const {
    const Tensor& own = directions.front();
    return own.sizes() == other.sizes() && own.device() == other.device() &&
           own.scalar_type() == other.scalar_type();
  }
};

void check_splits(const Tensor& p, const std::vector<int64_t>& rows) {
  const bool has_rows = p.dim() == 2 && std::reduce(rows.begin(), rows.end()) == p.size(0) &&
                        std::none_of(rows.begin(), rows.end(), [](int64_t n) { return n < 0; });
  TORCH_CHECK_VALUE(has_rows,
                    "Muon: splits: expected rows that add up to those of a matrix of shape ",
                    nn::shape_text(p), ", got ", at::IntArrayRef(rows));
}

/// The rows of the matrices stacked in each weight that Muon can take.
std::unordered_map<const void*, std::vector<int64_t>> matrix_rows(const torch::nn::Module& model) {
  std::unordered_map<const void*, std::vector<int64_t>> rows;
  const auto children = model.named_children();
  const torch::nn::Module* const head =
      children.contains("head") ? children["head"].get() : nullptr;
  const auto add_recurrent = [&](const auto* rnn) {
    if (rnn == nullptr) return;
    const int64_t size = rnn->options_base.hidden_size();
    for (const Tensor& weight : rnn->parameters(/*recurse=*/false)) {
      rows[key_of(weight)] = std::vector<int64_t>(weight.size(0) / size, size);
    }
  };
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(module.get())) {
      if (linear != head) rows[key_of(linear->weight)] = nn::stacked_rows(*linear);
    }
    add_recurrent(dynamic_cast<const torch::nn::RNNImpl*>(module.get()));
    add_recurrent(dynamic_cast<const torch::nn::LSTMImpl*>(module.get()));
    add_recurrent(dynamic_cast<const torch::nn::GRUImpl*>(module.get()));
  }
  return rows;
}

std::vector<Tensor> trainable_parameters(const torch::nn::Module& model) {
  std::vector<Tensor> found;
  std::set<const void*> seen;
  for (const Tensor& p : model.parameters()) {
    if (p.requires_grad() && seen.insert(key_of(p)).second) found.push_back(p);
  }
  return found;
}

/// Trainable weight matrices inside the layers: not embeddings, heads tied to them, or bounds.
std::vector<Tensor> hidden_matrices(const torch::nn::Module& model) {
  std::set<const void*> excluded;
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (dynamic_cast<const torch::nn::EmbeddingImpl*>(module.get()) == nullptr &&
        dynamic_cast<const nn::LowerBoundsImpl*>(module.get()) == nullptr) {
      continue;
    }
    for (const Tensor& p : module->parameters(/*recurse=*/false)) excluded.insert(key_of(p));
  }
  std::vector<Tensor> found = trainable_parameters(model);
  std::erase_if(found,
                [&](const Tensor& p) { return p.dim() < 2 || excluded.contains(key_of(p)); });
  return found;
}

/// What Muon takes of a model.
struct Taken {
  std::vector<Tensor> parameters;
  std::vector<std::vector<int64_t>> splits;

  explicit Taken(const torch::nn::Module& model) {
    const auto rows = matrix_rows(model);
    for (const Tensor& p : hidden_matrices(model)) {
      const auto found = rows.find(key_of(p));
      if (found == rows.end()) continue;
      parameters.push_back(p);
      splits.push_back(found->second);
    }
  }
};

std::vector<OptimizerParamGroup> groups_without(const std::vector<Tensor>& taken,
                                                std::vector<OptimizerParamGroup> groups) {
  std::set<const void*> keys;
  for (const Tensor& p : taken) keys.insert(key_of(p));
  for (OptimizerParamGroup& group : groups) {
    std::erase_if(group.params(), [&](const Tensor& p) { return keys.contains(key_of(p)); });
  }
  std::vector<OptimizerParamGroup> left;
  for (OptimizerParamGroup& group : groups) {
    if (!group.params().empty()) left.push_back(std::move(group));
  }
  TORCH_CHECK_VALUE(!taken.empty() && !left.empty(),
                    "MuonAdamW: model: expected one with linear layers and other parameters");
  return left;
}

/// Gives `kept`, which torch made of `given`, the options of that, if it has any.
void keep_options(const OptimizerParamGroup& given, OptimizerParamGroup& kept) {
  if (given.has_options()) kept.set_options(given.options().clone());
}

}  // namespace

Tensor orthogonalize(const Tensor& matrices) {
  const bool is_tall = matrices.size(1) > matrices.size(2);
  Tensor x = is_tall ? matrices.mT().contiguous() : matrices;
  const Tensor norms = at::norm(x.flatten(1), 2, {1}).clamp(1e-7);
  x = x / norms.unsqueeze(-1).unsqueeze(-1);
  if (x.is_cuda() || cpu_has_fast_bf16()) x = x.to(at::kBFloat16);
  for (int i = 0; i < kIterations; ++i) {
    const Tensor gram = at::matmul(x, x.mT());
    const Tensor update = at::baddbmm(gram, gram, gram, kCubic, kQuintic);
    x = at::baddbmm(x, update, x, kLinear);
  }
  x = x.to(matrices.scalar_type());
  return is_tall ? x.mT() : x;
}

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Tensor, momentum);
}

Muon::Muon(std::vector<Tensor> parameters, std::vector<std::vector<int64_t>> splits,
           MuonOptions options)
    : Muon(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(parameters))},
           std::move(splits), std::move(options)) {}

Muon::Muon(const std::vector<OptimizerParamGroup>& groups, std::vector<std::vector<int64_t>> splits,
           MuonOptions options)
    : Optimizer(groups, std::make_unique<MuonOptions>(std::move(options))),
      splits_(std::move(splits)) {
  std::vector<Tensor> all;
  for (const auto& group : groups) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  TORCH_CHECK_VALUE(splits_.size() == all.size(), "Muon: splits: expected one a parameter, ",
                    all.size(), "; got ", splits_.size());
  for (size_t i = 0; i < all.size(); ++i) check_splits(all[i], splits_[i]);
  for (size_t i = 0; i < groups.size(); ++i) keep_options(groups[i], param_groups_[i]);
}

void Muon::add_param_group(const OptimizerParamGroup& group) {
  Optimizer::add_param_group(group);
  keep_options(group, param_groups_.back());
}

struct Muon::Given {
  std::vector<Tensor> parameters;
  std::vector<std::vector<int64_t>> splits;
};

std::vector<Muon::Given> Muon::given_matrices() const {
  std::vector<Given> groups;
  size_t at = 0;
  for (const auto& group : param_groups_) {
    Given& given = groups.emplace_back();
    for (const Tensor& p : group.params()) {
      const size_t number = at++;
      if (!p.grad().defined()) continue;
      TORCH_CHECK(p.grad().layout() == at::kStrided,
                  "Muon: expected dense gradients; got a sparse one");
      given.parameters.push_back(p);
      const bool is_known = number < splits_.size();
      if (!is_known)
        check_splits(p, p.dim() == 2 ? std::vector{p.size(0)} : std::vector<int64_t>());
      given.splits.push_back(is_known ? splits_[number] : std::vector{p.size(0)});
    }
  }
  return groups;
}

Tensor Muon::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const std::vector<Given> given = given_matrices();  // checked before any parameter is changed
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].parameters.empty()) continue;
    step_group(given[i], static_cast<const MuonOptions&>(param_groups_[i].options()));
  }
  return loss;
}

void Muon::step_group(const Given& given, const MuonOptions& options) {
  std::vector<Tensor> gradients, means;
  for (const Tensor& p : given.parameters) {
    auto& state = state_[p.unsafeGetTensorImpl()];
    if (state == nullptr) {
      auto fresh = std::make_unique<MuonParamState>();
      fresh->momentum(at::zeros_like(p));
      state = std::move(fresh);
    }
    gradients.push_back(p.grad());
    means.push_back(static_cast<MuonParamState&>(*state).momentum());
  }
  at::_foreach_lerp_(means, gradients, 1.0 - options.momentum());
  const std::vector<Tensor> ahead = at::_foreach_lerp(gradients, means, options.momentum());
  at::_foreach_mul_(given.parameters, 1.0 - options.lr() * options.weight_decay());
  // In the order in which shapes come, as Python goes through them.
  std::vector<Matrices> alike;
  for (size_t i = 0; i < given.parameters.size(); ++i) {
    const auto weights = given.parameters[i].split_with_sizes(given.splits[i]);
    const auto directions = ahead[i].split_with_sizes(given.splits[i]);
    for (size_t j = 0; j < weights.size(); ++j) {
      if (directions[j].numel() == 0) continue;
      auto place = std::find_if(alike.begin(), alike.end(),
                                [&](const Matrices& m) { return m.fit(directions[j]); });
      if (place == alike.end()) place = alike.insert(alike.end(), Matrices());
      place->weights.push_back(weights[j]);
      place->directions.push_back(directions[j]);
    }
  }
  for (const Matrices& matrices : alike) {
    const Tensor orthogonal = orthogonalize(at::stack(matrices.directions));
    const double ratio =
        static_cast<double>(orthogonal.size(1)) / static_cast<double>(orthogonal.size(2));
    at::_foreach_add_(matrices.weights, orthogonal.unbind(0),
                      -options.lr() * std::sqrt(std::max(1.0, ratio)));
  }
}

template <typename Self, typename Archive>
void Muon::serialize(Self& self, Archive& archive) {
  _TORCH_OPTIM_SERIALIZE_WITH_TEMPLATE_ARG(Muon);
}

void Muon::save(torch::serialize::OutputArchive& archive) const { serialize(*this, archive); }
void Muon::load(torch::serialize::InputArchive& archive) { serialize(*this, archive); }

std::vector<OptimizerParamGroup> parameter_groups(const torch::nn::Module& model,
                                                  const AdamWOptions& options,
                                                  const std::string& decay) {
  nn::check_choice("parameter_groups", "decay", decay, {"matrices", "all"});
  const std::vector<Tensor> all = trainable_parameters(model);
  std::vector<Tensor> decayed = decay == "all" ? all : hidden_matrices(model), others;
  std::set<const void*> keys;
  for (const Tensor& p : decayed) keys.insert(key_of(p));
  std::copy_if(all.begin(), all.end(), std::back_inserter(others),
               [&](const Tensor& p) { return !keys.contains(key_of(p)); });
  std::vector<OptimizerParamGroup> groups;
  const auto add = [&](std::vector<Tensor>& parameters, double weight_decay) {
    if (parameters.empty()) return;
    auto own = std::make_unique<AdamWOptions>(options);
    own->weight_decay(weight_decay);
    groups.emplace_back(std::move(parameters), std::move(own));
  };
  add(decayed, options.weight_decay());
  add(others, 0.0);
  return groups;
}

MuonAdamW::MuonAdamW(const torch::nn::Module& model, const MuonOptions& muon_options,
                     const AdamWOptions& adamw_options, const std::string& decay)
    : muon(Taken(model).parameters, Taken(model).splits, muon_options),
      adamw(groups_without(Taken(model).parameters, parameter_groups(model, adamw_options, decay)),
            adamw_options) {}

void MuonAdamW::step() {
  adamw.step();  // first: it throws where a gradient is sparse, an embedding's
  muon.step();
}

void MuonAdamW::zero_grad(bool set_to_none) {
  muon.zero_grad(set_to_none);
  adamw.zero_grad(set_to_none);
}

void MuonAdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::serialize::OutputArchive of_muon(archive.compilation_unit()),
      of_adamw(archive.compilation_unit());
  muon.save(of_muon);
  adamw.save(of_adamw);
  archive.write("muon", of_muon);
  archive.write("adamw", of_adamw);
}

void MuonAdamW::load(torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive of_muon, of_adamw;
  archive.read("muon", of_muon);
  archive.read("adamw", of_adamw);
  muon.load(of_muon);
  adamw.load(of_adamw);
}

}  // namespace tidegate::optim
