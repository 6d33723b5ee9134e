// HGRU2: HGRN2's token mixer, a gated linear recurrence with an outer-product state.
#pragma once

#include <torch/nn/modules/linear.h>
#include "tidegate/nn/module.h"
#include "tidegate/nn/norm.h"
#include "tidegate/nn/token_mixer.h"

#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

namespace tidegate::nn {

/// Options of HGRU2; the names, defaults and meanings are those of tidegate.nn.HGRU2 in Python.
struct HGRU2Options {
  explicit HGRU2Options(int64_t dim) : dim_(dim) {}

  /// Width of x and y.
  TORCH_ARG(int64_t, dim);
  /// H, a divisor of dim. Unset: dim / expand_ratio.
  TORCH_ARG(std::optional<int64_t>, num_heads) = std::nullopt;
  /// K, the state's channels per channel of x. Unset: dim / num_heads, or, where that is unset too,
  /// 128, or else dim's largest divisor below.
  TORCH_ARG(std::optional<int64_t>, expand_ratio) = std::nullopt;
  /// How the bias of the gate's logits starts: "standard", "ugi", "chrono:T_max", "gumbel-softmax"
  /// or "gumbel-softmax:alpha:tau" (see init.h); unset: like the other biases. One is added where
  /// the preset has none.
  TORCH_ARG(std::optional<std::string>, gate_init) = std::nullopt;
  /// tau of Gumbel-Gate: noise on the gate's logits in training; see GatedLinearRNNImpl.
  TORCH_ARG(std::optional<double>, gumbel_gate) = std::nullopt;
  /// Runs the recurrence both ways over shared projections and adds the two o before the norm. Has
  /// no state, and no step().
  TORCH_ARG(bool, bidirectional) = false;
  /// "paper", "official" (the authors' published language model) or "fla" (flash-linear-attention's
  /// HGRN2Attention); see HGRU2Impl.
  TORCH_ARG(std::string, preset) = "paper";
  /// "none", "silu" or "sigmoid". Unset: the preset's.
  TORCH_ARG(std::optional<std::string>, q_activation) = std::nullopt;
  TORCH_ARG(std::optional<std::string>, v_activation) = std::nullopt;
  /// Whether the projections have biases. Unset: the preset's.
  TORCH_ARG(std::optional<bool>, bias) = std::nullopt;
  /// "layer", "rms" or "rms_no_weight", over all of dim. Unset: the preset's.
  TORCH_ARG(std::optional<std::string>, norm) = std::nullopt;
  TORCH_ARG(double, norm_eps) = 1e-5;
  TIDEGATE_PLACEMENT_ARGS
};

/// HGRN2's recurrent unit: a token mixer [HGRN2, arXiv 2404.07904, eq. 3]. For each of H heads of
/// K = dim / H channels, with q, f, v linear in x and f'_t = gamma + (1 - gamma) * sigmoid(f_t):
///
///     S_t = diag(f'_t) S_{t-1} + (1 - f'_t) act_v(v_t)^T       [K, K], one a head
///     o_t = scale * S_t^T act_q(q_t)
///     y_t = Norm([o_t of all heads]) W_o + b_o
///
/// (In the paper q is the output gate o, v the input i.)
///
///     preset       act_q    act_v   biases  norm                    scale
///     "paper"      sigmoid  SiLU    yes     LayerNorm               1
///     "official"   SiLU     none    no      RMSNorm without weight  1
///     "fla"        SiLU     none    no      RMSNorm                 K^-0.5
///
/// Parameters: `in_proj.weight` `[3 * dim, dim]` and bias, rows of q, f, v in this order, each head
/// after head; without biases but with gate_init, `gate_bias` `[dim]` on f; `norm`; `out_proj`
/// `[dim, dim]`.
///
/// State: one tensor `[N, H, K, K]`, key channels before value channels; fp32, fp64 in an fp64
/// module. Throws c10::ValueError for options that are unknown or do not fit each other, and for
/// shapes that do not fit them.
class HGRU2Impl : public Module<HGRU2Impl>, public TensorStateMixer {
 public:
  explicit HGRU2Impl(int64_t dim) : HGRU2Impl(HGRU2Options(dim)) {}
  HGRU2Impl(int64_t dim, int64_t num_heads) : HGRU2Impl(HGRU2Options(dim).num_heads(num_heads)) {}
  explicit HGRU2Impl(const HGRU2Options& options);

  void reset() override;
  /// In this order: in_proj (of the bias then f's rows by gate_init), gate_bias, norm, out_proj;
  /// projections weight before bias, uniform on +-1/sqrt(dim). After the same torch::manual_seed
  /// bitwise Python's parameters.
  void reset_parameters() override;
  void reset_chosen_biases() override;

  /// The shape of one sequence's state: `[H, K, K]`.
  std::vector<int64_t> state_shape() const override {
    return {num_heads(), expand_ratio(), expand_ratio()};
  }

  bool takes_gamma() const override { return true; }
  int64_t gamma_size() const override { return options.dim(); }
  bool is_bidirectional() const override { return options.bidirectional(); }
  /// H and K.
  int64_t num_heads() const { return *options.num_heads(); }
  int64_t expand_ratio() const { return *options.expand_ratio(); }

  void pretty_print(std::ostream& stream) const override;

  /// The options as they were given, with what the preset decided filled in.
  HGRU2Options options;
  torch::nn::Linear in_proj{nullptr};
  /// Undefined unless gate_init asks for a bias that in_proj does not have.
  torch::Tensor gate_bias;
  Norm norm{nullptr};
  torch::nn::Linear out_proj{nullptr};

 protected:
  std::tuple<torch::Tensor, torch::Tensor> forward_checked(
      const torch::Tensor& x, const std::optional<torch::Tensor>& state,
      const std::optional<torch::Tensor>& gamma,
      const std::optional<torch::Tensor>& cu_seqlens) override;
  torch::Tensor step_checked(const torch::Tensor& x, const torch::Tensor& state,
                             const std::optional<torch::Tensor>& gamma) override;
  torch::Tensor residual_step_checked(NormImpl& before, const torch::Tensor& x,
                                      const torch::Tensor& state,
                                      const std::optional<torch::Tensor>& gamma) override;
  void check_gamma(const std::optional<torch::Tensor>& gamma) const override;
  const char* owner() const override { return "HGRU2"; }
  int64_t dim() const override { return options.dim(); }
  const torch::Tensor& own_weight() const override { return out_proj->weight; }

 private:
  void draw_gate(const torch::Tensor& bias) const;
  std::optional<torch::Tensor> split_gamma(const std::optional<torch::Tensor>& gamma) const;
  std::vector<torch::Tensor> split(const torch::Tensor& projected) const;
  std::vector<torch::Tensor> operands(const torch::Tensor& x);
  std::tuple<torch::Tensor, torch::Tensor> recur(const std::vector<torch::Tensor>& qfv,
                                                 const std::optional<torch::Tensor>& gamma,
                                                 const std::optional<torch::Tensor>& state,
                                                 bool reverse,
                                                 const std::optional<torch::Tensor>& cu_seqlens);
  torch::Tensor advance(const torch::Tensor& projected, const torch::Tensor& state,
                        const std::optional<torch::Tensor>& gamma) const;
  torch::Tensor output(const torch::Tensor& o);
  double scale() const;
};

TORCH_MODULE(HGRU2);

}  // namespace tidegate::nn
