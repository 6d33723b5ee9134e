// The gated linear unit: the channel mixer of HGRN's blocks.
#pragma once

#include <torch/nn/modules/linear.h>
#include "tidegate/nn/module.h"

#include <optional>
#include <ostream>
#include <string>

namespace tidegate::nn {

struct GLUOptions {
  explicit GLUOptions(int64_t dim) : dim_(dim) {}

  /// Width of x and y.
  TORCH_ARG(int64_t, dim);
  /// Width of the gated product; unset: 2 * dim.
  TORCH_ARG(std::optional<int64_t>, hidden) = std::nullopt;
  /// "silu" or "none". HGRN's language models have none, its image models SiLU.
  TORCH_ARG(std::string, activation) = "silu";
  /// Whether the projections have biases.
  TORCH_ARG(bool, bias) = false;
  TIDEGATE_PLACEMENT_ARGS
};

/// y = (act(x W_g + b_g) * (x W_v + b_v)) W_o + b_o        [Shazeer 2020; HGRN, section 3.1]
///
/// x `[..., dim]` -> y `[..., dim]`. Parameters: `in_proj.weight` `[2*hidden, dim]`, rows of the
/// gate first, then of the value; `out_proj.weight` `[dim, hidden]`; their biases. Throws
/// c10::ValueError for unknown options or another last size.
class GLUImpl : public Module<GLUImpl> {
 public:
  explicit GLUImpl(int64_t dim) : GLUImpl(GLUOptions(dim)) {}
  explicit GLUImpl(const GLUOptions& options);

  void reset() override;
  /// in_proj, then out_proj: uniform on +-1/sqrt(fan in), weight before bias.
  void reset_parameters();
  torch::Tensor forward(const torch::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  GLUOptions options;
  torch::nn::Linear in_proj{nullptr};
  torch::nn::Linear out_proj{nullptr};
};

TORCH_MODULE(GLU);

}  // namespace tidegate::nn
