// Gated linear attention as a token mixer, with the normaliser of linear attention on request.
#pragma once

#include <torch/nn/modules/linear.h>
#include "tidegate/nn/module.h"
#include "tidegate/nn/norm.h"
#include "tidegate/nn/token_mixer.h"

#include <optional>
#include <ostream>
#include <string>
#include <tuple>

namespace tidegate::nn {

/// Options of GatedLinearAttention; the names, defaults and meanings are those of
/// tidegate.nn.GatedLinearAttention in Python.
struct GatedLinearAttentionOptions {
  explicit GatedLinearAttentionOptions(int64_t dim) : dim_(dim) {}

  /// Width of x and y.
  TORCH_ARG(int64_t, dim);
  /// H, a divisor of key_dim and value_dim.
  TORCH_ARG(int64_t, num_heads) = 4;
  /// "vector": one gate a key channel, or "scalar": one a head.
  TORCH_ARG(std::string, gate) = "vector";
  /// Whether o is divided by the normaliser; needs a feature map, and means something with norm
  /// "none" alone: any other norm of a head takes out again what o was divided by.
  TORCH_ARG(bool, normalize) = false;
  /// phi: "elu+1", "relu", "exp" (none of them negative), or unset: phi(x) = x.
  TORCH_ARG(std::optional<std::string>, feature_map) = std::nullopt;
  /// Width of q and of k over all heads. Unset: dim / 2.
  TORCH_ARG(std::optional<int64_t>, key_dim) = std::nullopt;
  /// Width of v over all heads. Unset: dim.
  TORCH_ARG(std::optional<int64_t>, value_dim) = std::nullopt;
  /// Rank of the vector gate's projection.
  TORCH_ARG(int64_t, gate_rank) = 16;
  /// Unset: 16 for the vector gate, 1 for the scalar one.
  TORCH_ARG(std::optional<double>, gate_temperature) = std::nullopt;
  /// How the bias of the gate's logits starts: "standard", "ugi", "chrono:T_max", "gumbel-softmax"
  /// or "gumbel-softmax:alpha:tau" (see init.h); unset: uniform on
  /// +-1/sqrt(fan in), which is "standard".
  TORCH_ARG(std::optional<std::string>, gate_init) = std::nullopt;
  /// tau of Gumbel-Gate: noise on the gate's logits in training; see GatedLinearRNNImpl.
  TORCH_ARG(std::optional<double>, gumbel_gate) = std::nullopt;
  /// Whether a gamma is taken, one a gate: HGRN's lower bounds.
  TORCH_ARG(bool, lower_bound) = false;
  /// Whether there is a g.
  TORCH_ARG(bool, output_gate) = true;
  /// "layer", "rms" or "rms_no_weight"; its weights are shared over the heads. "none": o itself.
  TORCH_ARG(std::string, norm) = "rms";
  TORCH_ARG(double, norm_eps) = 1e-5;
  TIDEGATE_PLACEMENT_ARGS
};

/// Gated linear attention: a token mixer [arXiv 2312.06635; with a scalar gate and a normaliser the
/// Forgetting Transformer's eq. 7-9]. For each of H heads, with q, k of K = key_dim / H and v of
/// V = value_dim / H channels, linear in x, feature map phi and gate f_t in (0, 1), one a key
/// channel or one a head:
///
///     S_t = diag(f_t) S_{t-1} + phi(k_t) v_t^T
///     o_t = K^-0.5 * S_t^T phi(q_t)                                        normalize = false
///     o_t = S_t^T phi(q_t) / z_t.phi(q_t),  z_t = f_t z_{t-1} + phi(k_t)   normalize = true
///     y_t = [Norm(o_t) * silu(g_t)] W_o,  Norm over each head
///
///     log f_t = logsigmoid(x_t W_1 W_2 + b) / temperature    gate "vector", W_1 of rank gate_rank
///     log f_t = logsigmoid(x_t w + b) / temperature          gate "scalar", one w a head
///
///     f_t = gamma + (1 - gamma) * f'_t, with f' from the line above    lower_bound = true
///
/// Parameters: `in_proj.weight`, whose rows are q, k (key_dim each), v (value_dim), g (value_dim,
/// with an output gate) and W_1 (gate_rank, with a vector gate); `gate_proj` (weight and bias: W_2
/// and b, or w and b); `norm` (V); `out_proj.weight` `[dim, value_dim]`. No other biases.
///
/// State: S `[N, H, K, V]`, and, normalising, z `[N, H, K]`; fp32, fp64 in an fp64 module. Throws
/// c10::ValueError for options that are unknown or do not fit each other, and for shapes that do
/// not fit them.
class GatedLinearAttentionImpl : public Module<GatedLinearAttentionImpl>,
                                 public SeveralTensorMixer {
 public:
  explicit GatedLinearAttentionImpl(int64_t dim)
      : GatedLinearAttentionImpl(GatedLinearAttentionOptions(dim)) {}
  GatedLinearAttentionImpl(int64_t dim, int64_t num_heads)
      : GatedLinearAttentionImpl(GatedLinearAttentionOptions(dim).num_heads(num_heads)) {}
  explicit GatedLinearAttentionImpl(const GatedLinearAttentionOptions& options);

  void reset() override;
  /// In this order: in_proj, gate_proj (its bias then by gate_init), norm, out_proj; projections
  /// weight before bias, uniform on +-1/sqrt(fan in). After the same torch::manual_seed bitwise
  /// Python's parameters.
  void reset_parameters() override;
  void reset_chosen_biases() override;

  /// The empty state of `batch` sequences: zeros, fp32, or fp64 for dtype fp64. device and dtype
  /// default to the module's; capacity (tokens to come) is ignored.
  MixerState init_state(int64_t batch, std::optional<torch::Device> device = std::nullopt,
                        std::optional<torch::ScalarType> dtype = std::nullopt,
                        std::optional<int64_t> capacity = std::nullopt) const override;

  /// x `[B, T, dim]` -> y `[B, T, dim]` and the state after the last token. state: where to go on
  /// from, empty = zeros. gamma: this layer's lower bound `[key_dim]`, or `[num_heads]` with gate
  /// "scalar", in [0, 1), only with lower_bound; unset = 0. cu_seqlens: bounds `[N+1]` of the
  /// sequences packed into a B = 1 batch.
  std::tuple<torch::Tensor, MixerState> forward(
      const torch::Tensor& x, const MixerState& state = {},
      const std::optional<torch::Tensor>& gamma = std::nullopt,
      const std::optional<torch::Tensor>& cu_seqlens = std::nullopt) override;

  /// One token: x `[B, dim]` -> y `[B, dim]`; `state` is updated in place. Has no gradient: call it
  /// under torch::NoGradGuard or c10::InferenceMode.
  torch::Tensor step(const torch::Tensor& x, const MixerState& state,
                     const std::optional<torch::Tensor>& gamma = std::nullopt) override;

  bool takes_gamma() const override { return options.lower_bound(); }
  int64_t gamma_size() const override {
    return is_vector() ? *options.key_dim() : options.num_heads();
  }

  void pretty_print(std::ostream& stream) const override;

  /// The options as they were given, with the defaults that depend on others filled in.
  GatedLinearAttentionOptions options;
  torch::nn::Linear in_proj{nullptr};
  torch::nn::Linear gate_proj{nullptr};
  Norm norm{nullptr};
  torch::nn::Linear out_proj{nullptr};

 private:
  /// Projections of one token, and what the op reads of them: [..., H, K or V]; log f in fp32 or
  /// fp64. gumbel: tau of the noise on the gate's logits.
  struct Operands {
    torch::Tensor q, k, v, log_f, g;
  };

  bool is_vector() const { return options.gate() == "vector"; }
  int64_t head_keys() const { return *options.key_dim() / options.num_heads(); }
  int64_t head_values() const { return *options.value_dim() / options.num_heads(); }
  double scale() const;
  void check_gamma(const std::optional<torch::Tensor>& gamma) const;
  void check_state(const MixerState& state, const torch::Tensor& x,
                   const std::optional<torch::Tensor>& cu_seqlens) const;
  Operands project(const torch::Tensor& x, const std::optional<torch::Tensor>& gamma,
                   std::optional<double> gumbel = std::nullopt) const;
  std::tuple<torch::Tensor, torch::Tensor> key_scan(const Operands& operands) const;
  torch::Tensor normalized_by(const torch::Tensor& o, const torch::Tensor& q,
                              const torch::Tensor& sums) const;
  torch::Tensor output(const torch::Tensor& o, const torch::Tensor& g);
};

TORCH_MODULE(GatedLinearAttention);

}  // namespace tidegate::nn
