// The residual block that all models are stacked from, and what the models share.
#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include "tidegate/models/config.h"
#include "tidegate/nn/glu.h"
#include "tidegate/nn/lower_bounds.h"
#include "tidegate/nn/norm.h"
#include "tidegate/nn/token_mixer.h"

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace tidegate::models {

/// One mixer's state a layer.
using ModelState = std::vector<nn::MixerState>;

/// What a model returns: logits (of a language model with labels undefined, unless LossOptions ask
/// for them); the mean loss, undefined without labels; one state a layer (empty for classifiers).
struct Output {
  torch::Tensor logits;
  torch::Tensor loss;
  ModelState state;
};

/// Pre-norm residual block [HGRN, Figure 1]: x += mixer(norm(x)); x += GLU(norm(x)).
///
/// config: of one layer (LMConfig::of_layer, where layers differ). Children: mixer_norm, mixer,
/// glu_norm, glu; dropout after mixer and GLU, in training.
class BlockImpl : public nn::Module<BlockImpl> {
 public:
  explicit BlockImpl(const LMConfig& config, const nn::Placement& placement = {});

  void reset() override;
  /// mixer_norm, mixer, glu_norm, glu, in this order.
  void reset_parameters();

  /// x `[B, T, dim]` -> the same, and the mixer's state.
  std::tuple<torch::Tensor, nn::MixerState> forward(
      const torch::Tensor& x, const nn::MixerState& state = {},
      const std::optional<torch::Tensor>& gamma = std::nullopt,
      const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);

  /// forward() of x = residual + added (undefined: zero). Returns y in two parts, (added, residual)
  /// again, and the mixer's state: each sum is made with the norm that follows it, in one pass over
  /// memory.
  std::tuple<torch::Tensor, torch::Tensor, nn::MixerState> forward_pair(
      const torch::Tensor& added, const torch::Tensor& residual, const nn::MixerState& state = {},
      const std::optional<torch::Tensor>& gamma = std::nullopt,
      const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);

  /// One token: x `[B, dim]` -> the same; the mixer's state is updated in place.
  torch::Tensor step(const torch::Tensor& x, const nn::MixerState& state,
                     const std::optional<torch::Tensor>& gamma = std::nullopt);

  /// step() for x = residual + added (undefined: zero), as (added, residual) again.
  std::tuple<torch::Tensor, torch::Tensor> step_pair(
      const torch::Tensor& added, const torch::Tensor& residual, const nn::MixerState& state,
      const std::optional<torch::Tensor>& gamma = std::nullopt);

  /// step() as a chain of products with norms and sums in them, which few rows take on CUDA.
  torch::Tensor step_by_products(const torch::Tensor& x, const nn::MixerState& state,
                                 const std::optional<torch::Tensor>& gamma = std::nullopt);

  /// The child "mixer" as what it can do.
  nn::TokenMixer& mixer() const { return *mixer_; }

  LMConfig config;
  nn::Norm mixer_norm{nullptr};
  nn::Norm glu_norm{nullptr};
  nn::GLU glu{nullptr};

 private:
  torch::Tensor drop(const torch::Tensor& x) const;

  nn::Placement placement_;
  std::shared_ptr<nn::TokenMixer> mixer_;
};

TORCH_MODULE(Block);

/// What CausalLM and the classifiers share: blocks, lower bounds (none where no mixer has a bound
/// or the mode is "none"), final norm. No module itself: a model derives from it too, and its
/// children are the model's own, under the names blocks, lower_bounds, norm.
class Backbone {
 public:
  /// Every layer's lower bound `[S]`, or nothing.
  std::vector<std::optional<torch::Tensor>> gammas() const;
  BlockImpl& block(size_t layer) const;

  LMConfig config;
  /// What the backward pass computes again instead of keeping it: "none"; "norms", the results of
  /// norms that products read, in a pass over memory each; or "blocks", all that blocks compute but
  /// their inputs. How a model trains, and no part of what is saved.
  std::string recompute = "none";
  /// The dtype of the residual stream inside autocast; unset: that of the embedding.
  std::optional<torch::ScalarType> residual_dtype = std::nullopt;
  torch::nn::ModuleList blocks{nullptr};
  nn::LowerBounds lower_bounds{nullptr};
  nn::Norm norm{nullptr};

 protected:
  Backbone(LMConfig config, const nn::Placement& placement);

  /// Makes the children, uninitialised, and registers them with the model.
  void register_children(torch::nn::Module& model);
  int64_t bounds_width() const;
  /// lower_bounds, the blocks, the final norm, in this order.
  void reset_children();
  /// With `init_std`, draws the matrices of the model's projections, embedding, patches and head
  /// anew, in the order of the parameters, and their biases are zero; then, layer by layer, the
  /// biases whose start an option of the mixer says. What a state expansion multiplies by, `scale`
  /// and `mix`, keeps its own start: around zero, nothing would pass.
  void reset_matrices(torch::nn::Module& model) const;
  /// An embedding, as the residual stream begins with it.
  torch::Tensor as_residual(const torch::Tensor& x) const;
  /// All blocks and the final norm over x `[B, T, dim]`; `owner` names the model in errors.
  std::tuple<torch::Tensor, ModelState> run(const char* owner, const torch::Tensor& x,
                                            const std::optional<ModelState>& state,
                                            const std::optional<torch::Tensor>& cu_seqlens) const;

  nn::Placement placement_;
};

/// Writes config.json and model.safetensors into `directory` (made when missing), the files that
/// the Python package reads and writes. Each is written beside its place and renamed into it, so an
/// interrupted save leaves the earlier one. `owner` names the model in errors. Throws c10::Error
/// when that fails, and c10::ValueError for a training run's folder, whose config.json would be
/// lost.
void save_model(const char* owner, const torch::nn::Module& model, const LMConfig& config,
                const std::string& directory);

/// The configuration in `directory`. `owner` names the model in errors.
LMConfig load_config(const char* owner, const std::string& directory);

/// Makes the tensors in `directory` the model's own, in the dtypes they were saved in, on `device`.
/// Throws c10::Error, naming the first tensor that does not fit, when the file is truncated or
/// belongs to another configuration; the model is then unchanged.
void load_weights(torch::nn::Module& model, const std::string& directory, torch::Device device);

/// Throws c10::ValueError unless ids is `[B, T]` (`dims`) of int32 or int64, and, on the CPU, below
/// vocab_size where that is given.
void check_ids(const char* owner, const torch::Tensor& ids,
               std::optional<int64_t> vocab_size = std::nullopt, const std::string& dims = "B, T");

/// Mean of -log p(label) over the labels that are not -100; zero when there is none.
torch::Tensor mean_cross_entropy(torch::Tensor logits, const torch::Tensor& labels);

}  // namespace tidegate::models
