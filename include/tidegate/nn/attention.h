// Softmax attention: the Transformers that the other mixers are compared with.
#pragma once

#include "tidegate/nn/module.h"
#include "tidegate/nn/softmax_attention.h"

#include <optional>
#include <ostream>
#include <string>

namespace tidegate::nn {

/// Options of Attention; the names, defaults and meanings are those of tidegate.nn.Attention in
/// Python.
struct AttentionOptions {
  explicit AttentionOptions(int64_t dim) : dim_(dim) {}

  TIDEGATE_SOFTMAX_ATTENTION_ARGS(500000.0);
  TIDEGATE_PLACEMENT_ARGS
};

/// Causal softmax attention over H heads of D = dim / H channels: a token mixer, by PyTorch's
/// scaled_dot_product_attention. ForgettingAttention is the same with a forget gate.
///
///     o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(D)) v_j, q and k rotated
///
/// Channel i < D/2 and channel i + D/2 turn by position * theta^(-2i/D) [arXiv 2104.09864]. The
/// presets are the Forgetting Transformer's baselines [arXiv 2503.02130, section 3]: "llama" is
/// that alone; "pro" has QK-norm, an output gate, an output norm and KV-shift, each an option:
///
///     k_t = norm(a_t k'_{t-1} + (1 - a_t) k'_t),  k'_t = W_k x_t,  a_t = sigmoid(w_k.x_t)
///     v_t the same without the norm;  q_t = norm(W_q x_t)
///     y_t = W_o (norm(o_t) * sigmoid(W_g x_t))
///
/// Parameters: `in_proj.weight`, rows of q (dim), k, v (Hkv * D each) and, gated, g (dim), each
/// head after head; with KV-shift `shift_proj.weight` `[2 * Hkv, dim]`, k's before v's;
/// `q_norm.weight`, `k_norm.weight` `[D]`, or `[H * D]` and `[Hkv * D]`; `output_norm.weight`
/// `[dim]`; `out_proj.weight` `[dim, dim]`. No biases.
///
/// State: that of AttentionState. Without one, forward() returns an empty state. Throws
/// c10::ValueError for options that are unknown or do not fit each other, and for shapes that do
/// not fit them.
class AttentionImpl : public Module<AttentionImpl>, public SoftmaxAttention {
 public:
  explicit AttentionImpl(int64_t dim) : AttentionImpl(AttentionOptions(dim)) {}
  AttentionImpl(int64_t dim, int64_t num_heads)
      : AttentionImpl(AttentionOptions(dim).num_heads(num_heads)) {}
  explicit AttentionImpl(const AttentionOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// The options as they were given.
  AttentionOptions options;

 protected:
  torch::Tensor attend(const Operands& x, const TokenLayout& layout) const override;
  torch::Tensor attend_state(const torch::Tensor& q, const AttentionState& state,
                             const TokenLayout& layout) const override;
  torch::Tensor attend_step(const torch::Tensor& q, const AttentionState& state) const override;

 private:
  bool has_window_op() const;
  torch::Tensor nothing_forgotten(const torch::Tensor& v) const;
  torch::Tensor scores(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                       const torch::Tensor& positions) const;
};

TORCH_MODULE(Attention);

}  // namespace tidegate::nn
