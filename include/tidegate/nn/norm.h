// The norms that the mixers and models choose from.
#pragma once

#include "tidegate/nn/module.h"

#include <string>

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
  torch::Tensor forward(const torch::Tensor& x);

  NormOptions options;
  torch::Tensor weight;
  torch::Tensor bias;
};

TORCH_MODULE(Norm);

}  // namespace tidegate::nn
