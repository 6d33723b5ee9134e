// LRU (arXiv 2303.06349) and its real form SLRU: linear recurrences with a constant decay.
#pragma once

#include <torch/nn/modules/linear.h>
#include "tidegate/nn/module.h"
#include "tidegate/nn/token_mixer.h"

#include <numbers>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace tidegate::nn {

/// Options of LRU; the names, defaults and meanings are those of tidegate.nn.LRU in Python.
struct LRUOptions {
  explicit LRUOptions(int64_t dim) : dim_(dim) {}

  /// Width of x and y.
  TORCH_ARG(int64_t, dim);
  /// Width of the complex state. Unset: dim.
  TORCH_ARG(std::optional<int64_t>, state) = std::nullopt;
  /// Whether y has a term d * x.
  TORCH_ARG(bool, skip) = false;
  /// Least and largest modulus of lambda at the start; its square is uniform between theirs, so
  /// that lambda is uniform on the ring.
  TORCH_ARG(double, r_min) = 0.9;
  TORCH_ARG(double, r_max) = 0.999;
  /// Largest phase at the start, in radians a step; uniform on [0, max_phase].
  TORCH_ARG(double, max_phase) = 2.0 * std::numbers::pi;
  /// Unset, or "data": |lambda_t| = |lambda|^s_t, s_t = sigmoid(W x_t + b), in the place of
  /// |lambda| (HGRN, arXiv 2311.04823, Table 8, "LRU w forget gate", leaves the formula open).
  TORCH_ARG(std::optional<std::string>, gate) = std::nullopt;
  /// How the gate starts, with gate "data": "standard", "ugi", "chrono:T_max", "gumbel-softmax" or
  /// "gumbel-softmax:alpha:tau" (see init.h), of 1 - s_t, the part that keeps: b is the negative of
  /// what is drawn. Unset: b uniform on +-1/sqrt(dim).
  TORCH_ARG(std::optional<std::string>, gate_init) = std::nullopt;
  /// tau of Gumbel-Gate, with gate "data": noise on the logits of s_t in training; see
  /// GatedLinearRNNImpl.
  TORCH_ARG(std::optional<double>, gumbel_gate) = std::nullopt;
  /// Whether a gamma is taken, with gate "data": |lambda_t| = gamma + (1 - gamma) * |lambda|^s_t
  /// (HGRN's lower bounds).
  TORCH_ARG(bool, lower_bound) = false;
  TIDEGATE_PLACEMENT_ARGS
};

/// Options of SLRU; the names, defaults and meanings are those of tidegate.nn.SLRU in Python.
struct SLRUOptions {
  explicit SLRUOptions(int64_t dim) : dim_(dim) {}

  /// Width of x and y.
  TORCH_ARG(int64_t, dim);
  /// Width of the state. Unset: 2 * dim, so that the matrices are as large as LRU's.
  TORCH_ARG(std::optional<int64_t>, state) = std::nullopt;
  /// Whether y has a term d * x.
  TORCH_ARG(bool, skip) = false;
  /// Least and largest decay at the start; its square is uniform between theirs.
  TORCH_ARG(double, r_min) = 0.9;
  TORCH_ARG(double, r_max) = 0.999;
  TIDEGATE_PLACEMENT_ARGS
};

/// What LRU and SLRU share: everything but whether the state is complex.
template <typename Derived, typename Options>
class LinearRecurrentUnit : public KeepsFloat32<Derived>, public TensorStateMixer {
 public:
  static constexpr bool kIsComplex = std::is_same_v<Options, LRUOptions>;

  explicit LinearRecurrentUnit(const Options& options);

  void reset() override;
  /// In this order: in_proj (normal, variance 1/(2 dim); SLRU: 1/dim), nu_log, theta_log (on the
  /// ring), gamma_log (log sqrt(1 - |lambda|^2)), skip_weight (normal, variance 1), out_proj
  /// (normal, variance 1/state), gate_proj (weight, then bias, uniform on +-1/sqrt(dim); the bias
  /// then by gate_init). After the same torch::manual_seed bitwise Python's parameters.
  void reset_parameters() override;
  void reset_chosen_biases() override;

  /// The shape of one sequence's state: `[state]`, or `[2 * state]` when complex.
  std::vector<int64_t> state_shape() const override { return {state_size()}; }

  /// Width of the state's tensor: that of the state, twice that when complex.
  int64_t state_size() const { return kIsComplex ? 2 * *options.state() : *options.state(); }

  bool takes_gamma() const override {
    if constexpr (kIsComplex) return options.lower_bound();
    return false;
  }
  int64_t gamma_size() const override {
    if constexpr (kIsComplex) return *options.state();
    return 0;
  }

  void pretty_print(std::ostream& stream) const override;

  /// The options as they were given, with the width of the state filled in.
  Options options;
  torch::nn::Linear in_proj{nullptr};
  torch::Tensor nu_log, theta_log, gamma_log;
  torch::Tensor skip_weight;
  torch::nn::Linear out_proj{nullptr};
  torch::nn::Linear gate_proj{nullptr};

 protected:
  std::tuple<torch::Tensor, torch::Tensor> forward_checked(
      const torch::Tensor& x, const std::optional<torch::Tensor>& state,
      const std::optional<torch::Tensor>& gamma,
      const std::optional<torch::Tensor>& cu_seqlens) override;
  torch::Tensor step_checked(const torch::Tensor& x, const torch::Tensor& state,
                             const std::optional<torch::Tensor>& gamma) override;
  void check_gamma(const std::optional<torch::Tensor>& gamma) const override;
  const char* owner() const override { return kIsComplex ? "LRU" : "SLRU"; }
  int64_t dim() const override { return options.dim(); }
  const torch::Tensor& own_weight() const override { return out_proj->weight; }
  std::vector<torch::Tensor> float32_tensors() const override {
    return {nu_log, theta_log, gamma_log};
  }

 private:
  void check_options() const;
  torch::Tensor output(const torch::Tensor& h, const torch::Tensor& x);
  std::tuple<torch::Tensor, torch::Tensor> gated(const torch::Tensor& x,
                                                 const std::optional<torch::Tensor>& gamma,
                                                 bool has_noise)
    requires kIsComplex;
};

/// Linear recurrent unit [arXiv 2303.06349]: a token mixer with a complex state:
///
///     lambda = exp(-exp(nu_log) + i exp(theta_log))
///     h_t = lambda * h_{t-1} + exp(gamma_log) * (B x_t)
///     y_t = Re(C h_t) + d * x_t                           (d only with skip)
///
/// B and C are complex; as real matrices of twice the width they are in_proj and out_proj. The
/// recurrence is the lru_scan op; with gate = "data" a composition over linear_scan, which stores
/// complex numbers in single precision.
///
/// Parameters: `in_proj.weight` `[2 * state, dim]`, rows of the real part, then of the imaginary
/// one; `nu_log`, `theta_log`, `gamma_log` `[state]`, fp32 also in 16-bit modules; `skip_weight`
/// `[dim]` (d); `gate_proj` (W and b, with a gate); `out_proj.weight` `[dim, 2 * state]`. No other
/// biases.
/// State: one tensor `[N, 2 * state]` = [Re | Im]; fp32, fp64 in an fp64 module.
/// Throws c10::ValueError for options that are unknown and for shapes that do not fit them.
class LRUImpl : public LinearRecurrentUnit<LRUImpl, LRUOptions> {
 public:
  explicit LRUImpl(int64_t dim) : LRUImpl(LRUOptions(dim)) {}
  explicit LRUImpl(const LRUOptions& options) : LinearRecurrentUnit(options) {}
};

TORCH_MODULE(LRU);

/// The real form of the linear recurrent unit (Su Jianlin's SLRU): a token mixer:
///
///     h_t = exp(-exp(nu_log)) * h_{t-1} + exp(gamma_log) * (B x_t)
///     y_t = C h_t + d * x_t                               (d only with skip)
///
/// Parameters: `in_proj.weight` `[state, dim]`; `nu_log`, `gamma_log` `[state]`, fp32 also in
/// 16-bit modules; `skip_weight` `[dim]` (d); `out_proj.weight` `[dim, state]`. No biases.
/// State: one tensor `[N, state]`; fp32, fp64 in an fp64 module.
/// Throws c10::ValueError for options and for shapes that do not fit.
class SLRUImpl : public LinearRecurrentUnit<SLRUImpl, SLRUOptions> {
 public:
  explicit SLRUImpl(int64_t dim) : SLRUImpl(SLRUOptions(dim)) {}
  explicit SLRUImpl(const SLRUOptions& options) : LinearRecurrentUnit(options) {}
};

TORCH_MODULE(SLRU);

extern template class LinearRecurrentUnit<LRUImpl, LRUOptions>;
extern template class LinearRecurrentUnit<SLRUImpl, SLRUOptions>;

}  // namespace tidegate::nn
