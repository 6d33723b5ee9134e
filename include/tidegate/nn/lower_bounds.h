// Lower bounds of the forget gates, one vector a layer (HGRN, section 3.2).
#pragma once

#include "tidegate/nn/module.h"

#include <ostream>
#include <string>
#include <vector>

namespace tidegate::nn {

struct LowerBoundsOptions {
  LowerBoundsOptions(int64_t layers, int64_t dim) : layers_(layers), dim_(dim) {}

  TORCH_ARG(int64_t, layers);
  /// Width of the bounds: the mixers' gamma_size().
  TORCH_ARG(int64_t, dim);
  /// "cumulative", "none", "independent" or "decreasing"; see LowerBoundsImpl.
  TORCH_ARG(std::string, mode) = "cumulative";
  TIDEGATE_PLACEMENT_ARGS
};

/// gamma for every layer: what the forget gate of layer k never falls below. With
/// P = softmax(Gamma, over layers) (HGRN, section 3.2; ablations in Table 10):
///
/// * "cumulative": gamma^k = P_2 + ... + P_k, rising from zero in the first layer;
/// * "decreasing": the same vectors in reverse order: the last layer gets zero;
/// * "independent": gamma^k = sigmoid(Gamma_k), no order between the layers;
/// * "none": no parameter; forward() returns an undefined tensor.
///
/// None of them reaches one, even where the sum rounds to it: results are held at 1 - 2^-24
/// (1 - 2^-53 for fp64). Gamma starts at zero, so the cumulative bounds start at (k-1)/layers.
///
/// Parameter: `logits` (Gamma) `[layers, dim]`, fp32 (fp64 in an fp64 module); it stays fp32 when
/// the module is cast to bf16 or fp16. Throws c10::ValueError for unknown options.
class LowerBoundsImpl : public KeepsFloat32<LowerBoundsImpl> {
 public:
  LowerBoundsImpl(int64_t layers, int64_t dim) : LowerBoundsImpl(LowerBoundsOptions(layers, dim)) {}
  explicit LowerBoundsImpl(const LowerBoundsOptions& options);

  void reset() override;
  /// Gamma = 0.
  void reset_parameters();
  /// The bounds `[layers, dim]`, row k for layer k; undefined in mode "none".
  torch::Tensor forward();
  void pretty_print(std::ostream& stream) const override;

  LowerBoundsOptions options;
  torch::Tensor logits;

 protected:
  std::vector<torch::Tensor> float32_tensors() const override { return {logits}; }
};

TORCH_MODULE(LowerBounds);

}  // namespace tidegate::nn
