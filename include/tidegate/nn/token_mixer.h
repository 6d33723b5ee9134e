// What every token mixer can do, so that blocks and models hold any of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <tuple>

namespace tidegate::nn {

/// The interface of the token mixers: modules that move information between positions. Mixers are
/// torch::nn::Modules that also derive from this class, which is no module itself.
///
/// A state is what a mixer remembers of the tokens it has read, one tensor; its shape is documented
/// with each mixer. Training passes none and ignores the one returned.
class TokenMixer {
 public:
  virtual ~TokenMixer() = default;

  /// x `[B, T, dim]` -> y `[B, T, dim]` and the state after the last token (undefined where there
  /// is none). state: where to go on from. gamma: this layer's lower bound, for mixers that take
  /// one. cu_seqlens: bounds `[N+1]` of the sequences packed into a B = 1 batch.
  virtual std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& x, const std::optional<at::Tensor>& state = std::nullopt,
      const std::optional<at::Tensor>& gamma = std::nullopt,
      const std::optional<at::Tensor>& cu_seqlens = std::nullopt) = 0;

  /// One token: x `[B, dim]` -> y `[B, dim]`; `state` is updated in place. Has no gradient.
  virtual at::Tensor step(const at::Tensor& x, const at::Tensor& state,
                          const std::optional<at::Tensor>& gamma = std::nullopt) = 0;

  /// The empty state of `batch` sequences; capacity: tokens to come, for mixers that store them.
  virtual at::Tensor init_state(int64_t batch, std::optional<at::Device> device = std::nullopt,
                                std::optional<at::ScalarType> dtype = std::nullopt,
                                std::optional<int64_t> capacity = std::nullopt) const = 0;

  /// Whether forward() takes a lower bound, how wide it is, and whether it cannot do without.
  virtual bool takes_gamma() const { return false; }
  virtual int64_t gamma_size() const { return 0; }
  virtual bool needs_gamma() const { return false; }
  /// Whether outputs depend on later tokens.
  virtual bool is_bidirectional() const { return false; }

  /// Draws every parameter anew, in the order documented with the mixer.
  virtual void reset_parameters() = 0;
};

}  // namespace tidegate::nn
