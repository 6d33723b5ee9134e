// linear_scan: schema, checks, dispatch, autograd.

#include "tidegate/ops/linear_scan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>
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

using kernels::scan::LinearScanBackwardParams;
using kernels::scan::LinearScanParams;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr KernelSet<LinearScanParams> kForward = {
    &kernels::scan::linear_scan_unsupported, &kernels::scan::linear_scan_plan_cpu,
    &kernels::scan::linear_scan_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::scan::linear_scan_forward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::linear_scan_forward)};

constexpr KernelSet<LinearScanBackwardParams, LinearScanParams> kBackward = {
    &kernels::scan::linear_scan_unsupported, &kernels::scan::linear_scan_plan_cpu,
    &kernels::scan::linear_scan_backward_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::scan::linear_scan_backward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::linear_scan_backward)};

// ---- checks ----

void check_decay_dtype(const Reference& data, const at::Tensor& a) {
  const at::ScalarType own = data.tensor.scalar_type();
  if (!at::isComplexType(own)) {
    check_gate(data, "a", a);
    return;
  }
  // A complex recurrence takes a real decay too: it is made complex above the kernel.
  check_device(data, "a", a);
  const bool is_double = own == at::kComplexDouble;
  const at::ScalarType given = a.scalar_type();
  const bool fits = given == at::kComplexFloat || given == at::kFloat ||
                    (is_double && (given == at::kComplexDouble || given == at::kDouble));
  TORCH_CHECK(fits, data.op, ": a must be ",
              is_double ? "complex128, float64, complex64 or float32" : "complex64 or float32",
              " (", data.name, " is ", c10::getDtypeNames(own).first, "), got ",
              c10::getDtypeNames(given).first);
}

std::string like_data(const Reference& data) {
  return std::string(" like ") + data.name + " (or [D] when constant)";
}

/// Everything but `x` (or `h`, its twin in the backward op) itself; returns N.
c10::SymInt check_arguments(const Reference& data, const at::Tensor& a, const OptionalTensor& h0,
                            const OptionalTensor& cu_seqlens) {
  check_data_dtype(data, ComplexData::kAccepted);
  check_rank(data, 3, "[B, T, D]");
  const auto sizes = data.tensor.sym_sizes();
  check_decay_dtype(data, a);
  if (a.dim() == 1) {
    check_shape(data.op, "a", a, "[D]", {sizes[2]});
  } else {
    check_shape(data.op, "a", a, "[B, T, D]", {sizes[0], sizes[1], sizes[2]}, like_data(data));
  }
  c10::SymInt sequences = check_cu_seqlens(data, cu_seqlens);
  check_state(data, "h0", h0, "[N, D]", {sequences, sizes[2]});
  return sequences;
}

void check_step(const at::Tensor& x, const at::Tensor& a, const at::Tensor& state) {
  const Reference data{"linear_scan_step", "x", x};
  check_data_dtype(data, ComplexData::kAccepted);
  check_rank(data, 2, "[B, D]");
  const auto sizes = x.sym_sizes();
  check_decay_dtype(data, a);
  if (a.dim() == 1) {
    check_shape(data.op, "a", a, "[D]", {sizes[1]});
  } else {
    check_shape(data.op, "a", a, "[B, D]", {sizes[0], sizes[1]}, like_data(data));
  }
  check_gate(data, "state", state);
  check_shape(data.op, "state", state, "[B, D]", {sizes[0], sizes[1]});
}

// ---- CPU and CUDA ----

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor a, h0, cu_seqlens;

  KernelInputs(const at::Tensor& data, const at::Tensor& decay, const OptionalTensor& state,
               const OptionalTensor& offsets)
      : a(gate_in_rows(decay, data.scalar_type())),
        h0(contiguous_as(state, state_dtype(data.scalar_type()))),
        cu_seqlens(is_given(offsets) ? offsets->contiguous() : at::Tensor()) {}

  LinearScanParams params(const at::Tensor& data, bool reverse) const {
    LinearScanParams params;
    params.layout = sequence_layout(data, cu_seqlens, reverse);
    params.channels = data.size(2);
    params.a_is_constant = a.dim() == 1;
    params.a = params.a_is_constant ? constant_series(a) : time_series(a);
    params.h0 = data_or_null(h0);
    return params;
  }
};

/// Writes `h` [B, T, D] and `h_final` [N, D]; `h_final` may be `inputs.h0` when T = 1.
void run_forward(const char* op, const at::Tensor& data, const KernelInputs& inputs, bool reverse,
                 const at::Tensor& h, const at::Tensor& h_final) {
  const at::Tensor x = in_rows(data);
  LinearScanParams params = inputs.params(x, reverse);
  params.x = time_series(x);
  params.h = time_series(h);
  params.h_final = h_final.data_ptr();
  Launch<LinearScanParams>(op, kForward, &params, h).run();
}

std::tuple<at::Tensor, at::Tensor> forward_kernel(const at::Tensor& x, const at::Tensor& a,
                                                  const OptionalTensor& h0, bool reverse,
                                                  const OptionalTensor& cu_seqlens) {
  const Reference data{"linear_scan", "x", x};
  const int64_t sequences = check_arguments(data, a, h0, cu_seqlens).guard_int(__FILE__, __LINE__);
  check_cu_seqlens_values(data, cu_seqlens);
  at::Tensor h = at::empty(x.sizes(), x.options());
  at::Tensor h_final =
      at::empty({sequences, x.size(2)}, x.options().dtype(state_dtype(x.scalar_type())));
  run_forward(data.op, x, KernelInputs(x, a, h0, cu_seqlens), reverse, h, h_final);
  return {std::move(h), std::move(h_final)};
}

/// A gradient in the type of the argument that it belongs to.
at::Tensor in_type_of(const at::Tensor& argument, const at::Tensor& gradient) {
  const bool drop_imaginary = gradient.is_complex() && !argument.is_complex();
  return (drop_imaginary ? at::real(gradient) : gradient).to(argument.scalar_type()).contiguous();
}

c10::SymInt check_backward(const at::Tensor& dh, const OptionalTensor& dh_final,
                           const at::Tensor& a, const at::Tensor& h, const OptionalTensor& h0,
                           const OptionalTensor& cu_seqlens) {
  const Reference data{"linear_scan_backward", "h", h};
  c10::SymInt sequences = check_arguments(data, a, h0, cu_seqlens);
  check_like(data, "dh", dh);
  check_state(data, "dh_final", dh_final, "[N, D]", {sequences, h.sym_size(2)});
  return sequences;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_kernel(
    const at::Tensor& dh, const OptionalTensor& dh_final, const at::Tensor& a, const at::Tensor& h,
    const OptionalTensor& h0, bool reverse, const OptionalTensor& cu_seqlens) {
  const int64_t sequences =
      check_backward(dh, dh_final, a, h, h0, cu_seqlens).guard_int(__FILE__, __LINE__);
  check_cu_seqlens_values({"linear_scan_backward", "h", h}, cu_seqlens);
  const at::ScalarType wide = state_dtype(h.scalar_type());
  const KernelInputs inputs(h, a, h0, cu_seqlens);
  const at::Tensor h_read = in_rows(h);
  const at::Tensor dh_read = in_rows(dh);
  const at::Tensor dh_final_read = contiguous_as(dh_final, wide);
  const at::Tensor dx = at::empty(h.sizes(), h.options());
  const at::Tensor dh0 = at::empty({sequences, h.size(2)}, h.options().dtype(wide));

  LinearScanBackwardParams params;
  params.forward = inputs.params(h_read, reverse);
  params.forward.h = time_series(h_read);
  params.forward.x = time_series(dx);  // only its type and shape count here
  params.dh = time_series(dh_read);
  params.dh_final = data_or_null(dh_final_read);
  params.dx = time_series(dx);
  params.dh0 = dh0.data_ptr();
  at::Tensor da;
  if (!params.forward.a_is_constant) {
    da = at::empty(h.sizes(), inputs.a.options());
    params.da = time_series(da);
  }
  Launch<LinearScanBackwardParams, LinearScanParams> launch("linear_scan_backward", kBackward,
                                                            &params, dx);
  if (params.forward.a_is_constant) {
    da = launch.partial_sums(wide);
    params.da_partial = da.data_ptr();
  }
  launch.run();
  if (params.forward.a_is_constant) {
    da = sum_rows("linear_scan_backward", {da})[0];
  }
  return {dx, in_type_of(a, da), is_given(h0) ? in_type_of(*h0, dh0) : dh0};
}

at::Tensor step_kernel(const at::Tensor& x, const at::Tensor& a, at::Tensor& state) {
  check_step(x, a, state);
  at::Tensor h = at::empty(x.sizes(), x.options());
  const KernelInputs inputs(x, a.dim() == 1 ? a : a.unsqueeze(1), state, {});
  run_forward("linear_scan_step", x.unsqueeze(1), inputs, false, h.unsqueeze(1), inputs.h0);
  if (!inputs.h0.is_same(state)) {
    state.copy_(inputs.h0);
  }
  return h;
}

// ---- Meta ----

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& x, const at::Tensor& a,
                                                const OptionalTensor& h0, bool /*reverse*/,
                                                const OptionalTensor& cu_seqlens) {
  const c10::SymInt sequences = check_arguments({"linear_scan", "x", x}, a, h0, cu_seqlens);
  return {at::empty_symint(x.sym_sizes(), x.options()),
          at::empty_symint({sequences, x.sym_size(2)},
                           x.options().dtype(state_dtype(x.scalar_type())))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_meta(
    const at::Tensor& dh, const OptionalTensor& dh_final, const at::Tensor& a, const at::Tensor& h,
    const OptionalTensor& h0, bool /*reverse*/, const OptionalTensor& cu_seqlens) {
  const c10::SymInt sequences = check_backward(dh, dh_final, a, h, h0, cu_seqlens);
  const at::ScalarType dh0_type = is_given(h0) ? h0->scalar_type() : state_dtype(h.scalar_type());
  return {at::empty_symint(h.sym_sizes(), h.options()),
          at::empty_symint(a.sym_sizes(), a.options()),
          at::empty_symint({sequences, h.sym_size(2)}, h.options().dtype(dh0_type))};
}

at::Tensor step_meta(const at::Tensor& x, const at::Tensor& a, at::Tensor& state) {
  check_step(x, a, state);
  return at::empty_symint(x.sym_sizes(), x.options());
}

// ---- Autograd, Autocast ----

class LinearScanFunction : public torch::autograd::Function<LinearScanFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& a,
                               const OptionalTensor& h0, bool reverse,
                               const OptionalTensor& cu_seqlens) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["reverse"] = reverse;
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [h, h_final] =
        call_op<&forward_kernel>("tidegate::linear_scan", x, a, h0, reverse, cu_seqlens);
    ctx->save_for_backward({a, h, h0.value_or(at::Tensor()), cu_seqlens.value_or(at::Tensor())});
    return {h, h_final};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& h = saved[1];
    const at::Tensor dh = gradients[0].defined() ? gradients[0] : at::zeros_like(h);
    auto [dx, da, dh0] = call_op<&backward_kernel>(
        "tidegate::linear_scan_backward", dh, optional(gradients[1]), saved[0], h,
        optional(saved[2]), ctx->saved_data["reverse"].toBool(), optional(saved[3]));
    return {dx, da, saved[2].defined() ? dh0 : at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

std::tuple<at::Tensor, at::Tensor> forward_autograd(const at::Tensor& x, const at::Tensor& a,
                                                    const OptionalTensor& h0, bool reverse,
                                                    const OptionalTensor& cu_seqlens) {
  check_given("linear_scan", {{"x", x}, {"a", a}});
  check_differentiable("linear_scan", {x, a, h0.value_or(at::Tensor())});
  const variable_list results = LinearScanFunction::apply(x, a, h0, reverse, cu_seqlens);
  return {results[0], results[1]};
}

/// x goes to autocast's type; a decay near one would lose what makes it differ from one, so a keeps
/// fp32, as do the states.
std::tuple<at::Tensor, at::Tensor> forward_autocast(const at::Tensor& x, const at::Tensor& a,
                                                    const OptionalTensor& h0, bool reverse,
                                                    const OptionalTensor& cu_seqlens) {
  const AutocastGuard autocast(x.device());
  return call_op<&forward_kernel>("tidegate::linear_scan", autocast.cast(x),
                                  autocast.cast_unless_float(a), h0, reverse, cu_seqlens);
}

at::Tensor step_autocast(const at::Tensor& x, const at::Tensor& a, at::Tensor& state) {
  const AutocastGuard autocast(x.device());
  return call_op<&step_kernel>("tidegate::linear_scan_step", autocast.cast(x),
                               autocast.cast_unless_float(a), state);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m,
            "linear_scan(Tensor x, Tensor a, Tensor? h0=None, bool reverse=False, "
            "Tensor? cu_seqlens=None) -> (Tensor, Tensor)");
  register_kernels<&forward_kernel, &forward_meta>(m, "linear_scan");
  register_autograd<&forward_autograd>(m, "linear_scan");
  register_autocast<&forward_autocast>(m, "linear_scan");

  define_op(m,
            "linear_scan_backward(Tensor dh, Tensor? dh_final, Tensor a, Tensor h, Tensor? h0, "
            "bool reverse, Tensor? cu_seqlens) -> (Tensor, Tensor, Tensor)");
  register_kernels<&backward_kernel, &backward_meta>(m, "linear_scan_backward");
  register_no_double_backward(m, "linear_scan_backward");

  define_op(m, "linear_scan_step(Tensor x, Tensor a, Tensor(a!) state) -> Tensor");
  register_kernels<&step_kernel, &step_meta>(m, "linear_scan_step");
  register_step(m, "linear_scan_step");
  register_autocast<&step_autocast>(m, "linear_scan_step");
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> linear_scan(const at::Tensor& x, const at::Tensor& a,
                                               const std::optional<at::Tensor>& h0, bool reverse,
                                               const std::optional<at::Tensor>& cu_seqlens) {
  ops::check_given("linear_scan", {{"x", x}, {"a", a}});
  return ops::call_op<&ops::forward_kernel>("tidegate::linear_scan", x, a, h0, reverse,
                                            ops::offsets_on("linear_scan", cu_seqlens, x.device()));
}

at::Tensor linear_scan_step(const at::Tensor& x, const at::Tensor& a, at::Tensor state) {
  ops::check_given("linear_scan_step", {{"x", x}, {"a", a}, {"state", state}});
  return ops::call_op<&ops::step_kernel>("tidegate::linear_scan_step", x, a, state);
}

}  // namespace tidegate
