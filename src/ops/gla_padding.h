#pragma once

// Calls of gated linear attention whose K or V, or whose rows in memory, are not what tensor cores
// take, brought into their form: most backward passes of sizes that are no multiple of 16, and few
// forward passes, whose kernel reads nearly all rows as they are. Channels are added that change
// nothing: q and k are zero there, and columns of v are thrown away. What is copied is little
// beside what the kernels that take any size would need: 20 times as long, and more.

#include <tuple>

#include "src/ops/gla.h"

namespace tidegate::ops {

class WidthCopies;

/// Whether tensor cores would take the call if it was padded, and not without.
bool forward_wants_padding(const GlaArguments& arguments);
bool backward_wants_padding(const GlaArguments& arguments, const at::Tensor& d_o,
                            const OptionalTensor& dh_final);

/// The arguments, padded, and the gradients of the results where they are given; it owns their
/// tensors.
class PaddedGla {
 public:
  explicit PaddedGla(const GlaArguments& arguments, const OptionalTensor& d_o = {},
                     const OptionalTensor& dh_final = {});

  GlaArguments arguments() const;
  const OptionalTensor& d_o() const { return d_o_; }
  const OptionalTensor& dh_final() const { return dh_final_; }

  /// o and the final states of a padded call as they were asked for.
  std::tuple<at::Tensor, at::Tensor> narrow_results(const at::Tensor& o,
                                                    const at::Tensor& h_final) const;
  /// `into`: as that of gla_backward_kernel.
  GlaGradients narrow(const GlaGradients& padded, const GlaGradients& into) const;

 private:
  at::Tensor narrow_states(WidthCopies* copies, const at::Tensor& padded) const;

  const GlaArguments& given_;
  int64_t key_dim_, value_dim_;  // padded
  at::Tensor q_, v_, gate_;
  OptionalTensor k_, gamma_, h0_, d_o_, dh_final_;
};

}  // namespace tidegate::ops
