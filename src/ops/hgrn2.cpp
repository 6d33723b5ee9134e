// hgrn2: schema, dispatch, autograd. What it shares with gated_linear_attention is in gla.cpp.

#include "tidegate/ops/hgrn2.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
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

constexpr const char* kName = "hgrn2";

GlaArguments arguments_of(const char* op, const at::Tensor& q, const at::Tensor& f,
                          const at::Tensor& v, const OptionalTensor& gamma,
                          const OptionalTensor& h0, double scale, std::string_view q_activation,
                          std::string_view v_activation, bool reverse,
                          const OptionalTensor& cu_seqlens) {
  GlaArguments arguments{op, kernels::gla::GateKind::kLogit, q, std::nullopt, v, f};
  arguments.gamma = gamma;
  arguments.h0 = h0;
  arguments.scale = scale;
  arguments.q_activation = parse_input_activation(op, "q_activation", q_activation);
  arguments.v_activation = parse_input_activation(op, "v_activation", v_activation);
  arguments.reverse = reverse;
  arguments.cu_seqlens = cu_seqlens;
  return arguments;
}

// ---- CPU, CUDA, Meta ----

std::tuple<at::Tensor, at::Tensor> forward_kernel(const at::Tensor& q, const at::Tensor& f,
                                                  const at::Tensor& v, const OptionalTensor& gamma,
                                                  const OptionalTensor& h0, double scale,
                                                  std::string_view q_activation,
                                                  std::string_view v_activation, bool reverse,
                                                  const OptionalTensor& cu_seqlens) {
  return gla_forward_kernel(arguments_of(kName, q, f, v, gamma, h0, scale, q_activation,
                                         v_activation, reverse, cu_seqlens));
}

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& q, const at::Tensor& f,
                                                const at::Tensor& v, const OptionalTensor& gamma,
                                                const OptionalTensor& h0, double scale,
                                                std::string_view q_activation,
                                                std::string_view v_activation, bool reverse,
                                                const OptionalTensor& cu_seqlens) {
  return gla_forward_meta(arguments_of(kName, q, f, v, gamma, h0, scale, q_activation, v_activation,
                                       reverse, cu_seqlens));
}

constexpr const char* kBackwardName = "hgrn2_backward";

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients in_order(GlaGradients grads) {
  return {std::move(grads.dq), std::move(grads.dgate), std::move(grads.dv), std::move(grads.dgamma),
          std::move(grads.dh0)};
}

/// dgamma is a [0] tensor when there is no gamma.
Gradients backward_kernel(const at::Tensor& d_o, const OptionalTensor& dh_final,
                          const at::Tensor& q, const at::Tensor& f, const at::Tensor& v,
                          const OptionalTensor& gamma, const OptionalTensor& h0, double scale,
                          std::string_view q_activation, std::string_view v_activation,
                          bool reverse, const OptionalTensor& cu_seqlens) {
  return in_order(
      gla_backward_kernel(d_o, dh_final,
                          arguments_of(kBackwardName, q, f, v, gamma, h0, scale, q_activation,
                                       v_activation, reverse, cu_seqlens)));
}

Gradients backward_meta(const at::Tensor& d_o, const OptionalTensor& dh_final, const at::Tensor& q,
                        const at::Tensor& f, const at::Tensor& v, const OptionalTensor& gamma,
                        const OptionalTensor& h0, double scale, std::string_view q_activation,
                        std::string_view v_activation, bool reverse,
                        const OptionalTensor& cu_seqlens) {
  return in_order(gla_backward_meta(d_o, dh_final,
                                    arguments_of(kBackwardName, q, f, v, gamma, h0, scale,
                                                 q_activation, v_activation, reverse, cu_seqlens)));
}

constexpr const char* kStepName = "hgrn2_step";

at::Tensor step_kernel(const at::Tensor& q, const at::Tensor& f, const at::Tensor& v,
                       const OptionalTensor& gamma, at::Tensor& state, double scale,
                       std::string_view q_activation, std::string_view v_activation) {
  return gla_step_kernel(
      arguments_of(kStepName, q, f, v, gamma, {}, scale, q_activation, v_activation, false, {}),
      state);
}

at::Tensor step_meta(const at::Tensor& q, const at::Tensor& f, const at::Tensor& v,
                     const OptionalTensor& gamma, at::Tensor& state, double scale,
                     std::string_view q_activation, std::string_view v_activation) {
  return gla_step_meta(
      arguments_of(kStepName, q, f, v, gamma, {}, scale, q_activation, v_activation, false, {}),
      state);
}

// ---- Autograd, Autocast ----

class Hgrn2Function : public torch::autograd::Function<Hgrn2Function> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& f,
                               const at::Tensor& v, const OptionalTensor& gamma,
                               const OptionalTensor& h0, double scale,
                               std::string_view q_activation, std::string_view v_activation,
                               bool reverse, const OptionalTensor& cu_seqlens) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["q_activation"] = std::string(q_activation);
    ctx->saved_data["v_activation"] = std::string(v_activation);
    ctx->saved_data["reverse"] = reverse;
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [o, h_final] = call_op<&forward_kernel>("tidegate::hgrn2", q, f, v, gamma, h0, scale,
                                                 q_activation, v_activation, reverse, cu_seqlens);
    const at::Tensor none;
    ctx->save_for_backward(
        {q, f, v, gamma.value_or(none), h0.value_or(none), cu_seqlens.value_or(none)});
    return {o, h_final};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &f = saved[1], &v = saved[2], &gamma = saved[3], &h0 = saved[4],
                     &cu_seqlens = saved[5];
    const at::Tensor d_o = gradients[0].defined() ? gradients[0] : at::zeros_like(v);
    const std::string q_activation = ctx->saved_data["q_activation"].toStringRef();
    const std::string v_activation = ctx->saved_data["v_activation"].toStringRef();
    auto [dq, df, dv, dgamma, dh0] = call_op<&backward_kernel>(
        "tidegate::hgrn2_backward", d_o, optional(gradients[1]), q, f, v, optional(gamma),
        optional(h0), ctx->saved_data["scale"].toDouble(), q_activation, v_activation,
        ctx->saved_data["reverse"].toBool(), optional(cu_seqlens));
    const at::Tensor none;
    return {dq,   df,   dv,  gamma.defined() ? dgamma : none, h0.defined() ? dh0 : none, none, none,
            none, none, none};
  }
};

std::tuple<at::Tensor, at::Tensor> forward_autograd(
    const at::Tensor& q, const at::Tensor& f, const at::Tensor& v, const OptionalTensor& gamma,
    const OptionalTensor& h0, double scale, std::string_view q_activation,
    std::string_view v_activation, bool reverse, const OptionalTensor& cu_seqlens) {
  check_given(kName, {{"q", q}, {"f", f}, {"v", v}});
  const at::Tensor none;
  check_differentiable(kName, {q, f, v, gamma.value_or(none), h0.value_or(none)});
  const variable_list results = Hgrn2Function::apply(q, f, v, gamma, h0, scale, q_activation,
                                                     v_activation, reverse, cu_seqlens);
  return {results[0], results[1]};
}

/// q, f and v go to autocast's type; bounds and states stay fp32. A float64 q is left alone, and so
/// are its f and v.
std::tuple<at::Tensor, at::Tensor> forward_autocast(
    const at::Tensor& q, const at::Tensor& f, const at::Tensor& v, const OptionalTensor& gamma,
    const OptionalTensor& h0, double scale, std::string_view q_activation,
    std::string_view v_activation, bool reverse, const OptionalTensor& cu_seqlens) {
  const AutocastGuard autocast(q.device());
  const at::Tensor data = autocast.cast(q);
  return call_op<&forward_kernel>("tidegate::hgrn2", data, autocast.cast_along(f, data),
                                  autocast.cast_along(v, data), gamma, h0, scale, q_activation,
                                  v_activation, reverse, cu_seqlens);
}

at::Tensor step_autocast(const at::Tensor& q, const at::Tensor& f, const at::Tensor& v,
                         const OptionalTensor& gamma, at::Tensor& state, double scale,
                         std::string_view q_activation, std::string_view v_activation) {
  const AutocastGuard autocast(q.device());
  const at::Tensor data = autocast.cast(q);
  return call_op<&step_kernel>("tidegate::hgrn2_step", data, autocast.cast_along(f, data),
                               autocast.cast_along(v, data), gamma, state, scale, q_activation,
                               v_activation);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m,
            "hgrn2(Tensor q, Tensor f, Tensor v, Tensor? gamma=None, Tensor? h0=None, "
            "float scale=1.0, str q_activation=\"none\", str v_activation=\"none\", "
            "bool reverse=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor)");
  register_kernels<&forward_kernel, &forward_meta>(m, kName);
  register_autograd<&forward_autograd>(m, kName);
  register_autocast<&forward_autocast>(m, kName);

  define_op(m,
            "hgrn2_backward(Tensor do, Tensor? dh_final, Tensor q, Tensor f, Tensor v, "
            "Tensor? gamma, Tensor? h0, float scale, str q_activation, str v_activation, "
            "bool reverse, Tensor? cu_seqlens) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  register_kernels<&backward_kernel, &backward_meta>(m, kBackwardName);
  register_no_double_backward(m, kBackwardName);

  define_op(m,
            "hgrn2_step(Tensor q, Tensor f, Tensor v, Tensor? gamma, Tensor(a!) state, "
            "float scale=1.0, str q_activation=\"none\", str v_activation=\"none\") -> Tensor");
  register_kernels<&step_kernel, &step_meta>(m, kStepName);
  register_step(m, kStepName);
  register_autocast<&step_autocast>(m, kStepName);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> hgrn2(const at::Tensor& q, const at::Tensor& f,
                                         const at::Tensor& v,
                                         const std::optional<at::Tensor>& gamma,
                                         const std::optional<at::Tensor>& h0, double scale,
                                         std::string_view q_activation,
                                         std::string_view v_activation, bool reverse,
                                         const std::optional<at::Tensor>& cu_seqlens) {
  ops::check_given(ops::kName, {{"q", q}, {"f", f}, {"v", v}});
  return ops::call_op<&ops::forward_kernel>("tidegate::hgrn2", q, f, v, gamma, h0, scale,
                                            q_activation, v_activation, reverse,
                                            ops::offsets_on(ops::kName, cu_seqlens, q.device()));
}

at::Tensor hgrn2_step(const at::Tensor& q, const at::Tensor& f, const at::Tensor& v,
                      const std::optional<at::Tensor>& gamma, at::Tensor state, double scale,
                      std::string_view q_activation, std::string_view v_activation) {
  ops::check_given(ops::kStepName, {{"q", q}, {"f", f}, {"v", v}, {"state", state}});
  return ops::call_op<&ops::step_kernel>("tidegate::hgrn2_step", q, f, v, gamma, state, scale,
                                         q_activation, v_activation);
}

}  // namespace tidegate
