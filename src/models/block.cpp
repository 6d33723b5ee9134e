#include "tidegate/models/block.h"
#include "tidegate/models/safetensors.h"
#include "tidegate/ops/init.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "src/models/file_io.h"
#include "src/models/json.h"
#include "src/models/mixers.h"
#include "src/models/recompute.h"
#include "src/nn/common.h"
#include "src/nn/step_products.h"
#include "src/ops/checks.h"
#include "src/ops/recipes.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

constexpr char kConfigFile[] = "config.json";
constexpr char kWeightsFile[] = "model.safetensors";
// What a training run has in its folder, whichever of the two ways it saves.
constexpr char kCheckpoint[] = "checkpoint.pt";
constexpr char kCheckpoints[] = "checkpoints", kCheckpointBeginning[] = "step-";

nn::Norm make_norm(const std::string& kind, const LMConfig& config,
                   const nn::Placement& placement) {
  return nn::Norm(nn::NormOptions(config.dim)
                      .kind(kind)
                      .eps(config.norm_eps)
                      .device(placement.device)
                      .dtype(placement.dtype));
}

// Parameters and buffers by name, as a state_dict holds them.
std::map<std::string, Tensor> named_tensors(const torch::nn::Module& model) {
  std::map<std::string, Tensor> tensors;
  for (const auto& item : model.named_parameters()) tensors.emplace(item.key(), item.value());
  for (const auto& item : model.named_buffers()) tensors.emplace(item.key(), item.value());
  return tensors;
}

void check_fit(const std::map<std::string, Tensor>& own, const TensorMap& tensors,
               const std::string& source) {
  for (const auto& [name, tensor] : own) {
    TORCH_CHECK_VALUE(tensors.count(name) == 1, source, ": no tensor '", name,
                      "', which the configuration asks for");
  }
  for (const auto& [name, given] : tensors) {
    const auto found = own.find(name);
    TORCH_CHECK_VALUE(found != own.end(), source, ": tensor '", name,
                      "' has no place in the configuration");
    TORCH_CHECK_VALUE(given.sizes() == found->second.sizes(), source, ": '", name, "': expected ",
                      nn::shape_text(found->second), " by the configuration; got ",
                      nn::shape_text(given));
    TORCH_CHECK_VALUE(given.is_floating_point(), source, ": '", name,
                      "': expected a floating-point dtype; got ",
                      ops::dtype_name(given.scalar_type()));
  }
}

// Whether it is a run's folder, as holds_run() in python/tidegate/models/block.py finds it: it
// holds checkpoints, or the config.json of a run that has not come to its first one.
bool holds_run(const std::string& directory) {
  if (is_file(join(directory, kCheckpoint)) ||
      holds_name(join(directory, kCheckpoints), kCheckpointBeginning)) {
    return true;
  }
  const std::string path = join(directory, kConfigFile);
  if (!is_file(path)) return false;
  try {
    const Json values = parse_json(read_text(path));
    return values.is_object() && values.contains("train") && values.contains("model");
  } catch (const JsonError&) {
    return false;
  } catch (const c10::Error&) {  // it cannot be read
    return false;
  }
}

}  // namespace

BlockImpl::BlockImpl(const LMConfig& config, const nn::Placement& placement)
    : config(config), placement_(placement) {
  config.validate();
  reset();
}

void BlockImpl::reset() {
  mixer_norm = register_module("mixer_norm", make_norm(config.norm, config, placement_));
  const auto mixer = register_module("mixer", make_mixer(config, placement_));
  mixer_ = std::dynamic_pointer_cast<nn::TokenMixer>(mixer);
  glu_norm = register_module("glu_norm", make_norm(config.norm, config, placement_));
  glu = register_module("glu", nn::GLU(nn::GLUOptions(config.dim)
                                           .hidden(config.glu_hidden)
                                           .activation(config.glu_activation)
                                           .bias(config.glu_bias)
                                           .device(placement_.device)
                                           .dtype(placement_.dtype)));
}

void BlockImpl::reset_parameters() {
  mixer_norm->reset_parameters();
  mixer_->reset_parameters();
  glu_norm->reset_parameters();
  glu->reset_parameters();
}

Tensor BlockImpl::drop(const Tensor& x) const {
  return at::dropout(x, config.dropout, is_training());
}

std::tuple<Tensor, nn::MixerState> BlockImpl::forward(const Tensor& x, const nn::MixerState& state,
                                                      const std::optional<Tensor>& gamma,
                                                      const std::optional<Tensor>& cu_seqlens) {
  const auto [added, residual, next] = forward_pair({}, x, state, gamma, cu_seqlens);
  return {residual + added, next};
}

std::tuple<Tensor, Tensor, nn::MixerState> BlockImpl::forward_pair(
    const Tensor& added, const Tensor& residual, const nn::MixerState& state,
    const std::optional<Tensor>& gamma, const std::optional<Tensor>& cu_seqlens) {
  const auto [x, sum] = mixer_norm->forward_added(added, residual);
  auto [y, next] = mixer_->mix(x, state, gamma, cu_seqlens);
  const auto [z, mixed] = glu_norm->forward_added(drop(y), sum);
  return {drop(glu->forward(z)), mixed, next};
}

Tensor BlockImpl::step(const Tensor& x, const nn::MixerState& state,
                       const std::optional<Tensor>& gamma) {
  const auto [added, residual] = step_pair({}, x, state, gamma);
  return residual + added;
}

std::tuple<Tensor, Tensor> BlockImpl::step_pair(const Tensor& added, const Tensor& residual,
                                                const nn::MixerState& state,
                                                const std::optional<Tensor>& gamma) {
  const auto [x, sum] = mixer_norm->forward_added(added, residual);
  const Tensor y = mixer_->mix_step(x, state, gamma);
  const auto [z, mixed] = glu_norm->forward_added(y, sum);
  return {glu->forward(z), mixed};
}

Tensor BlockImpl::step_by_products(const Tensor& x, const nn::MixerState& state,
                                   const std::optional<Tensor>& gamma) {
  const Tensor mixed = mixer_->mix_residual_step(*mixer_norm, x, state, gamma);
  const Tensor hidden = nn::step_product(
      mixed, glu->in_proj, {.norm = glu_norm.get(), .glu = glu->options.activation().c_str()});
  return nn::step_product(hidden, glu->out_proj, {.residual = mixed});
}

Backbone::Backbone(LMConfig given, const nn::Placement& placement)
    : config(std::move(given)), placement_(placement) {
  config.validate();
}

void Backbone::register_children(torch::nn::Module& model) {
  const nn::UndrawnGuard undrawn;
  blocks = model.register_module("blocks", torch::nn::ModuleList());
  for (int64_t k = 0; k < config.layers; ++k) {
    blocks->push_back(Block(config.of_layer(k), placement_));
  }
  lower_bounds = nullptr;
  if (const int64_t width = bounds_width()) {
    lower_bounds = model.register_module(
        "lower_bounds", nn::LowerBounds(nn::LowerBoundsOptions(config.layers, width)
                                            .mode(config.lower_bound)
                                            .device(placement_.device)
                                            .dtype(placement_.dtype)));
  }
  norm = model.register_module(
      "norm", make_norm(config.final_norm.value_or(config.norm), config, placement_));
}

// How wide the lower bounds are; zero where there are none.
int64_t Backbone::bounds_width() const {
  std::set<int64_t> widths;
  bool is_needed = false;
  for (size_t k = 0; k < blocks->size(); ++k) {
    const nn::TokenMixer& mixer = block(k).mixer();
    if (mixer.takes_gamma()) widths.insert(mixer.gamma_size());
    is_needed = is_needed || mixer.needs_gamma();
  }
  if (config.lower_bound == "none" || widths.empty()) {
    TORCH_CHECK_VALUE(!is_needed,
                      "LMConfig: lower_bound: expected 'cumulative', 'independent' or "
                      "'decreasing' with forget_gate='bound', whose forget gate is the bound; got "
                      "'none'");
    return 0;
  }
  std::string names;
  for (const int64_t width : widths) names += (names.empty() ? "" : ", ") + std::to_string(width);
  TORCH_CHECK_VALUE(widths.size() == 1,
                    "LMConfig: lower_bound: expected 'none', or mixers whose bounds have one "
                    "width; got widths ",
                    names);
  return *widths.begin();
}

void Backbone::reset_children() {
  if (lower_bounds) lower_bounds->reset_parameters();
  for (size_t k = 0; k < blocks->size(); ++k) block(k).reset_parameters();
  norm->reset_parameters();
}

void Backbone::reset_matrices(torch::nn::Module& model) const {
  if (!config.init_std) return;
  for (const auto& item : model.named_parameters()) {
    const std::string& name = item.key();
    const size_t dot = std::min(name.rfind('.'), name.size());
    const std::string owner = name.substr(0, dot);
    const bool is_top = owner == "embedding" || owner == "patch" || owner == "head";
    if (!owner.ends_with("_proj") && !is_top) continue;
    const std::string kind = name.substr(dot + 1);
    if (kind == "bias") {
      init_constant_(item.value(), 0.0);
    } else if (kind != "scale" && kind != "mix") {
      init_normal_(item.value(), 0.0, *config.init_std);
    }
  }
  for (size_t k = 0; k < blocks->size(); ++k) block(k).mixer().reset_chosen_biases();
}

BlockImpl& Backbone::block(size_t layer) const { return *(*blocks.ptr())[layer]->as<BlockImpl>(); }

std::vector<std::optional<Tensor>> Backbone::gammas() const {
  std::vector<std::optional<Tensor>> gammas(blocks->size());
  if (lower_bounds) {
    const auto rows = lower_bounds.ptr()->forward().unbind(0);
    for (size_t k = 0; k < rows.size(); ++k) {
      if (block(k).mixer().takes_gamma()) gammas[k] = rows[k];
    }
  }
  return gammas;
}

Tensor Backbone::as_residual(const Tensor& x) const {
  return residual_dtype && nn::is_autocast(x) ? x.to(*residual_dtype) : x;
}

std::tuple<Tensor, ModelState> Backbone::run(const char* owner, const Tensor& x,
                                             const std::optional<ModelState>& state,
                                             const std::optional<Tensor>& cu_seqlens) const {
  TORCH_CHECK_VALUE(!state || state->size() == blocks->size(), owner,
                    ": state: expected one state for each of the ", blocks->size(), " layers; got ",
                    state ? state->size() : 0);
  nn::check_choice(owner, "recompute", recompute, {"none", "norms", "blocks"});
  std::optional<ops::Recomputing> recomputing;
  if (recompute == "norms" && torch::GradMode::is_enabled()) recomputing.emplace();
  const bool again = recompute == "blocks" && torch::GradMode::is_enabled();
  Tensor added, residual = at::dropout(as_residual(x), config.dropout, blocks->is_training());
  ModelState states(blocks->size());
  const auto bounds = gammas();
  for (size_t k = 0; k < blocks->size(); ++k) {
    const nn::MixerState before = state ? (*state)[k] : nn::MixerState{};
    // A cache of tokens is written in place, which must not happen twice.
    if (again && before.empty()) {
      const Tensor sum = added.defined() ? residual + added : residual;
      std::tie(residual, states[k]) = forward_recomputed(block(k), sum, bounds[k], cu_seqlens);
      added = Tensor();
      continue;
    }
    std::tie(added, residual, states[k]) =
        block(k).forward_pair(added, residual, before, bounds[k], cu_seqlens);
  }
  return {std::get<0>(norm.ptr()->forward_added(added, residual)), states};
}

void save_model(const char* owner, const torch::nn::Module& model, const LMConfig& config,
                const std::string& directory) {
  TORCH_CHECK_VALUE(!holds_run(directory), owner, ".save: ", directory,
                    ": expected a folder for a model; got a run, whose ", kConfigFile,
                    " would be lost: its model has its place in ", join(directory, "model"),
                    ", where tidegate.training.export_trained() writes it");
  make_folders(directory);
  save_safetensors(named_tensors(model), join(directory, kWeightsFile), {{"format", "pt"}});
  write_text(join(directory, kConfigFile), config.to_json());
}

LMConfig load_config(const char* owner, const std::string& directory) {
  for (const char* name : {kConfigFile, kWeightsFile}) {
    const std::string path = join(directory, name);
    TORCH_CHECK(is_file(path), owner, ".load: ", path, ": no such file");
  }
  const std::string path = join(directory, kConfigFile);
  const std::string text = read_text(path);
  const auto wrong = first_byte_not_utf8(text);
  TORCH_CHECK_VALUE(!wrong, path, ": not UTF-8 text: byte ", *wrong);
  return LMConfig::from_json(text);
}

void load_weights(torch::nn::Module& model, const std::string& directory, torch::Device device) {
  const std::string path = join(directory, kWeightsFile);
  const TensorMap tensors = load_safetensors(path);
  const auto own = named_tensors(model);
  check_fit(own, tensors, path);
  for (const auto& [name, tensor] : own) tensor.set_data(tensors.at(name).to(device));
}

Tensor mean_cross_entropy(Tensor logits, const Tensor& labels) {
  if (logits.scalar_type() == torch::kBFloat16 || logits.scalar_type() == torch::kHalf) {
    logits = logits.to(torch::kFloat);
  }
  const Tensor flat = labels.flatten().to(torch::kLong);
  const Tensor total = at::cross_entropy_loss(logits.flatten(0, -2), flat, {}, at::Reduction::Sum,
                                              /*ignore_index=*/-100);
  return total / (flat != -100).sum().clamp_min(1);
}

}  // namespace tidegate::models
