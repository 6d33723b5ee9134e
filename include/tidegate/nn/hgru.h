// HGRU: the hierarchically gated recurrent unit of HGRN (Qin, Yang, Zhong; NeurIPS 2023).
#pragma once

#include <torch/nn/modules/linear.h>
#include "tidegate/nn/expansion.h"
#include "tidegate/nn/module.h"
#include "tidegate/nn/norm.h"
#include "tidegate/nn/token_mixer.h"

#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

namespace tidegate::nn {

/// Options of HGRU; the names, defaults and meanings are those of tidegate.nn.HGRU in Python.
struct HGRUOptions {
  explicit HGRUOptions(int64_t dim) : dim_(dim) {}

  /// Width of x and y.
  TORCH_ARG(int64_t, dim);
  /// Whether h is complex, rotated by theta every step. Unset: the preset's; real with an
  /// expansion.
  TORCH_ARG(std::optional<bool>, complex) = std::nullopt;
  /// "learned" (a parameter; the default), "fixed" (a buffer), both starting as RoPE's
  /// theta_j = 10000^(-2j/S), or "data": theta_t = x_t W + b (Table 11; b starts as RoPE's theta).
  /// Only with a complex state.
  TORCH_ARG(std::optional<std::string>, theta) = std::nullopt;
  /// What multiplies silu(c_t): "tied": 1 - lambda_t; "free": sigmoid(i_t); "none": nothing.
  TORCH_ARG(std::string, input_gate) = "tied";
  /// "data": eq. 2; "bound": lambda = gamma, whatever the input (needs a gamma); "none": lambda = 1
  /// (takes no gamma, and its input gate must be free or none: a tied one would be zero).
  TORCH_ARG(std::string, forget_gate) = "data";
  /// Whether there is a g.
  TORCH_ARG(bool, output_gate) = true;
  /// Channels of state per channel of x.
  TORCH_ARG(int64_t, expand) = 1;
  /// How c, f, g, i grow from dim to expand * dim channels, and that the gated h is summed over the
  /// `expand` groups of dim channels before the norm [HGRN2, section 3.1 and Table 2; the state is
  /// real]: "naive", "lr", "glt", "glti", "krp" or "kp", see StateExpansionImpl. Unset: one dense
  /// projection, and no sum.
  TORCH_ARG(std::optional<std::string>, expansion) = std::nullopt;
  /// Rank of "lr". Unset: dim / (expand + 1), which makes its size about dim^2.
  TORCH_ARG(std::optional<int64_t>, rank) = std::nullopt;
  /// How the bias of f starts: "standard", "ugi", "chrono:T_max", "gumbel-softmax" or
  /// "gumbel-softmax:alpha:tau" (see tidegate/nn/init.h); a free input gate's starts as its
  /// negative. Where the projections have no biases, f (and a free i) gets one. Unset: as the other
  /// biases.
  TORCH_ARG(std::optional<std::string>, gate_init) = std::nullopt;
  /// tau of Gumbel-Gate: in training sigmoid((f + logit u) / tau), u uniform, drawn for every token
  /// and channel; evaluation and step() have neither noise nor tau.
  TORCH_ARG(std::optional<double>, gumbel_gate) = std::nullopt;
  /// Runs the recurrence both ways over shared projections, with one theta a direction, and adds
  /// the two h before the norm. Has no state, and no step().
  TORCH_ARG(bool, bidirectional) = false;
  /// "paper" (eq. 3), "official" (the authors' published code: norm, then SiLU gate) or "fla"
  /// (flash-linear-attention's: real, no biases, RMSNorm, SiLU gate).
  TORCH_ARG(std::string, preset) = "paper";
  /// Whether the projections have biases. Unset: the preset's.
  TORCH_ARG(std::optional<bool>, bias) = std::nullopt;
  /// "layer", "rms" or "rms_no_weight". Unset: the preset's.
  TORCH_ARG(std::optional<std::string>, norm) = std::nullopt;
  TORCH_ARG(double, norm_eps) = 1e-5;
  TIDEGATE_PLACEMENT_ARGS
};

/// Hierarchically gated recurrent unit: a token mixer [HGRN, eq. 2 and 3]. With S = expand * dim
/// channels of state, lambda_t = gamma + (1 - gamma) * sigmoid(f_t), and c, f, g (and i, theta,
/// where asked for) linear in x:
///
///     h_t = lambda_t * exp(i theta) * h_{t-1} + (1 - lambda_t) * silu(c_t)
///     o_t = Norm(sigmoid(g_t) * [Re h_t, Im h_t])        preset "paper"
///     o_t = Norm([Re h_t, Im h_t]) * silu(g_t)           presets "official" and "fla"
///     y_t = o_t W_o + b_o
///
/// and with an expansion, act being sigmoid in preset "paper" and SiLU in the others,
///
///     o_t = Norm(sum over groups of act(g_t) * h_t)
///
/// Parameters: `in_proj.weight` `[parts, dim]` and bias, whose rows are, in this order and as far
/// as the options ask for them: c (S rows; complex: S real, then S imaginary), f (S), g (as many as
/// c), i (S), theta (S a direction); `theta` `[S]` (bidirectional: `[2, S]`, forward first), a
/// buffer when fixed, fp32 also in a bf16 or fp16 module; `gate_bias` `[S]`, or `[2S]` with a free
/// input gate's, where gate_init is given and the projections have no biases; `norm`; `out_proj`
/// `[dim, S or 2S]`. With an expansion `in_proj` is a StateExpansion over the same quantities, and
/// norm and out_proj are dim wide.
///
/// State: one tensor `[N, S]`, or `[N, 2S] = [Re | Im]`; fp32, fp64 in an fp64 module.
/// Throws c10::ValueError for options that are unknown or cannot work together, and for shapes that
/// do not fit them.
class HGRUImpl : public KeepsFloat32<HGRUImpl>, public TensorStateMixer {
 public:
  explicit HGRUImpl(int64_t dim) : HGRUImpl(HGRUOptions(dim)) {}
  explicit HGRUImpl(const HGRUOptions& options);

  void reset() override;
  /// In this order: in_proj (weight, bias; uniform on +-1/sqrt(dim); of the bias then the rows of
  /// the gates by gate_init and, with theta = "data", those of theta, RoPE's), gate_bias, theta
  /// (RoPE's; also when it is a buffer), norm, out_proj. Draws from torch's
  /// default CPU generator: after the same torch::manual_seed bitwise Python's parameters.
  void reset_parameters() override;
  void reset_chosen_biases() override;

  /// The shape of one sequence's state: `[S]`, or `[2S]` when complex.
  std::vector<int64_t> state_shape() const override { return {state_size()}; }

  /// Whether the forget gate has a lower bound.
  bool takes_gamma() const override { return options.forget_gate() != "none"; }
  bool needs_gamma() const override { return options.forget_gate() == "bound"; }
  int64_t gamma_size() const override { return channels(); }
  bool is_bidirectional() const override { return options.bidirectional(); }
  /// S = expand * dim.
  int64_t channels() const { return options.expand() * options.dim(); }
  /// Width of h: S, or 2S when complex.
  int64_t state_size() const { return *options.complex() ? 2 * channels() : channels(); }

  void pretty_print(std::ostream& stream) const override;

  /// The options as they were given, with what the preset decided filled in.
  HGRUOptions options;
  torch::nn::Linear in_proj{nullptr};
  /// Stands instead of in_proj, under its name, where there is an expansion.
  StateExpansion expansion{nullptr};
  torch::Tensor gate_bias;
  torch::Tensor theta;
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
  const char* owner() const override { return "HGRU"; }
  int64_t dim() const override { return options.dim(); }
  const torch::Tensor& own_weight() const override { return out_proj->weight; }
  std::vector<torch::Tensor> float32_tensors() const override { return {theta}; }

 private:
  struct Parts {
    torch::Tensor c, f, g, i, theta;
  };

  void check_options() const;
  void check_expansion() const;
  bool is_fused() const;
  int64_t theta_rows() const;
  void draw_gates(const torch::Tensor& f, const torch::Tensor& i) const;
  void draw_phases(const torch::Tensor& phases) const;
  Parts project(const torch::Tensor& x);
  Parts split(const torch::Tensor& all) const;
  torch::Tensor advance(const Parts& parts, const torch::Tensor& state,
                        const std::optional<torch::Tensor>& gamma) const;
  torch::Tensor output(torch::Tensor h, const torch::Tensor& gate);
  torch::Tensor rotation(const Parts& parts, int64_t direction) const;
  std::tuple<torch::Tensor, torch::Tensor> recur(const Parts& parts,
                                                 const std::optional<torch::Tensor>& gamma,
                                                 const std::optional<torch::Tensor>& state,
                                                 int64_t direction,
                                                 const std::optional<torch::Tensor>& cu_seqlens);
  std::tuple<torch::Tensor, torch::Tensor> gates(const Parts& parts,
                                                 const std::optional<torch::Tensor>& gamma) const;
  std::tuple<torch::Tensor, torch::Tensor> scan_operands(const Parts& parts,
                                                         const std::optional<torch::Tensor>& gamma,
                                                         int64_t direction) const;
  torch::Tensor scan_step(const torch::Tensor& u, const torch::Tensor& a,
                          const torch::Tensor& state) const;
  torch::Tensor to_scan(const torch::Tensor& state) const;
  torch::Tensor from_scan(const torch::Tensor& h) const;
};

TORCH_MODULE(HGRU);

}  // namespace tidegate::nn
