// The language model: embedding, blocks, head; training loss, generation.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include "tidegate/models/block.h"

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace tidegate::models {

class KeptRows;

/// Labels of a language model: a tensor `[B, T]` of int64 aligned with the positions, -100 =
/// ignored; "next": the next id of the same sequence; or none (the default).
class Labels {
 public:
  Labels() = default;
  Labels(torch::Tensor labels) : tensor_(std::move(labels)) {}  // NOLINT: a labels tensor is one
  Labels(std::optional<torch::Tensor> labels)                   // NOLINT
      : tensor_(labels.value_or(torch::Tensor())) {}
  Labels(std::string name) : name_(std::move(name)) {}  // NOLINT
  Labels(const char* name) : name_(name) {}             // NOLINT

  /// What `ids` `[B, T]`, below vocab_size, should predict, or undefined. Throws c10::ValueError
  /// for another name, shape or dtype, for labels that are no ids, as far as the CPU can see, and
  /// for the ids themselves.
  torch::Tensor resolve(const torch::Tensor& ids, const std::optional<torch::Tensor>& cu_seqlens,
                        int64_t vocab_size) const;

 private:
  torch::Tensor tensor_;
  std::string name_;
};

/// Labels `[B, T]` that predict the next id; -100 at the end of every sequence.
torch::Tensor next_labels(const torch::Tensor& ids,
                          const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);

/// What CausalLM::forward does beside the plain loss.
struct LossOptions {
  /// Whether logits are returned; unset: where there are no labels. The loss does without them
  /// (tidegate::linear_cross_entropy makes a chunk of rows at a time), so no tensor of tokens x
  /// vocabulary exists in training unless it is asked for here, at a product with the head more.
  std::optional<bool> return_logits = std::nullopt;
  /// Both mean what they mean to tidegate::linear_cross_entropy.
  double label_smoothing = 0.0;
  double z_loss = 0.0;
};

/// How CausalLM::generate continues a prompt.
struct GenerateOptions {
  explicit GenerateOptions(int64_t max_new_tokens) : max_new_tokens_(max_new_tokens) {}

  TORCH_ARG(int64_t, max_new_tokens);
  /// 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature).
  TORCH_ARG(double, temperature) = 1.0;
  /// Draw from the top_k likeliest tokens only,
  TORCH_ARG(std::optional<int64_t>, top_k) = std::nullopt;
  /// and from the fewest whose probabilities reach top_p.
  TORCH_ARG(std::optional<double>, top_p) = std::nullopt;
  /// A row ends with this token, an id of the vocabulary; generation ends when all rows have.
  TORCH_ARG(std::optional<int64_t>, eos) = std::nullopt;
  /// What is drawn depends on this, the row's number and the token's alone, and torch's generators
  /// stay untouched: the same tokens on one device from C++ and from Python. Unset: a seed from
  /// torch's default generator.
  TORCH_ARG(std::optional<int64_t>, seed) = std::nullopt;
  /// `[B]` int32 or int64: prompts shorter than T, padded on the right; read on the host.
  TORCH_ARG(torch::Tensor, lengths) = {};
  /// Draw from tokens that are at least so likely as this times the likeliest.
  TORCH_ARG(std::optional<double>, min_p) = std::nullopt;
  /// Logits of tokens that the row has are divided by this, negative ones multiplied.
  TORCH_ARG(double, repetition_penalty) = 1.0;
};

/// A causal language model over one of the mixers [HGRN, section 3.1 and Figure 1]: embedding
/// (scaled by sqrt(dim) when tied), pre-norm blocks, final norm, head (the embedding's transpose
/// when tied).
///
/// Parameters: `embedding.weight`, `lower_bounds.logits`,
/// `blocks.{k}.{mixer_norm,mixer,glu_norm,glu}.*`, `norm.*`, and `head.weight` when untied.
/// Throws c10::ValueError when the configuration is bidirectional or has no vocabulary.
class CausalLMImpl : public nn::Module<CausalLMImpl>, public Backbone {
 public:
  explicit CausalLMImpl(const LMConfig& config, const nn::Placement& placement = {});

  void reset() override;
  /// embedding (normal, dim^-1/2 when tied, else 0.02), lower_bounds, blocks, norm, head (normal,
  /// 0.02), in this order; after the same torch::manual_seed bitwise Python's parameters.
  void reset_parameters();

  /// ids int32 or int64 `[B, T]` -> logits `[B, T, vocab]` (with labels only where the options ask
  /// for them, else undefined), the mean loss over the labels that are not -100, and the state.
  /// state: the one returned for the tokens before. cu_seqlens: bounds `[N+1]` of the sequences
  /// packed into a B = 1 batch.
  Output forward(const torch::Tensor& ids, const Labels& labels = {},
                 const std::optional<ModelState>& state = std::nullopt,
                 const std::optional<torch::Tensor>& cu_seqlens = std::nullopt,
                 const LossOptions& options = {});

  /// Logits at some positions only: ids `[B, T]`, positions int64 `[B, P]` -> `[B, P, vocab]`; for
  /// tasks that ask at few places, where the head is most of the cost.
  torch::Tensor logits_at(const torch::Tensor& ids, const torch::Tensor& positions);

  /// The empty state of `batch` sequences, one entry a layer.
  ModelState init_state(int64_t batch, std::optional<int64_t> capacity = std::nullopt) const;

  /// One token a sequence: ids `[B]` -> logits `[B, vocab]`; the state is updated in place.
  /// Constant work a token. Call it under torch::NoGradGuard.
  torch::Tensor step(const torch::Tensor& ids, const ModelState& state);

  /// Reads the prompts `[B, T]`: logits `[B, vocab]` after each one's last token, and the state.
  /// Prompts shorter than T, padded on the right, have their lengths `[B]` in `lengths`; the
  /// padding is left out of the computation. capacity: tokens to come, for mixers that keep them.
  std::tuple<torch::Tensor, ModelState> prefill(
      const torch::Tensor& ids, const std::optional<torch::Tensor>& lengths = std::nullopt,
      int64_t capacity = 0);

  /// Continues the prompts ids `[B, T]`; returns ids `[B, T + n]`, n <= max_new_tokens. Each row
  /// is its prompt, then its new tokens, then eos (0 when there is none) up to the end. Records no
  /// gradient.
  torch::Tensor generate(const torch::Tensor& ids, const GenerateOptions& options);

  /// Writes config.json and model.safetensors into `directory`; see save_model.
  void save(const std::string& directory) const;
  using torch::nn::Module::save;

  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear head{nullptr};

 private:
  friend class DecoderRows;
  friend class PromptReader;
  friend class Generation;

  torch::Tensor embed(const torch::Tensor& ids);
  const torch::Tensor& head_weight() const;
  torch::Tensor logits(const torch::Tensor& x) const;
  /// step() without its checks, of lower bounds that are known; into `out`, where it is defined.
  torch::Tensor advance(const torch::Tensor& ids, const ModelState& state,
                        const std::vector<std::optional<torch::Tensor>>& bounds,
                        const torch::Tensor& out = {});

  double scale_;
  /// What the last generate() left for the next one of as many rows.
  std::shared_ptr<KeptRows> kept_;
};

class CausalLM : public torch::nn::ModuleHolder<CausalLMImpl> {
 public:
  using torch::nn::ModuleHolder<CausalLMImpl>::ModuleHolder;
  using Impl = CausalLMImpl;

  /// The model that C++ or Python saved in `directory`, in the dtypes it was saved in, in
  /// evaluation mode: call train() to train on. Throws c10::Error, in one line, when a file is
  /// missing, truncated, or belongs to another configuration.
  static CausalLM load(const std::string& directory, torch::Device device = torch::kCPU);
};

}  // namespace tidegate::models
