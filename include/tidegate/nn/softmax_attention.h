// What softmax attention's mixers share: projections, KV-shift, norms, positions, state, output.
#pragma once

#include <torch/nn/modules/linear.h>
#include "tidegate/nn/module.h"
#include "tidegate/nn/norm.h"
#include "tidegate/nn/token_mixer.h"

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace tidegate::nn {

// clang-format off
/// Options that Attention and ForgettingAttention both have; the names, defaults and meanings are
/// those of tidegate.nn.Attention in Python. theta: the default of rope.
#define TIDEGATE_SOFTMAX_ATTENTION_ARGS(theta)                                                 \
  /** Width of x and y. */                                                                     \
  TORCH_ARG(int64_t, dim);                                                                     \
  /** H, a divisor of dim. Unset: dim / 64 (1 where dim is smaller). */                        \
  TORCH_ARG(std::optional<int64_t>, num_heads) = std::nullopt;                                 \
  /** "llama" or "pro": what the switches that are unset are. */                               \
  TORCH_ARG(std::string, preset) = "llama";                                                    \
  /** Heads of keys and values, a divisor of H. Unset: H. */                                   \
  TORCH_ARG(std::optional<int64_t>, num_kv_heads) = std::nullopt;                              \
  /** RMSNorm of every head's queries and keys. */                                             \
  TORCH_ARG(std::optional<bool>, qk_norm) = std::nullopt;                                      \
  /** Whether the heads share those norms' weights. */                                         \
  TORCH_ARG(bool, qk_norm_shared) = true;                                                      \
  /** Whether the output is multiplied by a gate, and its activation: "sigmoid" or "silu". */  \
  TORCH_ARG(std::optional<bool>, output_gate) = std::nullopt;                                  \
  TORCH_ARG(std::string, output_activation) = "sigmoid";                                       \
  /** RMSNorm of every head's output, each head with weights of its own. */                    \
  TORCH_ARG(std::optional<bool>, output_norm) = std::nullopt;                                  \
  /** Whether keys and values are mixed with the token's before. */                            \
  TORCH_ARG(std::optional<bool>, kv_shift) = std::nullopt;                                     \
  /** theta of the rotary positions; unset: no positions. */                                   \
  TORCH_ARG(std::optional<double>, rope) = theta;                                              \
  /** How many tokens, itself included, a token sees. Unset: all before it. */                 \
  TORCH_ARG(std::optional<int64_t>, window) = std::nullopt;                                    \
  /** Epsilon of the norms, and of the queries' and keys' where it is another. */              \
  TORCH_ARG(double, norm_eps) = 1e-5;                                                          \
  TORCH_ARG(std::optional<double>, qk_norm_eps) = std::nullopt
// clang-format on

/// What those options come to, with every default filled in.
struct SoftmaxAttentionSwitches {
  const char* owner;
  int64_t dim, num_heads, num_kv_heads, head_dim;
  bool qk_norm, qk_norm_shared, output_gate, output_norm, kv_shift;
  std::string output_activation;
  std::optional<double> rope;
  std::optional<int64_t> window;
  double norm_eps, qk_norm_eps;
  Placement placement;
};

/// Where tokens `[B, T]` belong: to sequence b of the batch, or, packed, to one of cu_seqlens.
/// lengths: the tokens of each of the `count` sequences, int64 `[N]`. bounds: `[N+1]`, of the
/// tokens end to end. rows: each token's sequence, steps: its place in there, int64 `[B, 1]` and
/// `[1, T]`, packed `[1, T]`. What nobody asks for is not made.
class TokenLayout {
 public:
  TokenLayout(const char* owner, const torch::Tensor& x,
              const std::optional<torch::Tensor>& cu_seqlens);

  bool is_packed() const { return bounds_.defined(); }
  int64_t count() const { return count_; }
  torch::Tensor lengths() const;
  torch::Tensor bounds() const;
  torch::Tensor rows() const;
  torch::Tensor steps() const;

 private:
  torch::Tensor arange(int64_t size) const;

  int64_t batch_, time_, count_;
  torch::TensorOptions integers_;
  torch::Tensor bounds_;  // undefined where nothing is packed
};

/// What a mixer's state holds of N sequences, in the order of its tensors; the Python class
/// AttentionState names them alike.
struct AttentionState {
  explicit AttentionState(const MixerState& tensors);
  MixerState tensors() const { return {k, v, gates, lengths, seen, last_k, last_v, room}; }
  int64_t capacity() const { return k.size(1); }

  static constexpr size_t kTensors = 8;
  torch::Tensor k, v;            // `[N, capacity, Hkv, D]`, keys normed and rotated
  torch::Tensor gates;           // log forget gates `[N, capacity, H]`, fp32 or fp64
  torch::Tensor lengths;         // tokens held, int32 `[N]`
  torch::Tensor seen;            // tokens read, int64 `[N]`: the next one's position
  torch::Tensor last_k, last_v;  // the last token's, before KV-shift, `[N, Hkv, D]`
  torch::Tensor room;            // int64 `[2]` on the CPU: bound on lengths; fixed capacity or -1
};

/// A projection of what a step reads: what step() and mix_residual_step() do differently.
using StepProjection = std::function<torch::Tensor(const torch::nn::Linear&)>;

/// The forget gates of a token of each of B sequences: log(gamma + (1 - gamma) sigmoid(logits +
/// bias)). Without a bias they are one, without logits the bias's alone.
struct TokenGate {
  torch::Tensor logits = {};  // `[B, H]`
  torch::Tensor bias = {};    // `[H]`
  torch::Tensor gamma = {};   // `[H]`
};

/// Base of Attention and ForgettingAttention; no module itself. They say what it computes.
class SoftmaxAttention : public SeveralTensorMixer {
 public:
  /// in_proj, shift_proj, the forget gate's projection and bias, the norms (one), out_proj, in this
  /// order; projections uniform on +-1/sqrt(dim).
  void reset_parameters() override;

  /// The empty state of `batch` sequences; device and dtype default to the module's. capacity: for
  /// how many tokens a sequence there is room, one more is an error; unset: memory is doubled
  /// whenever it is full.
  MixerState init_state(int64_t batch, std::optional<torch::Device> device = std::nullopt,
                        std::optional<torch::ScalarType> dtype = std::nullopt,
                        std::optional<int64_t> capacity = std::nullopt) const override;

  /// x `[B, T, dim]` -> y `[B, T, dim]` and, where a state was given, the state after the last
  /// token. state: where to go on from; waits for the device. gamma: this layer's lower bound
  /// `[num_heads]` in [0, 1), only where the mixer takes one; unset = 0. cu_seqlens: bounds `[N+1]`
  /// of the sequences packed into a B = 1 batch.
  std::tuple<torch::Tensor, MixerState> forward(
      const torch::Tensor& x, const MixerState& state = {},
      const std::optional<torch::Tensor>& gamma = std::nullopt,
      const std::optional<torch::Tensor>& cu_seqlens = std::nullopt) override;

  /// One token: x `[B, dim]` -> y `[B, dim]`; `state` is updated in place. Records no gradient.
  /// Work grows with the tokens held.
  torch::Tensor step(const torch::Tensor& x, const MixerState& state,
                     const std::optional<torch::Tensor>& gamma = std::nullopt) override;

  torch::Tensor mix_residual_step(NormImpl& norm, const torch::Tensor& x, const MixerState& state,
                                  const std::optional<torch::Tensor>& gamma) override;

  bool keeps_tokens() const override { return true; }
  void check_room(const MixerState& state, int64_t batch) const override;
  bool drop_unreachable(const MixerState& state) const override;

  /// The layers that the options ask for; the others are empty handles.
  torch::nn::Linear in_proj{nullptr}, shift_proj{nullptr}, gate_proj{nullptr}, out_proj{nullptr};
  Norm q_norm{nullptr}, k_norm{nullptr}, output_norm{nullptr};

 protected:
  explicit SoftmaxAttention(SoftmaxAttentionSwitches switches) : switches_(std::move(switches)) {}

  /// in_proj, shift_proj; after them the derived class registers its gate; then norms and out_proj.
  void register_projections(torch::nn::Module& module);
  void register_outputs(torch::nn::Module& module);

  struct Operands {
    torch::Tensor q, k, v;         // `[B, T, heads, D]`
    torch::Tensor g;               // the output gate's logits `[B, T, dim]`
    torch::Tensor log_f;           // `[B, T, H]`
    torch::Tensor last_k, last_v;  // `[N, Hkv, D]`
  };

  virtual void reset_gate() {}
  virtual int64_t gate_heads() const { return 0; }
  /// Throws c10::ValueError for a lower bound that the mixer does not take.
  virtual void check_gamma(const std::optional<torch::Tensor>& gamma) const;
  /// log f `[B, T, H]`; undefined where there is no gate.
  virtual torch::Tensor log_gate(const torch::Tensor&, const std::optional<torch::Tensor>&) const {
    return {};
  }
  /// What log_gate() is made of, for one token; undefined tensors where there is no gate.
  virtual TokenGate token_gate(const StepProjection& /*project*/,
                               const std::optional<torch::Tensor>& /*gamma*/) const {
    return {};
  }
  /// The log f that forward() takes: with noise where the options ask for it and the module trains.
  virtual torch::Tensor training_log_gate(const torch::Tensor& x,
                                          const std::optional<torch::Tensor>& gamma) const {
    return log_gate(x, gamma);
  }
  /// How many of the first tokens of each sequence no query to come can see, `[N]`; undefined: all
  /// may be.
  virtual torch::Tensor unreachable(const AttentionState& state) const;
  /// o `[B, T, H, D]` of queries and keys that are the same tokens.
  virtual torch::Tensor attend(const Operands& x, const TokenLayout& layout) const = 0;
  /// o `[B, T, H, D]` of the last tokens that the state holds, over all of them.
  virtual torch::Tensor attend_state(const torch::Tensor& q, const AttentionState& state,
                                     const TokenLayout& layout) const = 0;
  /// o `[N, 1, H, D]` of the last token that the state holds.
  virtual torch::Tensor attend_step(const torch::Tensor& q, const AttentionState& state) const = 0;
  /// attend() and attend_state() by the op forgetting_attention; gates `[N, capacity, H]`.
  torch::Tensor attend_by_op(const Operands& x, const TokenLayout& layout,
                             std::optional<double> prune) const;
  torch::Tensor attend_state_by_op(const torch::Tensor& q, const AttentionState& state,
                                   const torch::Tensor& gates, const TokenLayout& layout,
                                   std::optional<double> prune) const;

  SoftmaxAttentionSwitches switches_;

 private:
  AttentionState checked(const MixerState& state, int64_t sequences) const;
  Norm make_qk_norm(int64_t heads) const;
  /// All but log_f.
  Operands operands(const torch::Tensor& x, const TokenLayout& layout,
                    const std::optional<AttentionState>& state) const;
  AttentionState with_room(const AttentionState& state, const torch::Tensor& added) const;
  AttentionState extended(const AttentionState& state, const Operands& x,
                          const TokenLayout& layout) const;
  void make_room(AttentionState& state) const;
  /// A step of x, or of norm(x) with x added, where there is a norm.
  torch::Tensor advance(const torch::Tensor& x, NormImpl* norm, const MixerState& state,
                        const std::optional<torch::Tensor>& gamma);
  torch::Tensor append_by_kernel(const torch::Tensor& x, NormImpl* norm, AttentionState& state,
                                 const std::optional<torch::Tensor>& gamma, torch::Tensor* gate);
  torch::Tensor append_by_ops(const torch::Tensor& x, AttentionState& state,
                              const std::optional<torch::Tensor>& gamma, torch::Tensor* gate);
  torch::Tensor gated(torch::Tensor o, const torch::Tensor& g) const;
  torch::Tensor output(const torch::Tensor& o, const torch::Tensor& g) const;
};

}  // namespace tidegate::nn
