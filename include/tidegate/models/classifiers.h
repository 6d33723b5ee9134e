// Classifiers over the same blocks: token sequences and images.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include "tidegate/models/block.h"

#include <optional>
#include <string>

namespace tidegate::models {

/// Classifies token sequences: embedding, blocks, final norm, mean over time, head (HGRN's Long
/// Range Arena models; section 4.1). Padding takes no part in anything: padded batches are packed
/// first.
///
/// Parameters: `embedding.weight`, `lower_bounds`, `blocks`, `norm`, `head.{weight,bias}`. Throws
/// c10::ValueError when the configuration has no vocabulary or no classes.
class SequenceClassifierImpl : public nn::Module<SequenceClassifierImpl>, public Backbone {
 public:
  explicit SequenceClassifierImpl(const LMConfig& config, const nn::Placement& placement = {});

  void reset() override;
  /// embedding (normal, 1), lower_bounds, blocks, norm, head, in this order.
  void reset_parameters();

  /// ids `[B, T]` -> logits `[N, classes]`, the mean loss where labels (int64 `[N]`) are given, no
  /// state. N = B whole rows, or the first `lengths` `[B]` tokens of each (read on the host), or
  /// the N sequences that cu_seqlens `[N+1]` bounds in a B = 1 batch. An empty sequence's pooled
  /// features are zeros.
  Output forward(const torch::Tensor& ids,
                 const std::optional<torch::Tensor>& labels = std::nullopt,
                 const std::optional<torch::Tensor>& lengths = std::nullopt,
                 const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);

  /// Writes config.json and model.safetensors into `directory`; see save_model.
  void save(const std::string& directory) const;
  using torch::nn::Module::save;

  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear head{nullptr};
};

class SequenceClassifier : public torch::nn::ModuleHolder<SequenceClassifierImpl> {
 public:
  using torch::nn::ModuleHolder<SequenceClassifierImpl>::ModuleHolder;
  using Impl = SequenceClassifierImpl;

  /// As CausalLM::load.
  static SequenceClassifier load(const std::string& directory, torch::Device device = torch::kCPU);
};

/// Classifies images [HGRN, Table 7]: patches in reading order, linear embedding, blocks, final
/// norm, mean over patches, head. No class token, no positions, so any image size goes.
///
/// Parameters: `patch.{weight,bias}` with weight `[dim, channels * patch * patch]`, `lower_bounds`,
/// `blocks`, `norm`, `head.{weight,bias}`. Throws c10::ValueError when the configuration has no
/// patch size or no classes.
class ImageClassifierImpl : public nn::Module<ImageClassifierImpl>, public Backbone {
 public:
  explicit ImageClassifierImpl(const LMConfig& config, const nn::Placement& placement = {});

  void reset() override;
  /// patch, lower_bounds, blocks, norm, head, in this order.
  void reset_parameters();

  /// images `[B, C, H, W]`, H and W multiples of the patch size -> logits `[B, classes]`, the mean
  /// loss where labels (int64 `[B]`) are given, no state.
  Output forward(const torch::Tensor& images,
                 const std::optional<torch::Tensor>& labels = std::nullopt);

  /// Writes config.json and model.safetensors into `directory`; see save_model.
  void save(const std::string& directory) const;
  using torch::nn::Module::save;

  torch::nn::Linear patch{nullptr};
  torch::nn::Linear head{nullptr};

 private:
  torch::Tensor patches(const torch::Tensor& images) const;
};

class ImageClassifier : public torch::nn::ModuleHolder<ImageClassifierImpl> {
 public:
  using torch::nn::ModuleHolder<ImageClassifierImpl>::ModuleHolder;
  using Impl = ImageClassifierImpl;

  /// As CausalLM::load.
  static ImageClassifier load(const std::string& directory, torch::Device device = torch::kCPU);
};

}  // namespace tidegate::models
