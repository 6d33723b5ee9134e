// gated_linear_attention: schema, dispatch, autograd. What it shares with hgrn2 is in gla.cpp.

#include "tidegate/ops/gated_linear_attention.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "src/ops/autocast.h"
#include "src/ops/checks.h"
#include "src/ops/gla.h"
#include "src/ops/launch.h"
#include "src/ops/registration.h"

namespace tidegate::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kName = "gated_linear_attention";

GlaArguments arguments_of(const char* op, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& v, const at::Tensor& log_f, const OptionalTensor& h0,
                          double scale, bool reverse, const OptionalTensor& cu_seqlens) {
  GlaArguments arguments{op, kernels::gla::GateKind::kLogDecay, q, k, v, log_f};
  arguments.h0 = h0;
  arguments.scale = scale;
  arguments.reverse = reverse;
  arguments.cu_seqlens = cu_seqlens;
  return arguments;
}

// ---- CPU, CUDA, Meta ----

std::tuple<at::Tensor, at::Tensor> forward_kernel(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, const at::Tensor& log_f,
                                                  const OptionalTensor& h0, double scale,
                                                  bool reverse, const OptionalTensor& cu_seqlens) {
  return gla_forward_kernel(arguments_of(kName, q, k, v, log_f, h0, scale, reverse, cu_seqlens));
}

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v, const at::Tensor& log_f,
                                                const OptionalTensor& h0, double scale,
                                                bool reverse, const OptionalTensor& cu_seqlens) {
  return gla_forward_meta(arguments_of(kName, q, k, v, log_f, h0, scale, reverse, cu_seqlens));
}

constexpr const char* kBackwardName = "gated_linear_attention_backward";

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients in_order(GlaGradients grads) {
  return {std::move(grads.dq), std::move(grads.dk), std::move(grads.dv), std::move(grads.dgate),
          std::move(grads.dh0)};
}

Gradients backward_kernel(const at::Tensor& d_o, const OptionalTensor& dh_final,
                          const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& log_f, const OptionalTensor& h0, double scale,
                          bool reverse, const OptionalTensor& cu_seqlens) {
  return in_order(gla_backward_kernel(
      d_o, dh_final, arguments_of(kBackwardName, q, k, v, log_f, h0, scale, reverse, cu_seqlens)));
}

Gradients backward_meta(const at::Tensor& d_o, const OptionalTensor& dh_final, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
                        const OptionalTensor& h0, double scale, bool reverse,
                        const OptionalTensor& cu_seqlens) {
  return in_order(gla_backward_meta(
      d_o, dh_final, arguments_of(kBackwardName, q, k, v, log_f, h0, scale, reverse, cu_seqlens)));
}

constexpr const char* kStepName = "gated_linear_attention_step";

at::Tensor step_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& log_f, at::Tensor& state, double scale) {
  return gla_step_kernel(arguments_of(kStepName, q, k, v, log_f, {}, scale, false, {}), state);
}

at::Tensor step_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& log_f, at::Tensor& state, double scale) {
  return gla_step_meta(arguments_of(kStepName, q, k, v, log_f, {}, scale, false, {}), state);
}

// ---- Autograd, Autocast ----

class GlaFunction : public torch::autograd::Function<GlaFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& log_f,
                               const OptionalTensor& h0, double scale, bool reverse,
                               const OptionalTensor& cu_seqlens) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["reverse"] = reverse;
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [o, h_final] = call_op<&forward_kernel>("tidegate::gated_linear_attention", q, k, v, log_f,
                                                 h0, scale, reverse, cu_seqlens);
    const at::Tensor none;
    ctx->save_for_backward({q, k, v, log_f, h0.value_or(none), cu_seqlens.value_or(none)});
    return {o, h_final};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &log_f = saved[3], &h0 = saved[4],
                     &cu_seqlens = saved[5];
    const at::Tensor d_o = gradients[0].defined() ? gradients[0] : at::zeros_like(v);
    auto [dq, dk, dv, dlog_f, dh0] = call_op<&backward_kernel>(
        "tidegate::gated_linear_attention_backward", d_o, optional(gradients[1]), q, k, v, log_f,
        optional(h0), ctx->saved_data["scale"].toDouble(), ctx->saved_data["reverse"].toBool(),
        optional(cu_seqlens));
    const at::Tensor none;
    return {dq, dk, dv, dlog_f, h0.defined() ? dh0 : none, none, none, none};
  }
};

std::tuple<at::Tensor, at::Tensor> forward_autograd(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v, const at::Tensor& log_f,
                                                    const OptionalTensor& h0, double scale,
                                                    bool reverse,
                                                    const OptionalTensor& cu_seqlens) {
  check_given(kName, {{"q", q}, {"k", k}, {"v", v}, {"log_f", log_f}});
  check_differentiable(kName, {q, k, v, log_f, h0.value_or(at::Tensor())});
  const variable_list results = GlaFunction::apply(q, k, v, log_f, h0, scale, reverse, cu_seqlens);
  return {results[0], results[1]};
}

/// q, k and v go to autocast's type; a log decay near 0 would lose its digits, so log_f keeps fp32,
/// as do the states.
std::tuple<at::Tensor, at::Tensor> forward_autocast(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v, const at::Tensor& log_f,
                                                    const OptionalTensor& h0, double scale,
                                                    bool reverse,
                                                    const OptionalTensor& cu_seqlens) {
  const AutocastGuard autocast(q.device());
  return call_op<&forward_kernel>(
      "tidegate::gated_linear_attention", autocast.cast(q), autocast.cast(k), autocast.cast(v),
      autocast.cast_unless_float(log_f), h0, scale, reverse, cu_seqlens);
}

at::Tensor step_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const at::Tensor& log_f, at::Tensor& state, double scale) {
  const AutocastGuard autocast(q.device());
  return call_op<&step_kernel>("tidegate::gated_linear_attention_step", autocast.cast(q),
                               autocast.cast(k), autocast.cast(v),
                               autocast.cast_unless_float(log_f), state, scale);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m,
            "gated_linear_attention(Tensor q, Tensor k, Tensor v, Tensor log_f, Tensor? h0=None, "
            "float scale=1.0, bool reverse=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor)");
  register_kernels<&forward_kernel, &forward_meta>(m, kName);
  register_autograd<&forward_autograd>(m, kName);
  register_autocast<&forward_autocast>(m, kName);

  define_op(m,
            "gated_linear_attention_backward(Tensor do, Tensor? dh_final, Tensor q, Tensor k, "
            "Tensor v, Tensor log_f, Tensor? h0, float scale, bool reverse, Tensor? cu_seqlens) "
            "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  register_kernels<&backward_kernel, &backward_meta>(m, kBackwardName);
  register_no_double_backward(m, kBackwardName);

  define_op(m,
            "gated_linear_attention_step(Tensor q, Tensor k, Tensor v, Tensor log_f, "
            "Tensor(a!) state, float scale=1.0) -> Tensor");
  register_kernels<&step_kernel, &step_meta>(m, kStepName);
  register_step(m, kStepName);
  register_autocast<&step_autocast>(m, kStepName);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> gated_linear_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
    const std::optional<at::Tensor>& h0, double scale, bool reverse,
    const std::optional<at::Tensor>& cu_seqlens) {
  ops::check_given(ops::kName, {{"q", q}, {"k", k}, {"v", v}, {"log_f", log_f}});
  return ops::call_op<&ops::forward_kernel>("tidegate::gated_linear_attention", q, k, v, log_f, h0,
                                            scale, reverse,
                                            ops::offsets_on(ops::kName, cu_seqlens, q.device()));
}

at::Tensor gated_linear_attention_step(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& log_f,
                                       at::Tensor state, double scale) {
  ops::check_given(ops::kStepName,
                   {{"q", q}, {"k", k}, {"v", v}, {"log_f", log_f}, {"state", state}});
  return ops::call_op<&ops::step_kernel>("tidegate::gated_linear_attention_step", q, k, v, log_f,
                                         state, scale);
}

}  // namespace tidegate
