#pragma once

// Calls of gated linear attention whose K or V, or whose rows in memory, are not what tensor cores
// take, brought into their form. Channels are added that change nothing: q and k are zero there,
// and columns of v are thrown away. What is copied is little beside what the kernels that take any
// size would need: 20 times as long, and more.

#include <tuple>

#include "src/ops/gla.h"

namespace tidegate::ops {

/// Whether tensor cores would take the call if it was padded. `d_o`: undefined in the forward pass.
bool wants_padding(const GlaArguments& arguments, const at::Tensor& d_o = {});

/// The arguments, padded; it owns their tensors.
class PaddedGla {
 public:
  explicit PaddedGla(const GlaArguments& arguments);

  GlaArguments arguments() const;

  /// [.., V] and [.., K, V] with zeros, and back.
  at::Tensor values(const at::Tensor& tensor) const;
  OptionalTensor states(const OptionalTensor& tensor) const;
  at::Tensor narrow_values(const at::Tensor& padded) const;
  at::Tensor narrow_states(const at::Tensor& padded) const;
  /// `into`: as that of gla_backward_kernel.
  GlaGradients narrow(const GlaGradients& padded, const GlaGradients& into) const;

 private:
  at::Tensor narrow_keys(const at::Tensor& padded) const;

  const GlaArguments& given_;
  int64_t key_dim_, value_dim_;  // padded
  at::Tensor q_, v_, gate_;
  OptionalTensor k_, gamma_, h0_;
};

}  // namespace tidegate::ops
