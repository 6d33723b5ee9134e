// wkv4: schema, checks, dispatch, autograd.
// The state goes by its own name, not h0: of its three vectors none is an output. The gradient of o
// is `do` in the schema, d_o in C++, where `do` is a keyword, and grad_o in the kernels' params.

#include "tidegate/ops/wkv4.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "kernels/scan/wkv4.h"
#include "src/ops/autocast.h"
#include "src/ops/checks.h"
#include "src/ops/launch.h"
#include "src/ops/registration.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/scan/wkv4_cuda.h"
#endif

namespace tidegate::ops {
namespace {

using kernels::scan::Wkv4BackwardParams;
using kernels::scan::Wkv4Params;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr KernelSet<Wkv4Params> kForward = {
    &kernels::scan::wkv4_unsupported, &kernels::scan::wkv4_plan_cpu,
    &kernels::scan::wkv4_forward_cpu, TIDEGATE_CUDA_KERNEL(&kernels::scan::wkv4_forward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::wkv4_forward)};

constexpr KernelSet<Wkv4BackwardParams, Wkv4Params> kBackward = {
    &kernels::scan::wkv4_unsupported, &kernels::scan::wkv4_plan_cpu,
    &kernels::scan::wkv4_backward_cpu, TIDEGATE_CUDA_KERNEL(&kernels::scan::wkv4_backward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::wkv4_backward)};

// ---- checks ----

/// k, the reference that the others are held against, and all of them; returns N.
c10::SymInt check_arguments(const char* op, const at::Tensor& w, const at::Tensor& u,
                            const at::Tensor& k, const at::Tensor& v, const OptionalTensor& state,
                            const OptionalTensor& cu_seqlens) {
  const Reference data{op, "k", k};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 3, "[B, T, D]");
  check_like(data, "v", v);
  const c10::SymInt channels = k.sym_size(2);
  check_gate(data, "w", w);
  check_shape(op, "w", w, "[D]", {channels});
  check_gate(data, "u", u);
  check_shape(op, "u", u, "[D]", {channels});
  c10::SymInt sequences = check_cu_seqlens(data, cu_seqlens);
  check_state(data, "state", state, "[N, 3, D]", {sequences, 3, channels});
  return sequences;
}

void check_step(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k, const at::Tensor& v,
                const at::Tensor& state) {
  const Reference data{"wkv4_step", "k", k};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 2, "[B, D]");
  check_like(data, "v", v);
  const auto sizes = k.sym_sizes();
  check_gate(data, "w", w);
  check_shape(data.op, "w", w, "[D]", {sizes[1]});
  check_gate(data, "u", u);
  check_shape(data.op, "u", u, "[D]", {sizes[1]});
  check_gate(data, "state", state);
  check_shape(data.op, "state", state, "[B, 3, D]", {sizes[0], 3, sizes[1]});
}

c10::SymInt check_backward(const at::Tensor& d_o, const OptionalTensor& dfinal_state,
                           const at::Tensor& w, const at::Tensor& u, const at::Tensor& k,
                           const at::Tensor& v, const OptionalTensor& state,
                           const at::Tensor& final_state, const at::Tensor& saved,
                           const OptionalTensor& cu_seqlens) {
  const Reference data{"wkv4_backward", "k", k};
  c10::SymInt sequences = check_arguments(data.op, w, u, k, v, state, cu_seqlens);
  const c10::SymInt channels = k.sym_size(2);
  check_like(data, "do", d_o);
  check_state(data, "dfinal_state", dfinal_state, "[N, 3, D]", {sequences, 3, channels});
  check_state(data, "final_state", final_state, "[N, 3, D]", {sequences, 3, channels});
  check_state(data, "saved", saved, "[B, T / 8 + 1, 3, D]",
              {k.sym_size(0), k.sym_size(1) / kernels::scan::kWkv4SavedEvery + 1, 3, channels});
  TORCH_CHECK(saved.scalar_type() == state_dtype(k.scalar_type()),
              "wkv4_backward: saved must be of the state's dtype, ", state_dtype(k.scalar_type()),
              ", got ", saved.scalar_type());
  return sequences;
}

/// In debug mode: no rate is below 0 (or NaN).
void check_rates(const char* op, const at::Tensor& w) {
  if (!debug_checks_enabled() || is_capturing(w.device()) || w.numel() == 0) {
    return;
  }
  TORCH_CHECK(w.ge(0).all().item<bool>(), op, ": w must be at least 0, got values down to ",
              w.min().item<double>());
}

// ---- CPU and CUDA ----

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor w, u, k, v, state, cu_seqlens;

  KernelInputs(const at::Tensor& rate, const at::Tensor& bonus, const at::Tensor& key,
               const at::Tensor& value, const OptionalTensor& given, const OptionalTensor& offsets)
      : w(contiguous_as(rate, state_dtype(key.scalar_type()))),
        u(contiguous_as(bonus, state_dtype(key.scalar_type()))),
        k(in_rows(key)),
        v(in_rows(value)),
        state(contiguous_as(given, state_dtype(key.scalar_type()))),
        cu_seqlens(is_given(offsets) ? offsets->contiguous() : at::Tensor()) {}

  Wkv4Params params() const {
    Wkv4Params params;
    params.layout = sequence_layout(k, cu_seqlens, /*reverse=*/false);
    params.channels = k.size(2);
    params.k = time_series(k);
    params.v = time_series(v);
    params.w = w.data_ptr();
    params.u = u.data_ptr();
    params.state = data_or_null(state);
    return params;
  }
};

at::Tensor empty_saved(const at::Tensor& k) {
  return at::empty({k.size(0), kernels::scan::wkv4_saved_rows(k.size(1)), 3, k.size(2)},
                   k.options().dtype(state_dtype(k.scalar_type())));
}

/// Writes `o` [B, T, D], `final_state` [N, 3, D], which may be `inputs.state` when T = 1, and
/// `saved` where defined.
void run_forward(const char* op, const KernelInputs& inputs, const at::Tensor& o,
                 const at::Tensor& final_state, const at::Tensor& saved) {
  Wkv4Params params = inputs.params();
  params.o = time_series(o);
  params.final_state = final_state.data_ptr();
  params.saved = data_or_null(saved);
  Launch<Wkv4Params>(op, kForward, &params, o).run();
}

/// o and the final state; where `saved` is given, it becomes what wkv4_backward needs.
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& w, const at::Tensor& u,
                                           const at::Tensor& k, const at::Tensor& v,
                                           const OptionalTensor& state,
                                           const OptionalTensor& cu_seqlens, at::Tensor* saved) {
  const int64_t sequences =
      check_arguments("wkv4", w, u, k, v, state, cu_seqlens).guard_int(__FILE__, __LINE__);
  check_cu_seqlens_values({"wkv4", "k", k}, cu_seqlens);
  check_rates("wkv4", w);
  at::Tensor o = at::empty(k.sizes(), k.options());
  at::Tensor final_state =
      at::empty({sequences, 3, k.size(2)}, k.options().dtype(state_dtype(k.scalar_type())));
  if (saved != nullptr) {
    *saved = empty_saved(k);
  }
  run_forward("wkv4", KernelInputs(w, u, k, v, state, cu_seqlens), o, final_state,
              saved != nullptr ? *saved : at::Tensor());
  return {std::move(o), std::move(final_state)};
}

std::tuple<at::Tensor, at::Tensor> forward_kernel(const at::Tensor& w, const at::Tensor& u,
                                                  const at::Tensor& k, const at::Tensor& v,
                                                  const OptionalTensor& state,
                                                  const OptionalTensor& cu_seqlens) {
  return forward(w, u, k, v, state, cu_seqlens, nullptr);
}

/// The same for training: the third result is what wkv4_backward needs.
std::tuple<at::Tensor, at::Tensor, at::Tensor> saving_kernel(
    const at::Tensor& w, const at::Tensor& u, const at::Tensor& k, const at::Tensor& v,
    const OptionalTensor& state, const OptionalTensor& cu_seqlens) {
  at::Tensor saved;
  auto [o, final_state] = forward(w, u, k, v, state, cu_seqlens, &saved);
  return {std::move(o), std::move(final_state), std::move(saved)};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients backward_kernel(const at::Tensor& d_o, const OptionalTensor& dfinal_state,
                          const at::Tensor& w, const at::Tensor& u, const at::Tensor& k,
                          const at::Tensor& v, const OptionalTensor& state,
                          const at::Tensor& final_state, const at::Tensor& saved,
                          const OptionalTensor& cu_seqlens) {
  const int64_t sequences =
      check_backward(d_o, dfinal_state, w, u, k, v, state, final_state, saved, cu_seqlens)
          .guard_int(__FILE__, __LINE__);
  check_cu_seqlens_values({"wkv4_backward", "k", k}, cu_seqlens);
  check_rates("wkv4_backward", w);
  const at::ScalarType wide = state_dtype(k.scalar_type());
  const KernelInputs inputs(w, u, k, v, state, cu_seqlens);
  const at::Tensor do_read = in_rows(d_o);
  const at::Tensor dfinal_state_read = contiguous_as(dfinal_state, wide);
  const at::Tensor final_state_read = contiguous_as(final_state, wide);
  const at::Tensor saved_read = saved.contiguous();
  at::Tensor dk = at::empty(k.sizes(), k.options());
  at::Tensor dv = at::empty(k.sizes(), k.options());
  at::Tensor dstate = at::empty({sequences, 3, k.size(2)}, k.options().dtype(wide));

  Wkv4BackwardParams params;
  params.forward = inputs.params();
  params.forward.final_state = final_state_read.data_ptr();
  params.forward.saved = saved_read.data_ptr();
  params.grad_o = time_series(do_read);
  params.dfinal_state = data_or_null(dfinal_state_read);
  params.dk = time_series(dk);
  params.dv = time_series(dv);
  params.dstate = dstate.data_ptr();
  Launch<Wkv4BackwardParams, Wkv4Params> launch("wkv4_backward", kBackward, &params, dk);
  const at::Tensor dw = launch.partial_sums(wide);
  const at::Tensor du = launch.partial_sums(wide);
  params.dw_partial = dw.data_ptr();
  params.du_partial = du.data_ptr();
  launch.run();
  const std::vector<at::Tensor> sums = sum_rows("wkv4_backward", {dw, du});
  return {sums[0].to(w.scalar_type()), sums[1].to(u.scalar_type()), std::move(dk), std::move(dv),
          is_given(state) ? dstate.to(state->scalar_type()) : dstate};
}

at::Tensor step_kernel(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k,
                       const at::Tensor& v, at::Tensor& state) {
  check_step(w, u, k, v, state);
  check_rates("wkv4_step", w);
  at::Tensor o = at::empty(k.sizes(), k.options());
  const KernelInputs inputs(w, u, k.unsqueeze(1), v.unsqueeze(1), state, {});
  run_forward("wkv4_step", inputs, o.unsqueeze(1), inputs.state, at::Tensor());
  if (!inputs.state.is_same(state)) {
    state.copy_(inputs.state);
  }
  return o;
}

// ---- Meta ----

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& w, const at::Tensor& u,
                                                const at::Tensor& k, const at::Tensor& v,
                                                const OptionalTensor& state,
                                                const OptionalTensor& cu_seqlens) {
  const c10::SymInt sequences = check_arguments("wkv4", w, u, k, v, state, cu_seqlens);
  return {at::empty_symint(k.sym_sizes(), k.options()),
          at::empty_symint({sequences, 3, k.sym_size(2)},
                           k.options().dtype(state_dtype(k.scalar_type())))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> saving_meta(const at::Tensor& w, const at::Tensor& u,
                                                           const at::Tensor& k, const at::Tensor& v,
                                                           const OptionalTensor& state,
                                                           const OptionalTensor& cu_seqlens) {
  auto [o, final_state] = forward_meta(w, u, k, v, state, cu_seqlens);
  const c10::SymInt rows = k.sym_size(1) / kernels::scan::kWkv4SavedEvery + 1;
  return {std::move(o), std::move(final_state),
          at::empty_symint({k.sym_size(0), rows, 3, k.sym_size(2)},
                           k.options().dtype(state_dtype(k.scalar_type())))};
}

Gradients backward_meta(const at::Tensor& d_o, const OptionalTensor& dfinal_state,
                        const at::Tensor& w, const at::Tensor& u, const at::Tensor& k,
                        const at::Tensor& v, const OptionalTensor& state,
                        const at::Tensor& final_state, const at::Tensor& saved,
                        const OptionalTensor& cu_seqlens) {
  const c10::SymInt sequences =
      check_backward(d_o, dfinal_state, w, u, k, v, state, final_state, saved, cu_seqlens);
  const at::ScalarType dstate_type =
      is_given(state) ? state->scalar_type() : state_dtype(k.scalar_type());
  const auto like = [](const at::Tensor& t) {
    return at::empty_symint(t.sym_sizes(), t.options());
  };
  return {like(w), like(u), like(k), like(v),
          at::empty_symint({sequences, 3, k.sym_size(2)}, k.options().dtype(dstate_type))};
}

at::Tensor step_meta(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k,
                     const at::Tensor& v, at::Tensor& state) {
  check_step(w, u, k, v, state);
  return at::empty_symint(k.sym_sizes(), k.options());
}

// ---- Autograd, Autocast ----

class Wkv4Function : public torch::autograd::Function<Wkv4Function> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& w, const at::Tensor& u,
                               const at::Tensor& k, const at::Tensor& v,
                               const OptionalTensor& state, const OptionalTensor& cu_seqlens) {
    ctx->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [o, final_state, saved] =
        call_op<&saving_kernel>("tidegate::wkv4_saving", w, u, k, v, state, cu_seqlens);
    ctx->save_for_backward({w, u, k, v, state.value_or(at::Tensor()),
                            cu_seqlens.value_or(at::Tensor()), final_state, saved});
    return {o, final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& k = saved[2];
    const at::Tensor d_o = gradients[0].defined() ? gradients[0] : at::zeros_like(k);
    auto [dw, du, dk, dv, dstate] = call_op<&backward_kernel>(
        "tidegate::wkv4_backward", d_o, optional(gradients[1]), saved[0], saved[1], k, saved[3],
        optional(saved[4]), saved[6], saved[7], optional(saved[5]));
    return {dw, du, dk, dv, saved[4].defined() ? dstate : at::Tensor(), at::Tensor()};
  }
};

/// Without a gradient to compute, no states are saved.
std::tuple<at::Tensor, at::Tensor> forward_autograd(const at::Tensor& w, const at::Tensor& u,
                                                    const at::Tensor& k, const at::Tensor& v,
                                                    const OptionalTensor& state,
                                                    const OptionalTensor& cu_seqlens) {
  check_given("wkv4", {{"w", w}, {"u", u}, {"k", k}, {"v", v}});
  const at::Tensor given = state.value_or(at::Tensor());
  check_differentiable("wkv4", {w, u, k, v, given});
  if (!asks_for_gradient({w, u, k, v, given})) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_op<&forward_kernel>("tidegate::wkv4", w, u, k, v, state, cu_seqlens);
  }
  const variable_list results = Wkv4Function::apply(w, u, k, v, state, cu_seqlens);
  return {results[0], results[1]};
}

/// What wkv4 calls where there is a gradient to compute; it records none itself.
std::tuple<at::Tensor, at::Tensor, at::Tensor> saving_autograd(
    const at::Tensor& w, const at::Tensor& u, const at::Tensor& k, const at::Tensor& v,
    const OptionalTensor& state, const OptionalTensor& cu_seqlens) {
  TORCH_CHECK(!asks_for_gradient({w, u, k, v, state.value_or(at::Tensor())}),
              "wkv4_saving: an argument requires a gradient, but this op records none; call wkv4");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_op<&saving_kernel>("tidegate::wkv4_saving", w, u, k, v, state, cu_seqlens);
}

/// k and v go to autocast's type; w and u keep fp32, as does the state.
std::tuple<at::Tensor, at::Tensor> forward_autocast(const at::Tensor& w, const at::Tensor& u,
                                                    const at::Tensor& k, const at::Tensor& v,
                                                    const OptionalTensor& state,
                                                    const OptionalTensor& cu_seqlens) {
  const AutocastGuard autocast(k.device());
  return call_op<&forward_kernel>("tidegate::wkv4", autocast.cast_unless_float(w),
                                  autocast.cast_unless_float(u), autocast.cast(k), autocast.cast(v),
                                  state, cu_seqlens);
}

at::Tensor step_autocast(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k,
                         const at::Tensor& v, at::Tensor& state) {
  const AutocastGuard autocast(k.device());
  return call_op<&step_kernel>("tidegate::wkv4_step", autocast.cast_unless_float(w),
                               autocast.cast_unless_float(u), autocast.cast(k), autocast.cast(v),
                               state);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m,
            "wkv4(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? state=None, "
            "Tensor? cu_seqlens=None) -> (Tensor, Tensor)");
  register_kernels<&forward_kernel, &forward_meta>(m, "wkv4");
  register_autograd<&forward_autograd>(m, "wkv4");
  register_autocast<&forward_autocast>(m, "wkv4");

  define_op(m,
            "wkv4_saving(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? state=None, "
            "Tensor? cu_seqlens=None) -> (Tensor, Tensor, Tensor)");
  register_kernels<&saving_kernel, &saving_meta>(m, "wkv4_saving");
  register_autograd<&saving_autograd>(m, "wkv4_saving");

  define_op(m,
            "wkv4_backward(Tensor do, Tensor? dfinal_state, Tensor w, Tensor u, Tensor k, "
            "Tensor v, Tensor? state, Tensor final_state, Tensor saved, Tensor? cu_seqlens) -> "
            "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  register_kernels<&backward_kernel, &backward_meta>(m, "wkv4_backward");
  register_no_double_backward(m, "wkv4_backward");

  define_op(m, "wkv4_step(Tensor w, Tensor u, Tensor k, Tensor v, Tensor(a!) state) -> Tensor");
  register_kernels<&step_kernel, &step_meta>(m, "wkv4_step");
  register_step(m, "wkv4_step");
  register_autocast<&step_autocast>(m, "wkv4_step");
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> wkv4(const at::Tensor& w, const at::Tensor& u,
                                        const at::Tensor& k, const at::Tensor& v,
                                        const std::optional<at::Tensor>& state,
                                        const std::optional<at::Tensor>& cu_seqlens) {
  ops::check_given("wkv4", {{"w", w}, {"u", u}, {"k", k}, {"v", v}});
  return ops::call_op<&ops::forward_kernel>("tidegate::wkv4", w, u, k, v, state,
                                            ops::offsets_on("wkv4", cu_seqlens, k.device()));
}

at::Tensor wkv4_step(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k,
                     const at::Tensor& v, at::Tensor state) {
  ops::check_given("wkv4_step", {{"w", w}, {"u", u}, {"k", k}, {"v", v}, {"state", state}});
  return ops::call_op<&ops::step_kernel>("tidegate::wkv4_step", w, u, k, v, state);
}

}  // namespace tidegate
