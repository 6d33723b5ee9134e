// What every token mixer can do, so that blocks and models hold any of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <tuple>
#include <vector>

namespace tidegate::nn {

/// What a mixer remembers of the tokens it has read: its tensors, in the order documented with the
/// mixer; most have one. Empty: nothing, where a mixer begins. Training passes none and ignores the
/// one returned.
using MixerState = std::vector<at::Tensor>;

class NormImpl;

/// The interface of the token mixers: modules that move information between positions. Mixers are
/// torch::nn::Modules that also derive from this class, which is no module itself. Each has the
/// calls forward(), step() and init_state() besides, with a tensor for the state (TensorStateMixer)
/// or several (SeveralTensorMixer).
class TokenMixer {
 public:
  virtual ~TokenMixer() = default;

  /// forward(): x `[B, T, dim]` -> y `[B, T, dim]` and the state after the last token (empty where
  /// there is none). state: where to go on from. gamma: this layer's lower bound, for mixers that
  /// take one. cu_seqlens: bounds `[N+1]` of the sequences packed into a B = 1 batch.
  virtual std::tuple<at::Tensor, MixerState> mix(const at::Tensor& x, const MixerState& state,
                                                 const std::optional<at::Tensor>& gamma,
                                                 const std::optional<at::Tensor>& cu_seqlens) = 0;

  /// step(): one token, x `[B, dim]` -> y `[B, dim]`; the state's tensors are updated in place. Has
  /// no gradient.
  virtual at::Tensor mix_step(const at::Tensor& x, const MixerState& state,
                              const std::optional<at::Tensor>& gamma) = 0;

  /// x + mix_step(norm(x)), for steps of decoding: mixers with projections make norm and sum part
  /// of their products.
  virtual at::Tensor mix_residual_step(NormImpl& norm, const at::Tensor& x, const MixerState& state,
                                       const std::optional<at::Tensor>& gamma);

  /// init_state(): the empty state of `batch` sequences; capacity: tokens to come, for mixers that
  /// store them.
  virtual MixerState make_state(int64_t batch, std::optional<at::Device> device,
                                std::optional<at::ScalarType> dtype,
                                std::optional<int64_t> capacity) const = 0;

  /// Whether forward() takes a lower bound, how wide it is, and whether it cannot do without.
  virtual bool takes_gamma() const { return false; }
  virtual int64_t gamma_size() const { return 0; }
  virtual bool needs_gamma() const { return false; }
  /// Whether its state grows with the tokens, so that decoding needs one with room for them.
  virtual bool keeps_tokens() const { return false; }
  /// Throws c10::ValueError unless step() has room in `state` for a token of each of `batch`
  /// sequences. Looks at the device only where room may be short.
  virtual void check_room(const MixerState& /*state*/, int64_t /*batch*/) const {}
  /// Drops, in place, the tokens of `state` that no token to come can see; false where the mixer
  /// sees them all.
  virtual bool drop_unreachable(const MixerState& /*state*/) const { return false; }
  /// Whether outputs depend on later tokens.
  virtual bool is_bidirectional() const { return false; }

  /// Draws every parameter anew, in the order documented with the mixer.
  virtual void reset_parameters() = 0;
  /// Draws the biases of projections anew whose start an option says (gate_init, theta "data"), as
  /// reset_parameters() does, and leaves the others: a model with `init_std`, whose biases are
  /// zero, calls this after it.
  virtual void reset_chosen_biases() {}
};

/// A token mixer whose state is one tensor, its shape documented with the mixer.
///
/// Checks what comes in. A class of its own says what errors call it, owner(), which gamma it
/// takes, check_gamma(), and what it computes of arguments that were checked: forward_checked() and
/// step_checked().
class TensorStateMixer : public TokenMixer {
 public:
  /// x `[B, T, dim]` -> y `[B, T, dim]` and the state after the last token (undefined where the
  /// mixer is bidirectional; then no state goes in). state: where to go on from, unset = an empty
  /// one. gamma: this layer's lower bound `[gamma_size()]` in [0, 1), where the mixer takes one
  /// (takes_gamma()); unset = 0. cu_seqlens: bounds `[N+1]` of the sequences packed into a B = 1
  /// batch. Throws c10::ValueError for what does not fit.
  std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& x, const std::optional<at::Tensor>& state = std::nullopt,
      const std::optional<at::Tensor>& gamma = std::nullopt,
      const std::optional<at::Tensor>& cu_seqlens = std::nullopt);

  /// One token: x `[B, dim]` -> y `[B, dim]`; `state` is updated in place. Has no gradient: call it
  /// under torch::NoGradGuard or c10::InferenceMode.
  at::Tensor step(const at::Tensor& x, const at::Tensor& state,
                  const std::optional<at::Tensor>& gamma = std::nullopt);

  /// The shape of one sequence's state.
  virtual std::vector<int64_t> state_shape() const = 0;
  /// The empty state of `batch` sequences: zeros `[batch, *state_shape()]`, fp32, or fp64 for dtype
  /// fp64. device and dtype default to the module's; capacity (tokens to come) is ignored: the
  /// state has one size. Throws c10::ValueError where the mixer is bidirectional.
  at::Tensor init_state(int64_t batch, std::optional<at::Device> device = std::nullopt,
                        std::optional<at::ScalarType> dtype = std::nullopt,
                        std::optional<int64_t> capacity = std::nullopt) const;

  std::tuple<at::Tensor, MixerState> mix(const at::Tensor& x, const MixerState& state,
                                         const std::optional<at::Tensor>& gamma,
                                         const std::optional<at::Tensor>& cu_seqlens) final;
  at::Tensor mix_step(const at::Tensor& x, const MixerState& state,
                      const std::optional<at::Tensor>& gamma) final;
  at::Tensor mix_residual_step(NormImpl& norm, const at::Tensor& x, const MixerState& state,
                               const std::optional<at::Tensor>& gamma) final;
  MixerState make_state(int64_t batch, std::optional<at::Device> device,
                        std::optional<at::ScalarType> dtype,
                        std::optional<int64_t> capacity) const final;

 protected:
  /// What forward() returns, of arguments that were checked; none of them holds an undefined
  /// tensor.
  virtual std::tuple<at::Tensor, at::Tensor> forward_checked(
      const at::Tensor& x, const std::optional<at::Tensor>& state,
      const std::optional<at::Tensor>& gamma, const std::optional<at::Tensor>& cu_seqlens) = 0;
  /// What step() returns, of arguments that were checked.
  virtual at::Tensor step_checked(const at::Tensor& x, const at::Tensor& state,
                                  const std::optional<at::Tensor>& gamma) = 0;
  /// x + step_checked(norm(x)).
  virtual at::Tensor residual_step_checked(NormImpl& norm, const at::Tensor& x,
                                           const at::Tensor& state,
                                           const std::optional<at::Tensor>& gamma);
  /// Throws c10::ValueError for a lower bound that the mixer does not take, or lacks.
  virtual void check_gamma(const std::optional<at::Tensor>& gamma) const = 0;
  /// The module's name in error messages.
  virtual const char* owner() const = 0;
  /// The width of x and y.
  virtual int64_t dim() const = 0;
  /// A parameter whose device and dtype are the module's.
  virtual const at::Tensor& own_weight() const = 0;
  /// Throws c10::ValueError unless `state` is one of x's sequences, as init_state() makes it.
  void check_state(const at::Tensor& state, const at::Tensor& x,
                   const std::optional<at::Tensor>& cu_seqlens = std::nullopt) const;
  void refuse_bidirectional(const char* what) const;

 private:
  /// Throws for what step() does not take.
  void check_step(const at::Tensor& x, const at::Tensor& state,
                  const std::optional<at::Tensor>& gamma) const;
};

/// A token mixer whose state is several tensors, documented with the mixer.
class SeveralTensorMixer : public TokenMixer {
 public:
  virtual std::tuple<at::Tensor, MixerState> forward(
      const at::Tensor& x, const MixerState& state = {},
      const std::optional<at::Tensor>& gamma = std::nullopt,
      const std::optional<at::Tensor>& cu_seqlens = std::nullopt) = 0;
  virtual at::Tensor step(const at::Tensor& x, const MixerState& state,
                          const std::optional<at::Tensor>& gamma = std::nullopt) = 0;
  virtual MixerState init_state(int64_t batch, std::optional<at::Device> device = std::nullopt,
                                std::optional<at::ScalarType> dtype = std::nullopt,
                                std::optional<int64_t> capacity = std::nullopt) const = 0;

  std::tuple<at::Tensor, MixerState> mix(const at::Tensor& x, const MixerState& state,
                                         const std::optional<at::Tensor>& gamma,
                                         const std::optional<at::Tensor>& cu_seqlens) final {
    return forward(x, state, gamma, cu_seqlens);
  }
  at::Tensor mix_step(const at::Tensor& x, const MixerState& state,
                      const std::optional<at::Tensor>& gamma) final {
    return step(x, state, gamma);
  }
  MixerState make_state(int64_t batch, std::optional<at::Device> device,
                        std::optional<at::ScalarType> dtype,
                        std::optional<int64_t> capacity) const final {
    return init_state(batch, device, dtype, capacity);
  }
};

}  // namespace tidegate::nn
