// Softmax attention with rotary positions: the Transformer that the recurrent mixers are compared
// with.
#pragma once

#include <torch/nn/modules/linear.h>
#include "tidegate/nn/module.h"
#include "tidegate/nn/token_mixer.h"

#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

namespace tidegate::nn {

/// Options of Attention; the names, defaults and meanings are those of tidegate.nn.Attention in
/// Python.
struct AttentionOptions {
  explicit AttentionOptions(int64_t dim) : dim_(dim) {}

  /// Width of x and y.
  TORCH_ARG(int64_t, dim);
  /// H, a divisor of dim. Unset: dim / 64 (1 where dim is smaller).
  TORCH_ARG(std::optional<int64_t>, num_heads) = std::nullopt;
  /// "llama": no biases, no norms, no gates.
  TORCH_ARG(std::string, preset) = "llama";
  /// theta of the rotary positions; unset: no positions.
  TORCH_ARG(std::optional<double>, rope) = 10000.0;
  /// How many tokens, itself included, a token sees. Unset: all before it.
  TORCH_ARG(std::optional<int64_t>, window) = std::nullopt;
  TIDEGATE_PLACEMENT_ARGS
};

/// Causal softmax attention over H heads of D = dim / H channels, with rotary positions: a token
/// mixer, by PyTorch's scaled_dot_product_attention.
///
///     o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(D)) v_j, q and k rotated
///
/// Channel i < D/2 and channel i + D/2 turn by position * theta^(-2i/D) [arXiv 2104.09864].
///
/// Parameters: `in_proj.weight` `[3 * dim, dim]`, rows of q, k, v in this order, each head after
/// head; `out_proj.weight` `[dim, dim]`.
///
/// State: keys and values `[N, capacity, H, D]`, keys rotated, and how many tokens each sequence
/// has, int64 `[N]`. Without one, forward() returns an empty state. Throws c10::ValueError for
/// options that are unknown or do not fit each other, and for shapes that do not fit them.
class AttentionImpl : public Module<AttentionImpl>, public TokenMixer {
 public:
  explicit AttentionImpl(int64_t dim) : AttentionImpl(AttentionOptions(dim)) {}
  AttentionImpl(int64_t dim, int64_t num_heads)
      : AttentionImpl(AttentionOptions(dim).num_heads(num_heads)) {}
  explicit AttentionImpl(const AttentionOptions& options);

  void reset() override;
  /// in_proj, out_proj, in this order: uniform on +-1/sqrt(dim).
  void reset_parameters() override;

  /// The empty state of `batch` sequences with room for `capacity` tokens, which must be given;
  /// device and dtype default to the module's.
  MixerState init_state(int64_t batch, std::optional<torch::Device> device = std::nullopt,
                        std::optional<torch::ScalarType> dtype = std::nullopt,
                        std::optional<int64_t> capacity = std::nullopt) const;

  /// x `[B, T, dim]` -> y `[B, T, dim]` and, where a state was given, the state after the last
  /// token. gamma: unset; there is no lower bound. cu_seqlens: bounds `[N+1]` of the sequences
  /// packed into a B = 1 batch; read on the host.
  std::tuple<torch::Tensor, MixerState> forward(
      const torch::Tensor& x, const MixerState& state = {},
      const std::optional<torch::Tensor>& gamma = std::nullopt,
      const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);

  /// One token: x `[B, dim]` -> y `[B, dim]`; `state` is updated in place. Records no gradient.
  /// Work grows with the state's capacity.
  torch::Tensor step(const torch::Tensor& x, const MixerState& state,
                     const std::optional<torch::Tensor>& gamma = std::nullopt);

  std::tuple<torch::Tensor, MixerState> mix(
      const torch::Tensor& x, const MixerState& state, const std::optional<torch::Tensor>& gamma,
      const std::optional<torch::Tensor>& cu_seqlens) override {
    return forward(x, state, gamma, cu_seqlens);
  }
  torch::Tensor mix_step(const torch::Tensor& x, const MixerState& state,
                         const std::optional<torch::Tensor>& gamma) override {
    return step(x, state, gamma);
  }
  MixerState make_state(int64_t batch, std::optional<torch::Device> device,
                        std::optional<torch::ScalarType> dtype,
                        std::optional<int64_t> capacity) const override {
    return init_state(batch, device, dtype, capacity);
  }
  bool keeps_tokens() const override { return true; }

  void pretty_print(std::ostream& stream) const override;

  /// As given, with the default that depends on another filled in.
  AttentionOptions options;
  torch::nn::Linear in_proj{nullptr};
  torch::nn::Linear out_proj{nullptr};

 private:
  int64_t num_heads() const { return *options.num_heads(); }
  int64_t head_dim() const { return options.dim() / num_heads(); }
  void refuse_gamma(const std::optional<torch::Tensor>& gamma) const;
  void check_state(const MixerState& state, int64_t sequences) const;
  void check_room(const MixerState& state, const torch::Tensor& lengths) const;
  std::vector<torch::Tensor> project(const torch::Tensor& x) const;
  torch::Tensor rotated(const torch::Tensor& x, const torch::Tensor& positions) const;
  MixerState extended(const MixerState& state, const torch::Tensor& k, const torch::Tensor& v,
                      const torch::Tensor& positions, const torch::Tensor& added,
                      torch::Tensor rows, torch::Tensor steps) const;
  torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                       const torch::Tensor& positions) const;
};

TORCH_MODULE(Attention);

}  // namespace tidegate::nn
