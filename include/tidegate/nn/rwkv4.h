// RWKV-4's token mixing (arXiv 2305.13048).
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

/// Options of RWKV4; the names, defaults and meanings are those of tidegate.nn.RWKV4 in Python.
struct RWKV4Options {
  explicit RWKV4Options(int64_t dim) : dim_(dim) {}

  /// Width of x, y and the state.
  TORCH_ARG(int64_t, dim);
  /// Whether r, k and v see the previous token too: each is projected from
  /// mix * x_t + (1 - mix) * x_{t-1} with a mix of its own a channel (x_{-1} = 0).
  TORCH_ARG(bool, time_shift) = false;
  /// How w_log and u start. "speed": RWKV-4's, w_log_j = -5 + 8 (j / (dim - 1))^(0.7 + 1.3 depth),
  /// u_j = log 0.3 with -1/2, 0, 1/2 in turn on top. "uniform": w_log uniform on [-5, 3), u zero.
  TORCH_ARG(std::string, decay_init) = "speed";
  /// Where the layer stands, 0 the first and 1 the last: of decay_init "speed", and of how the
  /// mixes of time_shift start. Models set it for each layer where no option does.
  TORCH_ARG(double, depth) = 0.0;
  TIDEGATE_PLACEMENT_ARGS
};

/// RWKV-4's token mixing: a mean of the values so far, whose weights decay, behind a gate:
///
///     r, k, v = W_r x, W_k x, W_v x
///     y = W_o (sigmoid(r) * wkv4(exp(w_log), u, k, v))
///
/// Parameters: `in_proj.weight` `[3 * dim, dim]`, rows of r, k, v; `out_proj.weight`; `w_log` and
/// `u` `[dim]`, which stay fp32 in a 16-bit module, natural logarithms of the decay's rate a step
/// and of the newest token's bonus; with time_shift `mix` `[3, dim]`, of r, k, v.
/// State: one tensor `[N, 3, dim]`, the op's; with time_shift `[N, 4, dim]`, the last row being the
/// last token's x. fp32, fp64 in an fp64 module. Zeros are empty.
/// Throws c10::ValueError for options that are unknown and for shapes that do not fit them.
class RWKV4Impl : public KeepsFloat32<RWKV4Impl>, public TensorStateMixer {
 public:
  explicit RWKV4Impl(int64_t dim) : RWKV4Impl(RWKV4Options(dim)) {}
  explicit RWKV4Impl(const RWKV4Options& options);

  void reset() override;
  /// in_proj, out_proj: uniform on +-1/sqrt(dim); w_log, u by decay_init; mix as RWKV-4's. After
  /// the same torch::manual_seed bitwise Python's parameters.
  void reset_parameters() override;

  /// The shape of one sequence's state: `[3, dim]`, or `[4, dim]` with time_shift.
  std::vector<int64_t> state_shape() const override {
    return {options.time_shift() ? 4 : 3, options.dim()};
  }

  void pretty_print(std::ostream& stream) const override;

  RWKV4Options options;
  torch::nn::Linear in_proj{nullptr}, out_proj{nullptr};
  torch::Tensor w_log, u, mix;

 protected:
  std::tuple<torch::Tensor, torch::Tensor> forward_checked(
      const torch::Tensor& x, const std::optional<torch::Tensor>& state,
      const std::optional<torch::Tensor>& gamma,
      const std::optional<torch::Tensor>& cu_seqlens) override;
  torch::Tensor step_checked(const torch::Tensor& x, const torch::Tensor& state,
                             const std::optional<torch::Tensor>& gamma) override;
  void check_gamma(const std::optional<torch::Tensor>& gamma) const override;
  const char* owner() const override { return "RWKV4"; }
  int64_t dim() const override { return options.dim(); }
  const torch::Tensor& own_weight() const override { return out_proj->weight; }
  std::vector<torch::Tensor> float32_tensors() const override { return {w_log, u}; }

 private:
  std::vector<torch::Tensor> project(const torch::Tensor& x, const torch::Tensor& before) const;
};

TORCH_MODULE(RWKV4);

}  // namespace tidegate::nn
