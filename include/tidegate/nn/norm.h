// The norms that the mixers and models choose from.
#pragma once

#include <torch/nn/modules/linear.h>
#include "tidegate/nn/module.h"

#include <optional>
#include <string>
#include <string_view>
#include <tuple>

namespace tidegate::nn {

/// Normalises the last dimension, of size `dim`.
struct NormOptions {
  explicit NormOptions(int64_t dim) : dim_(dim) {}

  TORCH_ARG(int64_t, dim);
  /// "layer": LayerNorm with weight and bias; "rms": RMSNorm with weight; "rms_no_weight"; "none":
  /// x itself.
  TORCH_ARG(std::string, kind) = "layer";
  TORCH_ARG(double, eps) = 1e-5;
  /// "rms" only: x `[..., heads, dim]`, each head with weights of its own.
  TORCH_ARG(int64_t, heads) = 1;
  TIDEGATE_PLACEMENT_ARGS
};

/// LayerNorm or RMSNorm under one type, since LibTorch has no RMSNorm module. Parameters `weight`
/// and `bias` `[heads * dim]`, where the kind has them; the Python twins use torch's own classes,
/// under the same names. x `[..., dim]` -> `[..., dim]`. Throws c10::ValueError for an unknown
/// kind.
class NormImpl : public Module<NormImpl> {
 public:
  explicit NormImpl(int64_t dim) : NormImpl(NormOptions(dim)) {}
  explicit NormImpl(const NormOptions& options);

  void reset() override;
  /// Weight one, bias zero.
  void reset_parameters();
  /// Calls the op `norm`, one pass over memory. Under autocast the result is in autocast's dtype,
  /// since products follow, but a float32 x is not rounded before it is normed.
  torch::Tensor forward(const torch::Tensor& x);
  /// forward(x) * act(gate), or forward(act(gate) * x) with `gate_first`, in one pass; gate: like
  /// x. `activation`: "silu" or "sigmoid". An undefined gate is none.
  torch::Tensor forward_gated(const torch::Tensor& x, const torch::Tensor& gate,
                              std::string_view activation, bool gate_first = false);
  /// `linear` of forward_gated(x, gate, activation, gate_first). The backward pass keeps x and the
  /// gate, and makes what is between the two again.
  torch::Tensor forward_projected(const torch::nn::Linear& linear, const torch::Tensor& x,
                                  const torch::Tensor& gate = {},
                                  std::string_view activation = "silu", bool gate_first = false);
  /// forward(residual + x) and that sum, in one pass by the op `add_norm`. An undefined x adds
  /// nothing.
  std::tuple<torch::Tensor, torch::Tensor> forward_added(const torch::Tensor& x,
                                                         const torch::Tensor& residual);

  NormOptions options;
  torch::Tensor weight;
  torch::Tensor bias;

 private:
  std::optional<torch::Tensor> weight_rows() const;
  const char* op_kind() const;
  void remember(const torch::Tensor& y, const torch::Tensor& x, const torch::Tensor& gate,
                std::string_view activation, bool gate_first) const;
};

TORCH_MODULE(Norm);

}  // namespace tidegate::nn
