#pragma once

// What gated_linear_attention and hgrn2 share: checks, how tensors become params, results. The two
// differ in where keys and decays come from; each has its schemas in its own file.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string_view>
#include <tuple>
#include <vector>

#include "kernels/gla/gla.h"
#include "src/ops/checks.h"

namespace tidegate::ops {

/// The arguments of either op, forward, backward ([B, T, H, ..]) or step ([B, H, ..]).
struct GlaArguments {
  const char* op;
  kernels::gla::GateKind gate_kind;
  const at::Tensor& q;
  OptionalTensor k = {};  // with log decays only
  const at::Tensor& v;
  const at::Tensor& gate;     // log_f or f
  OptionalTensor gamma = {};  // with logits only
  OptionalTensor h0 = {};
  double scale = 1;
  kernels::gla::InputActivation q_activation = kernels::gla::InputActivation::kNone;
  kernels::gla::InputActivation v_activation = kernels::gla::InputActivation::kNone;
  bool reverse = false;
  OptionalTensor cu_seqlens = {};
  bool h0_is_settled = false;  // of a step: kernels/gla/token_step_cuda.h
};

/// While one lives, this thread's steps may read states before the kernel before them has ended: a
/// promise of the caller that what wrote a state last has, which a whole step of a model keeps, in
/// which the tokens' embedding waits for everything before it.
class SettledStatesGuard {
 public:
  SettledStatesGuard();
  ~SettledStatesGuard();
  static bool is_active();
  SettledStatesGuard(const SettledStatesGuard&) = delete;
  SettledStatesGuard& operator=(const SettledStatesGuard&) = delete;
};

/// While one lives, this thread's steps of HGRN2 of many states, which are settled, only read them,
/// but for those of the last of `steps` rounds, which write what they are after all rounds: a state
/// that is not written is half of a step's bytes. Meanwhile it is behind, and nobody else may look.
/// A step after another is given the tokens in between again, so the results have the same bits.
class DeferredStates {
 public:
  explicit DeferredStates(int64_t steps);
  ~DeferredStates();
  DeferredStates(const DeferredStates&) = delete;
  DeferredStates& operator=(const DeferredStates&) = delete;

  /// How many steps at once are fastest (docs/lab/generation.md); one can be given kSteps - 1
  /// tokens.
  static constexpr int64_t kSteps = 4;

  /// The round is done: every state has had its step.
  void next_round() { ++round_; }
  bool is_last() const { return round_ == steps_ - 1; }
  /// Whether there was a step that rounds make faster.
  bool is_wanted() const { return is_wanted_; }

  /// What the rounds before have given a state; notes that there was such a step.
  struct Token {
    at::Tensor kept_gate, kept_v;  // their memory
    kernels::HeadSeries gate, v;
  };
  std::vector<Token>& tokens_of(const void* state);

 private:
  const int64_t steps_;
  int64_t round_ = 0;
  bool is_wanted_ = false;
  std::map<const void*, std::vector<Token>> tokens_;
  DeferredStates* const outer_;
};

struct GlaGradients {
  at::Tensor dq, dk, dv, dgate, dgamma, dh0;  // dk, dgamma: [0] where there is no k or gamma
};

/// "none", "silu" or "sigmoid"; the message names `op` and `name`.
kernels::gla::InputActivation parse_input_activation(const char* op, const char* name,
                                                     std::string_view value);

std::tuple<at::Tensor, at::Tensor> gla_forward_kernel(const GlaArguments& arguments);
std::tuple<at::Tensor, at::Tensor> gla_forward_meta(const GlaArguments& arguments);

/// `into`: where dq, dv and dgate go, if its own tensors of these names are defined: of their
/// arguments' shapes and dtypes, any strides with a unit last one.
GlaGradients gla_backward_kernel(const at::Tensor& d_o, const OptionalTensor& dh_final,
                                 const GlaArguments& arguments, const GlaGradients& into = {});
GlaGradients gla_backward_meta(const at::Tensor& d_o, const OptionalTensor& dh_final,
                               const GlaArguments& arguments);

/// One token; `arguments.h0` is absent and `state` [B, H, K, V] is updated in place.
at::Tensor gla_step_kernel(const GlaArguments& arguments, at::Tensor& state);
at::Tensor gla_step_meta(const GlaArguments& arguments, const at::Tensor& state);

}  // namespace tidegate::ops
