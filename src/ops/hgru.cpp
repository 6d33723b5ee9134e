// hgru: schema, checks, dispatch, autograd.

#include "tidegate/ops/hgru.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>

#include "kernels/scan/scan.h"
#include "src/ops/autocast.h"
#include "src/ops/checks.h"
#include "src/ops/launch.h"
#include "src/ops/registration.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/scan/scan_cuda.h"
#endif

namespace tidegate::ops {
namespace {

using kernels::scan::HgruBackwardParams;
using kernels::scan::HgruParams;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr KernelSet<HgruParams> kForward = {
    &kernels::scan::hgru_unsupported, &kernels::scan::hgru_plan_cpu,
    &kernels::scan::hgru_forward_cpu, TIDEGATE_CUDA_KERNEL(&kernels::scan::hgru_forward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::hgru_forward)};

constexpr KernelSet<HgruBackwardParams, HgruParams> kBackward = {
    &kernels::scan::hgru_unsupported, &kernels::scan::hgru_plan_cpu,
    &kernels::scan::hgru_backward_cpu, TIDEGATE_CUDA_KERNEL(&kernels::scan::hgru_backward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::hgru_backward)};

// ---- checks ----

kernels::scan::Activation parse_activation(const char* op, std::string_view name) {
  TORCH_CHECK(name == "silu" || name == "none", op,
              ": activation must be \"silu\" or \"none\", got \"", name, "\"");
  return name == "silu" ? kernels::scan::Activation::kSilu : kernels::scan::Activation::kNone;
}

/// c and f of [.., D], with or without a time axis. Returns D.
c10::SymInt check_data(const Reference& data, const at::Tensor& f, bool complex, bool step) {
  const char* kShapes[2][2] = {{"[B, T, D]", "[B, T, 2D] (theta is given)"},
                               {"[B, D]", "[B, 2D] (theta is given)"}};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, step ? 2 : 3, kShapes[step][complex]);
  check_gate(data, "f", f);
  const auto sizes = data.tensor.sym_sizes();
  const c10::SymInt width = sizes.back();
  if (complex) {
    TORCH_SYM_CHECK((width % 2).sym_eq(0), data.op, ": ", data.name, " must have shape ",
                    kShapes[step][complex], " with an even number of channels, got ",
                    data.tensor.sym_sizes());
  }
  const c10::SymInt channels = complex ? width / 2 : width;
  const std::string like = complex ? std::string(" (theta is given: ") + data.name +
                                         " is [Re | Im], f has half its width)"
                                   : std::string(" like ") + data.name;
  if (step) {
    check_shape(data.op, "f", f, "[B, D]", {sizes[0], channels}, like);
  } else {
    check_shape(data.op, "f", f, "[B, T, D]", {sizes[0], sizes[1], channels}, like);
  }
  return channels;
}

/// All inputs of the forward pass; returns N.
c10::SymInt check_arguments(const Reference& data, const at::Tensor& f, const OptionalTensor& gamma,
                            const OptionalTensor& theta, const OptionalTensor& h0,
                            const OptionalTensor& cu_seqlens) {
  const bool complex = is_given(theta);
  const c10::SymInt channels = check_data(data, f, complex, /*step=*/false);
  check_channel_parameter(data, "gamma", gamma, channels);
  check_channel_parameter(data, "theta", theta, channels);
  c10::SymInt sequences = check_cu_seqlens(data, cu_seqlens);
  check_state(data, "h0", h0, complex ? "[N, 2D]" : "[N, D]", {sequences, data.tensor.sym_size(2)});
  return sequences;
}

void check_values(const Reference& data, const OptionalTensor& gamma, const OptionalTensor& theta,
                  const OptionalTensor& cu_seqlens) {
  check_cu_seqlens_values(data, cu_seqlens);
  check_bound_values(data, "gamma", gamma);
  check_finite_values(data, "theta", theta);
}

void check_step(const at::Tensor& c, const at::Tensor& f, const OptionalTensor& gamma,
                const OptionalTensor& theta, const at::Tensor& state) {
  const Reference data{"hgru_step", "c", c};
  const bool complex = is_given(theta);
  const c10::SymInt channels = check_data(data, f, complex, /*step=*/true);
  check_channel_parameter(data, "gamma", gamma, channels);
  check_channel_parameter(data, "theta", theta, channels);
  check_gate(data, "state", state);
  check_shape(data.op, "state", state, complex ? "[B, 2D]" : "[B, D]",
              {c.sym_size(0), c.sym_size(1)});
}

// ---- CPU and CUDA ----

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor c, f, gamma, theta, h0, cu_seqlens;

  KernelInputs(const at::Tensor& data, const at::Tensor& logits, const OptionalTensor& bound,
               const OptionalTensor& phase, const OptionalTensor& state,
               const OptionalTensor& offsets)
      : c(in_rows(data)),
        f(gate_in_rows(logits, data.scalar_type())),
        gamma(contiguous_as(bound, state_dtype(data.scalar_type()))),
        theta(contiguous_as(phase, state_dtype(data.scalar_type()))),
        h0(contiguous_as(state, state_dtype(data.scalar_type()))),
        cu_seqlens(is_given(offsets) ? offsets->contiguous() : at::Tensor()) {}

  HgruParams params(kernels::scan::Activation activation, bool reverse) const {
    HgruParams params;
    params.layout = sequence_layout(c, cu_seqlens, reverse);
    params.channels = f.size(2);
    params.activation = activation;
    params.c = time_series(c);
    params.f = time_series(f);
    params.gamma = data_or_null(gamma);
    params.theta = data_or_null(theta);
    params.h0 = data_or_null(h0);
    return params;
  }
};

std::tuple<at::Tensor, at::Tensor> forward_kernel(const at::Tensor& c, const at::Tensor& f,
                                                  const OptionalTensor& gamma,
                                                  const OptionalTensor& theta,
                                                  const OptionalTensor& h0,
                                                  std::string_view activation, bool reverse,
                                                  const OptionalTensor& cu_seqlens) {
  const Reference data{"hgru", "c", c};
  const auto act = parse_activation(data.op, activation);
  const int64_t sequences =
      check_arguments(data, f, gamma, theta, h0, cu_seqlens).guard_int(__FILE__, __LINE__);
  check_values(data, gamma, theta, cu_seqlens);
  at::Tensor h = at::empty(c.sizes(), c.options());
  at::Tensor h_final =
      at::empty({sequences, c.size(2)}, c.options().dtype(state_dtype(c.scalar_type())));
  const KernelInputs inputs(c, f, gamma, theta, h0, cu_seqlens);
  HgruParams params = inputs.params(act, reverse);
  params.h = time_series(h);
  params.h_final = h_final.data_ptr();
  Launch<HgruParams>(data.op, kForward, &params, h).run();
  return {std::move(h), std::move(h_final)};
}

c10::SymInt check_backward(const at::Tensor& dh, const OptionalTensor& dh_final,
                           const at::Tensor& c, const at::Tensor& f, const at::Tensor& h,
                           const OptionalTensor& gamma, const OptionalTensor& theta,
                           const OptionalTensor& h0, const OptionalTensor& cu_seqlens) {
  const Reference data{"hgru_backward", "c", c};
  c10::SymInt sequences = check_arguments(data, f, gamma, theta, h0, cu_seqlens);
  check_like(data, "h", h);
  check_like(data, "dh", dh);
  check_state(data, "dh_final", dh_final, is_given(theta) ? "[N, 2D]" : "[N, D]",
              {sequences, c.sym_size(2)});
  return sequences;
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// dgamma and dtheta are [0] tensors when there is no gamma or theta.
Gradients backward_kernel(const at::Tensor& dh, const OptionalTensor& dh_final, const at::Tensor& c,
                          const at::Tensor& f, const at::Tensor& h, const OptionalTensor& gamma,
                          const OptionalTensor& theta, const OptionalTensor& h0,
                          std::string_view activation, bool reverse,
                          const OptionalTensor& cu_seqlens) {
  const Reference data{"hgru_backward", "c", c};
  const auto act = parse_activation(data.op, activation);
  const int64_t sequences = check_backward(dh, dh_final, c, f, h, gamma, theta, h0, cu_seqlens)
                                .guard_int(__FILE__, __LINE__);
  check_values(data, gamma, theta, cu_seqlens);
  const at::ScalarType wide = state_dtype(c.scalar_type());
  const KernelInputs inputs(c, f, gamma, theta, h0, cu_seqlens);
  const at::Tensor h_read = in_rows(h);
  const at::Tensor dh_read = in_rows(dh);
  const at::Tensor dh_final_read = contiguous_as(dh_final, wide);
  const at::Tensor dc = at::empty(c.sizes(), c.options());
  const at::Tensor df = at::empty(f.sizes(), inputs.f.options());
  const at::Tensor dh0 = at::empty({sequences, c.size(2)}, c.options().dtype(wide));

  HgruBackwardParams params;
  params.forward = inputs.params(act, reverse);
  params.forward.h = time_series(h_read);
  params.dh = time_series(dh_read);
  params.dh_final = data_or_null(dh_final_read);
  params.dc = time_series(dc);
  params.df = time_series(df);
  params.dh0 = dh0.data_ptr();
  Launch<HgruBackwardParams, HgruParams> launch(data.op, kBackward, &params, dc);
  at::Tensor dgamma = is_given(gamma) ? launch.partial_sums(wide) : at::Tensor();
  at::Tensor dtheta = is_given(theta) ? launch.partial_sums(wide) : at::Tensor();
  params.dgamma_partial = data_or_null(dgamma);
  params.dtheta_partial = data_or_null(dtheta);
  launch.run();

  const std::vector<at::Tensor> sums = sum_rows("hgru_backward", {dgamma, dtheta});
  const auto gradient = [&](const at::Tensor& sum, const OptionalTensor& argument) {
    return sum.defined() ? sum.to(argument->scalar_type())
                         : at::empty({0}, c.options().dtype(wide));
  };
  return {dc, df.to(f.scalar_type()), gradient(sums[0], gamma), gradient(sums[1], theta),
          is_given(h0) ? dh0.to(h0->scalar_type()) : dh0};
}

at::Tensor step_kernel(const at::Tensor& c, const at::Tensor& f, const OptionalTensor& gamma,
                       const OptionalTensor& theta, at::Tensor& state,
                       std::string_view activation) {
  const Reference data{"hgru_step", "c", c};
  const auto act = parse_activation(data.op, activation);
  check_step(c, f, gamma, theta, state);
  check_values(data, gamma, theta, {});
  at::Tensor h = at::empty(c.sizes(), c.options());
  const KernelInputs inputs(c.unsqueeze(1), f.unsqueeze(1), gamma, theta, state, {});
  HgruParams params = inputs.params(act, /*reverse=*/false);
  params.h = time_series(h.unsqueeze(1));
  params.h_final = inputs.h0.data_ptr();
  Launch<HgruParams>(data.op, kForward, &params, h).run();
  if (!inputs.h0.is_same(state)) {
    state.copy_(inputs.h0);
  }
  return h;
}

// ---- Meta ----

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& c, const at::Tensor& f,
                                                const OptionalTensor& gamma,
                                                const OptionalTensor& theta,
                                                const OptionalTensor& h0,
                                                std::string_view activation, bool /*reverse*/,
                                                const OptionalTensor& cu_seqlens) {
  parse_activation("hgru", activation);
  const c10::SymInt sequences = check_arguments({"hgru", "c", c}, f, gamma, theta, h0, cu_seqlens);
  return {at::empty_symint(c.sym_sizes(), c.options()),
          at::empty_symint({sequences, c.sym_size(2)},
                           c.options().dtype(state_dtype(c.scalar_type())))};
}

Gradients backward_meta(const at::Tensor& dh, const OptionalTensor& dh_final, const at::Tensor& c,
                        const at::Tensor& f, const at::Tensor& h, const OptionalTensor& gamma,
                        const OptionalTensor& theta, const OptionalTensor& h0,
                        std::string_view activation, bool /*reverse*/,
                        const OptionalTensor& cu_seqlens) {
  parse_activation("hgru_backward", activation);
  const c10::SymInt sequences = check_backward(dh, dh_final, c, f, h, gamma, theta, h0, cu_seqlens);
  const auto wide = c.options().dtype(state_dtype(c.scalar_type()));
  const auto like_parameter = [&](const OptionalTensor& parameter) {
    return is_given(parameter) ? at::empty_symint(parameter->sym_sizes(), parameter->options())
                               : at::empty({0}, wide);
  };
  return {at::empty_symint(c.sym_sizes(), c.options()),
          at::empty_symint(f.sym_sizes(), f.options()), like_parameter(gamma),
          like_parameter(theta),
          at::empty_symint({sequences, c.sym_size(2)}, is_given(h0) ? h0->options() : wide)};
}

at::Tensor step_meta(const at::Tensor& c, const at::Tensor& f, const OptionalTensor& gamma,
                     const OptionalTensor& theta, at::Tensor& state, std::string_view activation) {
  parse_activation("hgru_step", activation);
  check_step(c, f, gamma, theta, state);
  return at::empty_symint(c.sym_sizes(), c.options());
}

// ---- Autograd, Autocast ----

class HgruFunction : public torch::autograd::Function<HgruFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& c, const at::Tensor& f,
                               const OptionalTensor& gamma, const OptionalTensor& theta,
                               const OptionalTensor& h0, std::string_view activation, bool reverse,
                               const OptionalTensor& cu_seqlens) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["activation"] = std::string(activation);
    ctx->saved_data["reverse"] = reverse;
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [h, h_final] = call_op<&forward_kernel>("tidegate::hgru", c, f, gamma, theta, h0,
                                                 activation, reverse, cu_seqlens);
    const at::Tensor none;
    ctx->save_for_backward({c, f, h, gamma.value_or(none), theta.value_or(none), h0.value_or(none),
                            cu_seqlens.value_or(none)});
    return {h, h_final};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &c = saved[0], &f = saved[1], &h = saved[2], &gamma = saved[3],
                     &theta = saved[4], &h0 = saved[5], &cu_seqlens = saved[6];
    const at::Tensor dh = gradients[0].defined() ? gradients[0] : at::zeros_like(h);
    const std::string activation = ctx->saved_data["activation"].toStringRef();
    auto [dc, df, dgamma, dtheta, dh0] =
        call_op<&backward_kernel>("tidegate::hgru_backward", dh, optional(gradients[1]), c, f, h,
                                  optional(gamma), optional(theta), optional(h0), activation,
                                  ctx->saved_data["reverse"].toBool(), optional(cu_seqlens));
    const at::Tensor none;
    return {dc,
            df,
            gamma.defined() ? dgamma : none,
            theta.defined() ? dtheta : none,
            h0.defined() ? dh0 : none,
            none,
            none,
            none};
  }
};

std::tuple<at::Tensor, at::Tensor> forward_autograd(const at::Tensor& c, const at::Tensor& f,
                                                    const OptionalTensor& gamma,
                                                    const OptionalTensor& theta,
                                                    const OptionalTensor& h0,
                                                    std::string_view activation, bool reverse,
                                                    const OptionalTensor& cu_seqlens) {
  check_given("hgru", {{"c", c}, {"f", f}});
  const at::Tensor none;
  check_differentiable("hgru",
                       {c, f, gamma.value_or(none), theta.value_or(none), h0.value_or(none)});
  const variable_list results =
      HgruFunction::apply(c, f, gamma, theta, h0, activation, reverse, cu_seqlens);
  return {results[0], results[1]};
}

/// c and f go to autocast's type; bounds, phases and states stay fp32. A float64 c is left alone,
/// and so is its f.
std::tuple<at::Tensor, at::Tensor> forward_autocast(const at::Tensor& c, const at::Tensor& f,
                                                    const OptionalTensor& gamma,
                                                    const OptionalTensor& theta,
                                                    const OptionalTensor& h0,
                                                    std::string_view activation, bool reverse,
                                                    const OptionalTensor& cu_seqlens) {
  const AutocastGuard autocast(c.device());
  const at::Tensor data = autocast.cast(c);
  return call_op<&forward_kernel>("tidegate::hgru", data, autocast.cast_along(f, data), gamma,
                                  theta, h0, activation, reverse, cu_seqlens);
}

at::Tensor step_autocast(const at::Tensor& c, const at::Tensor& f, const OptionalTensor& gamma,
                         const OptionalTensor& theta, at::Tensor& state,
                         std::string_view activation) {
  const AutocastGuard autocast(c.device());
  const at::Tensor data = autocast.cast(c);
  return call_op<&step_kernel>("tidegate::hgru_step", data, autocast.cast_along(f, data), gamma,
                               theta, state, activation);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m,
            "hgru(Tensor c, Tensor f, Tensor? gamma=None, Tensor? theta=None, Tensor? h0=None, "
            "str activation=\"silu\", bool reverse=False, Tensor? cu_seqlens=None) "
            "-> (Tensor, Tensor)");
  register_kernels<&forward_kernel, &forward_meta>(m, "hgru");
  register_autograd<&forward_autograd>(m, "hgru");
  register_autocast<&forward_autocast>(m, "hgru");

  define_op(m,
            "hgru_backward(Tensor dh, Tensor? dh_final, Tensor c, Tensor f, Tensor h, "
            "Tensor? gamma, Tensor? theta, Tensor? h0, str activation, bool reverse, "
            "Tensor? cu_seqlens) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  register_kernels<&backward_kernel, &backward_meta>(m, "hgru_backward");
  register_no_double_backward(m, "hgru_backward");

  define_op(m,
            "hgru_step(Tensor c, Tensor f, Tensor? gamma, Tensor? theta, Tensor(a!) state, "
            "str activation=\"silu\") -> Tensor");
  register_kernels<&step_kernel, &step_meta>(m, "hgru_step");
  register_step(m, "hgru_step");
  register_autocast<&step_autocast>(m, "hgru_step");
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> hgru(const at::Tensor& c, const at::Tensor& f,
                                        const std::optional<at::Tensor>& gamma,
                                        const std::optional<at::Tensor>& theta,
                                        const std::optional<at::Tensor>& h0,
                                        std::string_view activation, bool reverse,
                                        const std::optional<at::Tensor>& cu_seqlens) {
  ops::check_given("hgru", {{"c", c}, {"f", f}});
  return ops::call_op<&ops::forward_kernel>("tidegate::hgru", c, f, gamma, theta, h0, activation,
                                            reverse,
                                            ops::offsets_on("hgru", cu_seqlens, c.device()));
}

at::Tensor hgru_step(const at::Tensor& c, const at::Tensor& f,
                     const std::optional<at::Tensor>& gamma, const std::optional<at::Tensor>& theta,
                     at::Tensor state, std::string_view activation) {
  ops::check_given("hgru_step", {{"c", c}, {"f", f}, {"state", state}});
  return ops::call_op<&ops::step_kernel>("tidegate::hgru_step", c, f, gamma, theta, state,
                                         activation);
}

}  // namespace tidegate
