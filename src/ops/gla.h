#pragma once

// What gated_linear_attention and hgrn2 share: checks, how tensors become params, results. The two
// differ in where keys and decays come from; each has its schemas in its own file.

#include <ATen/core/Tensor.h>

#include <string_view>
#include <tuple>

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
