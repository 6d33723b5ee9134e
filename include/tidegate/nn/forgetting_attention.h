// Softmax attention with a forget gate: the Forgetting Transformer's token mixer.
#pragma once

#include "tidegate/nn/module.h"
#include "tidegate/nn/softmax_attention.h"

#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace tidegate::nn {

/// Options of ForgettingAttention; the names, defaults and meanings are those of
/// tidegate.nn.ForgettingAttention in Python.
struct ForgettingAttentionOptions {
  explicit ForgettingAttentionOptions(int64_t dim) : dim_(dim) {}

  TIDEGATE_SOFTMAX_ATTENTION_ARGS(std::nullopt);
  /// "data", "independent", "fixed" or "none".
  TORCH_ARG(std::string, gate) = "data";
  /// The gate's bias at the start: "zero", or "long:T_min:T_max", which spreads the number of
  /// tokens over which heads forget from T_min to T_max in equal steps of its logarithm; or
  /// "standard", "ugi", "chrono:T_max", "gumbel-softmax" or "gumbel-softmax:alpha:tau" (see
  /// init.h).
  TORCH_ARG(std::string, gate_init) = "zero";
  /// tau of Gumbel-Gate, with gate "data": noise on the gate's logits in training; see
  /// GatedLinearRNNImpl.
  TORCH_ARG(std::optional<double>, gumbel_gate) = std::nullopt;
  /// Whether a gamma is taken (HGRN's lower bounds); not with gate "none".
  TORCH_ARG(bool, lower_bound) = false;
  /// Leave out weights that are provably below this in all; see forgetting_attention(). Unset:
  /// none. With QK-norm, which bounds keys, a step reads less of its state, too (on a GPU: of a
  /// state of at least 64 MB of keys); without it, every key that its state holds.
  TORCH_ARG(std::optional<double>, prune) = std::nullopt;
  /// Whether a full state drops tokens whose weight in every query to come is provably below
  /// `prune` in all; the proof needs QK-norm.
  TORCH_ARG(bool, drop_pruned) = false;
  TIDEGATE_PLACEMENT_ARGS
};

/// Forgetting attention: causal softmax attention whose weights fade by a forget gate, a token
/// mixer [Forgetting Transformer, arXiv 2503.02130, eq. 11 to 14 and appendix A]. For each of H
/// heads of D = dim / H channels:
///
///     o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(D) + sum_{j < l <= i} log f_l) v_j
///     f_t = sigmoid(w.x_t + b)        gate "data"
///     f_t = sigmoid(b)                gate "independent"; "fixed": b is not trained
///     f_t = 1                         gate "none": softmax attention
///
/// With lower_bound f_t = gamma + (1 - gamma) * sigmoid(...), one gamma a head.
///
/// Presets, switches and their parameters are Attention's. Besides: `gate_proj.weight` `[H, dim]`,
/// with gate "data", and `gate_bias` `[H]`, which stays fp32 in a bf16 module and is a buffer with
/// gate "fixed".
///
/// State: that of AttentionState. Without one, forward() returns an empty state. Throws
/// c10::ValueError for options that are unknown or do not fit each other, and for shapes that do
/// not fit them.
class ForgettingAttentionImpl : public KeepsFloat32<ForgettingAttentionImpl>,
                                public SoftmaxAttention {
 public:
  explicit ForgettingAttentionImpl(int64_t dim)
      : ForgettingAttentionImpl(ForgettingAttentionOptions(dim)) {}
  ForgettingAttentionImpl(int64_t dim, int64_t num_heads)
      : ForgettingAttentionImpl(ForgettingAttentionOptions(dim).num_heads(num_heads)) {}
  explicit ForgettingAttentionImpl(const ForgettingAttentionOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  bool takes_gamma() const override { return options.lower_bound(); }
  int64_t gamma_size() const override { return switches_.num_heads; }

  /// log f of tokens x `[B, T, dim]`: `[B, T, H]`, fp32 or fp64. gamma as in forward().
  torch::Tensor log_gate(const torch::Tensor& x,
                         const std::optional<torch::Tensor>& gamma = std::nullopt) const override;

  /// The options as they were given.
  ForgettingAttentionOptions options;
  torch::Tensor gate_bias;

 protected:
  std::vector<torch::Tensor> float32_tensors() const override { return {gate_bias}; }
  void reset_gate() override;
  void check_gamma(const std::optional<torch::Tensor>& gamma) const override;
  torch::Tensor training_log_gate(const torch::Tensor& x,
                                  const std::optional<torch::Tensor>& gamma) const override;
  TokenGate token_gate(const StepProjection& project,
                       const std::optional<torch::Tensor>& gamma) const override;
  int64_t gate_heads() const override { return switches_.num_heads; }
  torch::Tensor unreachable(const AttentionState& state) const override;
  torch::Tensor attend(const Operands& x, const TokenLayout& layout) const override;
  torch::Tensor attend_state(const torch::Tensor& q, const AttentionState& state,
                             const TokenLayout& layout) const override;
  torch::Tensor attend_step(const torch::Tensor& q, const AttentionState& state) const override;

 private:
  /// What the gate is the sigmoid of, with gate "data", fp32 or fp64.
  torch::Tensor gate_logits(const torch::Tensor& x) const;

  /// T_min and T_max of the long initialisation.
  std::optional<std::pair<double, double>> long_;
};

TORCH_MODULE(ForgettingAttention);

}  // namespace tidegate::nn
