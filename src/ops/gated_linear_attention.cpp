// gated_linear_attention: its schemas. What it shares with hgrn2 is in gla.cpp.

#include "tidegate/ops/gated_linear_attention.h"

#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/gla.h"
#include "src/ops/op.h"
#include "src/ops/results.h"

namespace tidegate::ops {
namespace {

/// q, k and v go to autocast's type; a log decay near 0 would lose its digits, so log_f keeps fp32,
/// as do the states.
constexpr CastRule kGatedLinearAttentionCasts[] = {
    {"q", Cast::kLower}, {"k", Cast::kLower}, {"v", Cast::kLower}, {"log_f", Cast::kUnlessFloat}};

/// The arguments that all of the ops have; the step has neither of those that are tested for.
template <class Op>
GlaArguments gated_linear_attention_arguments(const Op& op) {
  GlaArguments arguments{kOpName<Op>, kernels::gla::GateKind::kLogDecay, op.q, op.k, op.v,
                         op.log_f};
  arguments.scale = op.scale;
  if constexpr (requires { op.h0; }) {
    arguments.h0 = op.h0;
    arguments.reverse = op.reverse;
    arguments.cu_seqlens = op.cu_seqlens;
  }
  return arguments;
}

struct GatedLinearAttention {
  static constexpr std::string_view kSchema =
      "gated_linear_attention(Tensor q, Tensor k, Tensor v, Tensor log_f, Tensor? h0=None, "
      "float scale=1.0, bool reverse=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor)";
  static constexpr std::string_view kResults[] = {"o", "h_final"};
  static constexpr std::string_view kData = "q";
  static constexpr auto& kCasts = kGatedLinearAttentionCasts;

  const at::Tensor &q, &k, &v, &log_f;
  const OptionalTensor& h0;
  double scale;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  auto kernel() const { return gla_forward_kernel(gated_linear_attention_arguments(*this)); }
  auto meta() const { return gla_forward_meta(gated_linear_attention_arguments(*this)); }
};

/// The gradients of q, k, v, log_f and h0.
struct GatedLinearAttentionBackward {
  static constexpr std::string_view kSchema =
      "gated_linear_attention_backward(Tensor do, Tensor? dh_final, Tensor q, Tensor k, "
      "Tensor v, Tensor log_f, Tensor? h0, float scale, bool reverse, Tensor? cu_seqlens) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)";
  static constexpr std::string_view kGradientLike = "v";

  const at::Tensor& d_o;
  const OptionalTensor& dh_final;
  const at::Tensor &q, &k, &v, &log_f;
  const OptionalTensor& h0;
  double scale;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  TensorTuple<5> kernel() const {
    return in_order(gla_backward_kernel(d_o, dh_final, gated_linear_attention_arguments(*this)));
  }
  TensorTuple<5> meta() const {
    return in_order(gla_backward_meta(d_o, dh_final, gated_linear_attention_arguments(*this)));
  }
  static TensorTuple<5> in_order(const GlaGradients& grads) {
    return {grads.dq, grads.dk, grads.dv, grads.dgate, grads.dh0};
  }
};

struct GatedLinearAttentionStep {
  static constexpr std::string_view kSchema =
      "gated_linear_attention_step(Tensor q, Tensor k, Tensor v, Tensor log_f, "
      "Tensor(a!) state, float scale=1.0) -> Tensor";
  static constexpr std::string_view kData = "q";
  static constexpr auto& kCasts = kGatedLinearAttentionCasts;

  const at::Tensor &q, &k, &v, &log_f;
  at::Tensor& state;
  double scale;

  auto kernel() const { return gla_step_kernel(gated_linear_attention_arguments(*this), state); }
  auto meta() const { return gla_step_meta(gated_linear_attention_arguments(*this), state); }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<GatedLinearAttention>(m);
  register_backward<GatedLinearAttentionBackward>(m);
  register_gradient<GatedLinearAttention, GatedLinearAttentionBackward>(m);
  register_step<GatedLinearAttentionStep>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> gated_linear_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
    const std::optional<at::Tensor>& h0, double scale, bool reverse,
    const std::optional<at::Tensor>& cu_seqlens) {
  return ops::call_public<ops::GatedLinearAttention>(q, k, v, log_f, h0, scale, reverse,
                                                     cu_seqlens);
}

at::Tensor gated_linear_attention_step(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& log_f,
                                       at::Tensor state, double scale) {
  return ops::call_public<ops::GatedLinearAttentionStep>(q, k, v, log_f, state, scale);
}

}  // namespace tidegate
