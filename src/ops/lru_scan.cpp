// lru_scan: schema, checks, dispatch, autograd.

#include "tidegate/ops/lru_scan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

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

using kernels::scan::LruBackwardParams;
using kernels::scan::LruParams;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr KernelSet<LruParams> kForward = {
    &kernels::scan::lru_unsupported, &kernels::scan::lru_plan_cpu, &kernels::scan::lru_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::scan::lru_forward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::lru_forward)};

constexpr KernelSet<LruBackwardParams, LruParams> kBackward = {
    &kernels::scan::lru_unsupported, &kernels::scan::lru_plan_cpu, &kernels::scan::lru_backward_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::scan::lru_backward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::lru_backward)};

// ---- checks ----

/// The three parameters of the recurrence as they were given.
struct Parameters {
  const at::Tensor& nu_log;
  const OptionalTensor& theta_log;
  const at::Tensor& gamma_log;

  bool complex() const { return is_given(theta_log); }
};

/// A rate or a phase rounded to eight bits is another recurrence: 16-bit parameters are refused.
void check_parameter(const Reference& data, const char* name, const at::Tensor& parameter,
                     const c10::SymInt& channels) {
  check_device(data, name, parameter);
  const at::ScalarType own = data.tensor.scalar_type();
  const at::ScalarType given = parameter.scalar_type();
  const bool is_double = own == at::kDouble;
  TORCH_CHECK(given == at::kFloat || (is_double && given == at::kDouble), data.op, ": ", name,
              " must be ", is_double ? "float64 or float32" : "float32", " (", data.name, " is ",
              c10::getDtypeNames(own).first, "), got ", c10::getDtypeNames(given).first);
  check_shape(data.op, name, parameter, "[D]", {channels});
}

/// x (or its token in the step op) and the parameters.
void check_data(const Reference& data, const Parameters& given, bool step) {
  const char* kShapes[2][2] = {{"[B, T, D]", "[B, T, 2D] (theta_log is given)"},
                               {"[B, D]", "[B, 2D] (theta_log is given)"}};
  const bool complex = given.complex();
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, step ? 2 : 3, kShapes[step][complex]);
  const c10::SymInt width = data.tensor.sym_sizes().back();
  if (complex) {
    TORCH_SYM_CHECK((width % 2).sym_eq(0), data.op, ": ", data.name, " must have shape ",
                    kShapes[step][complex], " with an even number of channels, got ",
                    data.tensor.sym_sizes());
  }
  const c10::SymInt channels = complex ? width / 2 : width;
  check_parameter(data, "nu_log", given.nu_log, channels);
  if (complex) {
    check_parameter(data, "theta_log", *given.theta_log, channels);
  }
  check_parameter(data, "gamma_log", given.gamma_log, channels);
}

/// All inputs of the forward pass; returns N.
c10::SymInt check_arguments(const Reference& data, const Parameters& given,
                            const OptionalTensor& h0, const OptionalTensor& cu_seqlens) {
  check_data(data, given, /*step=*/false);
  c10::SymInt sequences = check_cu_seqlens(data, cu_seqlens);
  check_state(data, "h0", h0, given.complex() ? "[N, 2D]" : "[N, D]",
              {sequences, data.tensor.sym_size(2)});
  return sequences;
}

void check_values(const Reference& data, const Parameters& given,
                  const OptionalTensor& cu_seqlens) {
  check_cu_seqlens_values(data, cu_seqlens);
  check_finite_values(data, "nu_log", given.nu_log);
  check_finite_values(data, "theta_log", given.theta_log);
  check_finite_values(data, "gamma_log", given.gamma_log);
}

void check_step(const Reference& data, const Parameters& given, const at::Tensor& state) {
  check_data(data, given, /*step=*/true);
  check_gate(data, "state", state);
  check_shape(data.op, "state", state, given.complex() ? "[B, 2D]" : "[B, D]",
              {data.tensor.sym_size(0), data.tensor.sym_size(1)});
}

// ---- CPU and CUDA ----

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor x, nu_log, theta_log, gamma_log, h0, cu_seqlens;

  KernelInputs(const at::Tensor& data, const Parameters& given, const OptionalTensor& state,
               const OptionalTensor& offsets)
      : x(in_rows(data)),
        nu_log(contiguous_as(given.nu_log, state_dtype(data.scalar_type()))),
        theta_log(contiguous_as(given.theta_log, state_dtype(data.scalar_type()))),
        gamma_log(contiguous_as(given.gamma_log, state_dtype(data.scalar_type()))),
        h0(contiguous_as(state, state_dtype(data.scalar_type()))),
        cu_seqlens(is_given(offsets) ? offsets->contiguous() : at::Tensor()) {}

  LruParams params(bool reverse) const {
    LruParams params;
    params.layout = sequence_layout(x, cu_seqlens, reverse);
    params.channels = nu_log.size(0);
    params.x = time_series(x);
    params.nu_log = data_or_null(nu_log);
    params.theta_log = data_or_null(theta_log);
    params.gamma_log = data_or_null(gamma_log);
    params.h0 = data_or_null(h0);
    return params;
  }
};

std::tuple<at::Tensor, at::Tensor> forward_kernel(const at::Tensor& x, const at::Tensor& nu_log,
                                                  const OptionalTensor& theta_log,
                                                  const at::Tensor& gamma_log,
                                                  const OptionalTensor& h0, bool reverse,
                                                  const OptionalTensor& cu_seqlens) {
  const Reference data{"lru_scan", "x", x};
  const Parameters given{nu_log, theta_log, gamma_log};
  const int64_t sequences =
      check_arguments(data, given, h0, cu_seqlens).guard_int(__FILE__, __LINE__);
  check_values(data, given, cu_seqlens);
  at::Tensor h = at::empty(x.sizes(), x.options());
  at::Tensor h_final =
      at::empty({sequences, x.size(2)}, x.options().dtype(state_dtype(x.scalar_type())));
  const KernelInputs inputs(x, given, h0, cu_seqlens);
  LruParams params = inputs.params(reverse);
  params.h = time_series(h);
  params.h_final = h_final.data_ptr();
  Launch<LruParams>(data.op, kForward, &params, h).run();
  return {std::move(h), std::move(h_final)};
}

c10::SymInt check_backward(const Reference& data, const at::Tensor& dh,
                           const OptionalTensor& dh_final, const at::Tensor& h,
                           const Parameters& given, const OptionalTensor& h0,
                           const OptionalTensor& cu_seqlens) {
  c10::SymInt sequences = check_arguments(data, given, h0, cu_seqlens);
  check_like(data, "h", h);
  check_like(data, "dh", dh);
  check_state(data, "dh_final", dh_final, given.complex() ? "[N, 2D]" : "[N, D]",
              {sequences, data.tensor.sym_size(2)});
  return sequences;
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// dtheta_log is a [0] tensor when there is no theta_log.
Gradients backward_kernel(const at::Tensor& dh, const OptionalTensor& dh_final, const at::Tensor& x,
                          const at::Tensor& h, const at::Tensor& nu_log,
                          const OptionalTensor& theta_log, const at::Tensor& gamma_log,
                          const OptionalTensor& h0, bool reverse,
                          const OptionalTensor& cu_seqlens) {
  const Reference data{"lru_scan_backward", "x", x};
  const Parameters given{nu_log, theta_log, gamma_log};
  const int64_t sequences =
      check_backward(data, dh, dh_final, h, given, h0, cu_seqlens).guard_int(__FILE__, __LINE__);
  check_values(data, given, cu_seqlens);
  const at::ScalarType wide = state_dtype(x.scalar_type());
  const KernelInputs inputs(x, given, h0, cu_seqlens);
  const at::Tensor h_read = in_rows(h);
  const at::Tensor dh_read = in_rows(dh);
  const at::Tensor dh_final_read = contiguous_as(dh_final, wide);
  const at::Tensor dx = at::empty(x.sizes(), x.options());
  const at::Tensor dh0 = at::empty({sequences, x.size(2)}, x.options().dtype(wide));

  LruBackwardParams params;
  params.forward = inputs.params(reverse);
  params.forward.h = time_series(h_read);
  params.dh = time_series(dh_read);
  params.dh_final = data_or_null(dh_final_read);
  params.dx = time_series(dx);
  params.dh0 = dh0.data_ptr();
  Launch<LruBackwardParams, LruParams> launch(data.op, kBackward, &params, dx);
  const at::Tensor dnu = launch.partial_sums(wide);
  const at::Tensor dtheta = given.complex() ? launch.partial_sums(wide) : at::Tensor();
  const at::Tensor dgamma = launch.partial_sums(wide);
  params.dnu_log_partial = dnu.data_ptr();
  params.dtheta_log_partial = data_or_null(dtheta);
  params.dgamma_log_partial = dgamma.data_ptr();
  launch.run();

  const std::vector<at::Tensor> sums = sum_rows("lru_scan_backward", {dnu, dtheta, dgamma});
  return {dx, sums[0].to(nu_log.scalar_type()),
          given.complex() ? sums[1].to(theta_log->scalar_type())
                          : at::empty({0}, x.options().dtype(wide)),
          sums[2].to(gamma_log.scalar_type()), is_given(h0) ? dh0.to(h0->scalar_type()) : dh0};
}

at::Tensor step_kernel(const at::Tensor& x, const at::Tensor& nu_log,
                       const OptionalTensor& theta_log, const at::Tensor& gamma_log,
                       at::Tensor& state) {
  const Reference data{"lru_scan_step", "x", x};
  const Parameters given{nu_log, theta_log, gamma_log};
  check_step(data, given, state);
  check_values(data, given, {});
  at::Tensor h = at::empty(x.sizes(), x.options());
  const KernelInputs inputs(x.unsqueeze(1), given, state, {});
  LruParams params = inputs.params(/*reverse=*/false);
  params.h = time_series(h.unsqueeze(1));
  params.h_final = inputs.h0.data_ptr();
  Launch<LruParams>(data.op, kForward, &params, h).run();
  if (!inputs.h0.is_same(state)) {
    state.copy_(inputs.h0);
  }
  return h;
}

// ---- Meta ----

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& x, const at::Tensor& nu_log,
                                                const OptionalTensor& theta_log,
                                                const at::Tensor& gamma_log,
                                                const OptionalTensor& h0, bool /*reverse*/,
                                                const OptionalTensor& cu_seqlens) {
  const c10::SymInt sequences =
      check_arguments({"lru_scan", "x", x}, {nu_log, theta_log, gamma_log}, h0, cu_seqlens);
  return {at::empty_symint(x.sym_sizes(), x.options()),
          at::empty_symint({sequences, x.sym_size(2)},
                           x.options().dtype(state_dtype(x.scalar_type())))};
}

Gradients backward_meta(const at::Tensor& dh, const OptionalTensor& dh_final, const at::Tensor& x,
                        const at::Tensor& h, const at::Tensor& nu_log,
                        const OptionalTensor& theta_log, const at::Tensor& gamma_log,
                        const OptionalTensor& h0, bool /*reverse*/,
                        const OptionalTensor& cu_seqlens) {
  const c10::SymInt sequences = check_backward({"lru_scan_backward", "x", x}, dh, dh_final, h,
                                               {nu_log, theta_log, gamma_log}, h0, cu_seqlens);
  const auto wide = x.options().dtype(state_dtype(x.scalar_type()));
  const auto like = [](const at::Tensor& parameter) {
    return at::empty_symint(parameter.sym_sizes(), parameter.options());
  };
  return {at::empty_symint(x.sym_sizes(), x.options()), like(nu_log),
          is_given(theta_log) ? like(*theta_log) : at::empty({0}, wide), like(gamma_log),
          at::empty_symint({sequences, x.sym_size(2)}, is_given(h0) ? h0->options() : wide)};
}

at::Tensor step_meta(const at::Tensor& x, const at::Tensor& nu_log, const OptionalTensor& theta_log,
                     const at::Tensor& gamma_log, at::Tensor& state) {
  check_step({"lru_scan_step", "x", x}, {nu_log, theta_log, gamma_log}, state);
  return at::empty_symint(x.sym_sizes(), x.options());
}

// ---- Autograd, Autocast ----

class LruScanFunction : public torch::autograd::Function<LruScanFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& nu_log,
                               const OptionalTensor& theta_log, const at::Tensor& gamma_log,
                               const OptionalTensor& h0, bool reverse,
                               const OptionalTensor& cu_seqlens) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["reverse"] = reverse;
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [h, h_final] = call_op<&forward_kernel>("tidegate::lru_scan", x, nu_log, theta_log,
                                                 gamma_log, h0, reverse, cu_seqlens);
    const at::Tensor none;
    ctx->save_for_backward({x, h, nu_log, theta_log.value_or(none), gamma_log, h0.value_or(none),
                            cu_seqlens.value_or(none)});
    return {h, h_final};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &h = saved[1], &nu_log = saved[2], &theta_log = saved[3],
                     &gamma_log = saved[4], &h0 = saved[5], &cu_seqlens = saved[6];
    const at::Tensor dh = gradients[0].defined() ? gradients[0] : at::zeros_like(h);
    auto [dx, dnu_log, dtheta_log, dgamma_log, dh0] =
        call_op<&backward_kernel>("tidegate::lru_scan_backward", dh, optional(gradients[1]), x, h,
                                  nu_log, optional(theta_log), gamma_log, optional(h0),
                                  ctx->saved_data["reverse"].toBool(), optional(cu_seqlens));
    const at::Tensor none;
    return {dx,
            dnu_log,
            theta_log.defined() ? dtheta_log : none,
            dgamma_log,
            h0.defined() ? dh0 : none,
            none,
            none};
  }
};

std::tuple<at::Tensor, at::Tensor> forward_autograd(const at::Tensor& x, const at::Tensor& nu_log,
                                                    const OptionalTensor& theta_log,
                                                    const at::Tensor& gamma_log,
                                                    const OptionalTensor& h0, bool reverse,
                                                    const OptionalTensor& cu_seqlens) {
  check_given("lru_scan", {{"x", x}, {"nu_log", nu_log}, {"gamma_log", gamma_log}});
  const at::Tensor none;
  check_differentiable("lru_scan",
                       {x, nu_log, theta_log.value_or(none), gamma_log, h0.value_or(none)});
  const variable_list results =
      LruScanFunction::apply(x, nu_log, theta_log, gamma_log, h0, reverse, cu_seqlens);
  return {results[0], results[1]};
}

/// x goes to autocast's type; parameters and states keep theirs.
std::tuple<at::Tensor, at::Tensor> forward_autocast(const at::Tensor& x, const at::Tensor& nu_log,
                                                    const OptionalTensor& theta_log,
                                                    const at::Tensor& gamma_log,
                                                    const OptionalTensor& h0, bool reverse,
                                                    const OptionalTensor& cu_seqlens) {
  const AutocastGuard autocast(x.device());
  return call_op<&forward_kernel>("tidegate::lru_scan", autocast.cast(x), nu_log, theta_log,
                                  gamma_log, h0, reverse, cu_seqlens);
}

at::Tensor step_autocast(const at::Tensor& x, const at::Tensor& nu_log,
                         const OptionalTensor& theta_log, const at::Tensor& gamma_log,
                         at::Tensor& state) {
  const AutocastGuard autocast(x.device());
  return call_op<&step_kernel>("tidegate::lru_scan_step", autocast.cast(x), nu_log, theta_log,
                               gamma_log, state);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m,
            "lru_scan(Tensor x, Tensor nu_log, Tensor? theta_log, Tensor gamma_log, "
            "Tensor? h0=None, bool reverse=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor)");
  register_kernels<&forward_kernel, &forward_meta>(m, "lru_scan");
  register_autograd<&forward_autograd>(m, "lru_scan");
  register_autocast<&forward_autocast>(m, "lru_scan");

  define_op(m,
            "lru_scan_backward(Tensor dh, Tensor? dh_final, Tensor x, Tensor h, Tensor nu_log, "
            "Tensor? theta_log, Tensor gamma_log, Tensor? h0, bool reverse, Tensor? cu_seqlens) "
            "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  register_kernels<&backward_kernel, &backward_meta>(m, "lru_scan_backward");
  register_no_double_backward(m, "lru_scan_backward");

  define_op(m,
            "lru_scan_step(Tensor x, Tensor nu_log, Tensor? theta_log, Tensor gamma_log, "
            "Tensor(a!) state) -> Tensor");
  register_kernels<&step_kernel, &step_meta>(m, "lru_scan_step");
  register_step(m, "lru_scan_step");
  register_autocast<&step_autocast>(m, "lru_scan_step");
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> lru_scan(const at::Tensor& x, const at::Tensor& nu_log,
                                            const std::optional<at::Tensor>& theta_log,
                                            const at::Tensor& gamma_log,
                                            const std::optional<at::Tensor>& h0, bool reverse,
                                            const std::optional<at::Tensor>& cu_seqlens) {
  ops::check_given("lru_scan", {{"x", x}, {"nu_log", nu_log}, {"gamma_log", gamma_log}});
  return ops::call_op<&ops::forward_kernel>("tidegate::lru_scan", x, nu_log, theta_log, gamma_log,
                                            h0, reverse,
                                            ops::offsets_on("lru_scan", cu_seqlens, x.device()));
}

at::Tensor lru_scan_step(const at::Tensor& x, const at::Tensor& nu_log,
                         const std::optional<at::Tensor>& theta_log, const at::Tensor& gamma_log,
                         at::Tensor state) {
  ops::check_given("lru_scan_step",
                   {{"x", x}, {"nu_log", nu_log}, {"gamma_log", gamma_log}, {"state", state}});
  return ops::call_op<&ops::step_kernel>("tidegate::lru_scan_step", x, nu_log, theta_log, gamma_log,
                                         state);
}

}  // namespace tidegate
