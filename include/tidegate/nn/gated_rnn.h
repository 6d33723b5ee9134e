// The minimal gated RNN ("Towards Understanding Gated Linear Recurrent Neural Networks").
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

/// Options of GatedRNN; the names, defaults and meanings are those of tidegate.nn.GatedRNN in
/// Python.
struct GatedRNNOptions {
  explicit GatedRNNOptions(int64_t dim) : dim_(dim) {}

  /// Width of x, y and the state.
  TORCH_ARG(int64_t, dim);
  /// How b_z starts: "standard" (uniform on +-1/sqrt(dim)), "ugi", "chrono:T_max", "gumbel-softmax"
  /// or "gumbel-softmax:alpha:tau" (see tidegate/nn/init.h).
  TORCH_ARG(std::string, gate_init) = "standard";
  /// tau of Gumbel-Gate: in training sigmoid((... + logit u) / tau) around all that the gate reads,
  /// u uniform, drawn for every token and channel; evaluation and step() have neither noise nor
  /// tau.
  TORCH_ARG(std::optional<double>, gumbel_gate) = std::nullopt;
  /// Whether a gamma is taken: z_t = gamma + (1 - gamma) * sigmoid(...) (HGRN's lower bounds).
  TORCH_ARG(bool, lower_bound) = false;
  TIDEGATE_PLACEMENT_ARGS
};

/// Minimal gated RNN, whose gate reads the state: a token mixer [eq. 5 to 7 of the paper]:
///
///     z_t = sigmoid(W_zx x_t + W_zh h_{t-1} + b_z)
///     h_t = z_t * h_{t-1} + (1 - z_t) * (W_x x_t + b_x)
///     y_t = h_t
///
/// The gated_rnn op over one projection of x (the op's z is W_zx x_t + b_z, its g the z here). The
/// state enters the gate through a matrix, so that tokens are computed one after another:
/// GatedLinearRNN is the same without W_zh. There is no output projection.
///
/// Parameters: `in_proj.weight` `[2 * dim, dim]` and bias, rows of z first, then of x;
/// `state_proj.weight` `[dim, dim]`, W_zh.
/// State: one tensor `[N, dim]`; fp32, fp64 in an fp64 module.
/// Throws c10::ValueError for options that are unknown and for shapes that do not fit them.
class GatedRNNImpl : public Module<GatedRNNImpl>, public TensorStateMixer {
 public:
  explicit GatedRNNImpl(int64_t dim) : GatedRNNImpl(GatedRNNOptions(dim)) {}
  explicit GatedRNNImpl(const GatedRNNOptions& options);

  void reset() override;
  /// in_proj: weight, then bias, uniform on +-1/sqrt(dim); of the bias then the rows of z, by
  /// gate_init; state_proj uniform on +-1/sqrt(dim). After the same torch::manual_seed bitwise
  /// Python's parameters.
  void reset_parameters() override;
  void reset_chosen_biases() override;

  /// The shape of one sequence's state: `[dim]`.
  std::vector<int64_t> state_shape() const override { return {options.dim()}; }

  bool takes_gamma() const override { return options.lower_bound(); }
  int64_t gamma_size() const override { return options.dim(); }

  void pretty_print(std::ostream& stream) const override;

  GatedRNNOptions options;
  torch::nn::Linear in_proj{nullptr};
  torch::nn::Linear state_proj{nullptr};

 protected:
  std::tuple<torch::Tensor, torch::Tensor> forward_checked(
      const torch::Tensor& x, const std::optional<torch::Tensor>& state,
      const std::optional<torch::Tensor>& gamma,
      const std::optional<torch::Tensor>& cu_seqlens) override;
  torch::Tensor step_checked(const torch::Tensor& x, const torch::Tensor& state,
                             const std::optional<torch::Tensor>& gamma) override;
  void check_gamma(const std::optional<torch::Tensor>& gamma) const override;
  const char* owner() const override { return "GatedRNN"; }
  int64_t dim() const override { return options.dim(); }
  const torch::Tensor& own_weight() const override { return in_proj->weight; }
};

TORCH_MODULE(GatedRNN);

}  // namespace tidegate::nn
