// gated_rnn: schema, checks, dispatch, autograd.

#include "tidegate/ops/gated_rnn.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <tuple>

#include "kernels/rnn/rnn.h"
#include "src/ops/autocast.h"
#include "src/ops/checks.h"
#include "src/ops/gated_rnn_products.h"
#include "src/ops/launch.h"
#include "src/ops/registration.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/rnn/rnn_cuda.h"
#endif

namespace tidegate::ops {
namespace {

using kernels::rnn::GatedRnnBackwardParams;
using kernels::rnn::GatedRnnParams;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

constexpr KernelSet<GatedRnnParams> kForward = {
    &kernels::rnn::gated_rnn_unsupported, &kernels::rnn::gated_rnn_plan_cpu,
    &kernels::rnn::gated_rnn_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::rnn::gated_rnn_forward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::rnn::gated_rnn_forward)};

constexpr KernelSet<GatedRnnBackwardParams, GatedRnnParams> kBackward = {
    &kernels::rnn::gated_rnn_unsupported, &kernels::rnn::gated_rnn_plan_cpu,
    &kernels::rnn::gated_rnn_backward_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::rnn::gated_rnn_backward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::rnn::gated_rnn_backward)};

// ---- checks ----

void check_matrix(const Reference& data, const at::Tensor& w_zh) {
  check_gate(data, "w_zh", w_zh);
  const c10::SymInt width = data.tensor.sym_size(-1);
  check_shape(data.op, "w_zh", w_zh, "[D, D]", {width, width});
}

/// Everything but z and `x` (or `h`, its twin in the backward op) itself; returns N.
c10::SymInt check_arguments(const Reference& data, const at::Tensor& w_zh, const OptionalTensor& h0,
                            const OptionalTensor& cu_seqlens, const OptionalTensor& gamma) {
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 3, "[B, T, D]");
  check_matrix(data, w_zh);
  check_channel_parameter(data, "gamma", gamma, data.tensor.sym_size(2));
  c10::SymInt sequences = check_cu_seqlens(data, cu_seqlens);
  check_state(data, "h0", h0, "[N, D]", {sequences, data.tensor.sym_size(2)});
  return sequences;
}

c10::SymInt check_forward(const char* op, const at::Tensor& z, const at::Tensor& x,
                          const at::Tensor& w_zh, const OptionalTensor& h0,
                          const OptionalTensor& cu_seqlens, const OptionalTensor& gamma) {
  const Reference data{op, "x", x};
  c10::SymInt sequences = check_arguments(data, w_zh, h0, cu_seqlens, gamma);
  check_gate(data, "z", z);
  check_shape(op, "z", z, "[B, T, D]", {x.sym_size(0), x.sym_size(1), x.sym_size(2)}, " like x");
  return sequences;
}

c10::SymInt check_backward(const at::Tensor& dh, const OptionalTensor& dh_final,
                           const at::Tensor& x, const at::Tensor& w_zh, const at::Tensor& logits,
                           const at::Tensor& h, const OptionalTensor& h0, at::ScalarType z_dtype,
                           const OptionalTensor& cu_seqlens, const OptionalTensor& gamma) {
  const Reference data{"gated_rnn_backward", "h", h};
  c10::SymInt sequences = check_arguments(data, w_zh, h0, cu_seqlens, gamma);
  check_like(data, "dh", dh);
  check_like(data, "x", x);
  check_state(data, "dh_final", dh_final, "[N, D]", {sequences, h.sym_size(2)});
  const at::ScalarType wide = state_dtype(h.scalar_type());
  check_device(data, "logits", logits);
  check_shape(data.op, "logits", logits, "[B, T, D]", {h.sym_size(0), h.sym_size(1), h.sym_size(2)},
              " like h");
  TORCH_CHECK(logits.scalar_type() == wide, data.op, ": logits must be ",
              c10::getDtypeNames(wide).first, ", got ",
              c10::getDtypeNames(logits.scalar_type()).first);
  TORCH_CHECK(z_dtype == h.scalar_type() || z_dtype == at::kFloat, data.op, ": z_dtype must be ",
              c10::getDtypeNames(h.scalar_type()).first, " like h or float32, got ",
              c10::getDtypeNames(z_dtype).first);
  return sequences;
}

/// Whose values are readable without waiting for a device, or where debugging pays for that.
void check_values(const Reference& data, const OptionalTensor& cu_seqlens,
                  const OptionalTensor& gamma) {
  check_cu_seqlens_values(data, cu_seqlens);
  check_bound_values(data, "gamma", gamma);
}

void check_step(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                const at::Tensor& state, const OptionalTensor& gamma) {
  const Reference data{"gated_rnn_step", "x", x};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 2, "[B, D]");
  check_gate(data, "z", z);
  check_shape(data.op, "z", z, "[B, D]", {x.sym_size(0), x.sym_size(1)}, " like x");
  check_matrix(data, w_zh);
  check_channel_parameter(data, "gamma", gamma, x.sym_size(1));
  check_gate(data, "state", state);
  check_shape(data.op, "state", state, "[B, D]", {x.sym_size(0), x.sym_size(1)});
}

// ---- CPU and CUDA ----

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor w, h0, cu_seqlens, gamma;
  bool w_is_16_bit;

  KernelInputs(const at::Tensor& data, const at::Tensor& w_zh, const OptionalTensor& state,
               const OptionalTensor& offsets, const OptionalTensor& bound)
      : w(contiguous_as(w_zh, state_dtype(data.scalar_type()))),
        h0(contiguous_as(state, state_dtype(data.scalar_type()))),
        cu_seqlens(is_given(offsets) ? offsets->contiguous() : at::Tensor()),
        gamma(contiguous_as(bound, state_dtype(data.scalar_type()))),
        w_is_16_bit(w_zh.element_size() == 2) {}

  GatedRnnParams params(const at::Tensor& data) const {
    GatedRnnParams params;
    params.layout = sequence_layout(data, cu_seqlens, /*reverse=*/false);
    params.channels = data.size(2);
    params.w = w.data_ptr();
    params.w_is_16_bit = w_is_16_bit;
    params.h0 = data_or_null(h0);
    params.gamma = data_or_null(gamma);
    return params;
  }
};

using Results = GatedRnnResults;

void run_forward(const char* op, const at::Tensor& gate, const at::Tensor& data,
                 const KernelInputs& inputs, const Results& results) {
  const at::Tensor z = gate_in_rows(gate, data.scalar_type());
  const at::Tensor x = in_rows(data);
  GatedRnnParams params = inputs.params(x);
  params.z = time_series(z);
  params.x = time_series(x);
  params.h = time_series(results.h);
  params.h_final = results.h_final.data_ptr();
  if (results.logits.defined()) {
    params.logits = time_series(results.logits);
  }
  Launch<GatedRnnParams> launch(op, kForward, &params, results.h);
  if (launch.plan().by_products) {
    walk_by_products(z, x, inputs.w, inputs.gamma, inputs.h0, results);
  } else {
    launch.run();
  }
}

Results forward_results(const char* op, const at::Tensor& z, const at::Tensor& x,
                        const at::Tensor& w_zh, const OptionalTensor& h0,
                        const OptionalTensor& cu_seqlens, const OptionalTensor& gamma,
                        bool keep_logits) {
  const int64_t sequences =
      check_forward(op, z, x, w_zh, h0, cu_seqlens, gamma).guard_int(__FILE__, __LINE__);
  check_values({op, "x", x}, cu_seqlens, gamma);
  const at::TensorOptions wide = x.options().dtype(state_dtype(x.scalar_type()));
  Results results;
  results.h = at::empty(x.sizes(), x.options());
  results.h_final = at::empty({sequences, x.size(2)}, wide);
  if (keep_logits) {
    results.logits = at::empty(x.sizes(), wide);
  }
  run_forward(op, z, x, KernelInputs(x, w_zh, h0, cu_seqlens, gamma), results);
  return results;
}

TwoTensors forward_kernel(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                          const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                          const OptionalTensor& gamma) {
  const Results results = forward_results("gated_rnn", z, x, w_zh, h0, cu_seqlens, gamma, false);
  return {results.h, results.h_final};
}

ThreeTensors with_logits_kernel(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                                const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                                const OptionalTensor& gamma) {
  const Results results =
      forward_results("gated_rnn_with_logits", z, x, w_zh, h0, cu_seqlens, gamma, true);
  return {results.h, results.h_final, results.logits};
}

/// Tokens of a product with float32 sums, whose roundings add up: more are several products.
constexpr int64_t kTokensAProduct = int64_t{1} << 22;

/// dW = sum over tokens of da_t h_{t-1}^T, in one product as a rule.
at::Tensor matrix_gradient(const at::Tensor& dz, const at::Tensor& h_before, const at::Tensor& w) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType data = h_before.scalar_type();
  const at::ScalarType wide = state_dtype(data);
  const at::Tensor da = dz.flatten(0, 1);
  const at::Tensor h = h_before.flatten(0, 1);
  if (h.is_cuda() && wide != data) {  // 16-bit products with float32 sums
    if (h.size(0) <= kTokensAProduct) {
      const at::Tensor narrow = da.to(data).t();
      return w.scalar_type() == data ? at::mm(narrow, h) : at::mm(narrow, h, wide);
    }
    at::Tensor sum = at::zeros_like(w, wide);
    for (int64_t begin = 0; begin < h.size(0); begin += kTokensAProduct) {
      const int64_t tokens = std::min(kTokensAProduct, h.size(0) - begin);
      sum.add_(at::mm(da.narrow(0, begin, tokens).to(data).t(), h.narrow(0, begin, tokens), wide));
    }
    return sum.to(w.scalar_type());
  }
  return at::mm(da.to(wide).t(), h.to(wide)).to(w.scalar_type());
}

/// Of z, x, w_zh, h0 and gamma; the last one is a [0] tensor where there is no gamma.
FiveTensors backward_kernel(const at::Tensor& dh, const OptionalTensor& dh_final,
                            const at::Tensor& x, const at::Tensor& w_zh, const at::Tensor& logits,
                            const at::Tensor& h, const OptionalTensor& h0, at::ScalarType z_dtype,
                            const OptionalTensor& cu_seqlens, const OptionalTensor& gamma) {
  const int64_t sequences =
      check_backward(dh, dh_final, x, w_zh, logits, h, h0, z_dtype, cu_seqlens, gamma)
          .guard_int(__FILE__, __LINE__);
  check_values({"gated_rnn_backward", "h", h}, cu_seqlens, gamma);
  const at::ScalarType wide = state_dtype(h.scalar_type());
  const KernelInputs inputs(h, w_zh, h0, cu_seqlens, gamma);
  const at::Tensor x_read = in_rows(x);
  const at::Tensor h_read = h.contiguous();
  const at::Tensor logits_read = logits.contiguous();
  const at::Tensor dh_read = in_rows(dh);
  const at::Tensor dh_final_read = contiguous_as(dh_final, wide);
  // The kernels know the data's type and the state's: beside float64, z may be narrower than both.
  const at::ScalarType written = z_dtype == wide ? wide : h.scalar_type();
  const at::Tensor dz = at::empty(h.sizes(), h.options().dtype(written));
  const at::Tensor dx = at::empty(h.sizes(), h.options());
  const at::Tensor h_before = at::empty(h.sizes(), h.options());
  const at::Tensor dh0 = at::empty({sequences, h.size(2)}, h.options().dtype(wide));

  GatedRnnBackwardParams params;
  params.forward = inputs.params(h_read);
  params.forward.z = time_series(dz);  // of it only the type counts here
  params.forward.x = time_series(x_read);
  params.forward.h = time_series(h_read);
  params.forward.logits = time_series(logits_read);
  params.dh = time_series(dh_read);
  params.dh_final = data_or_null(dh_final_read);
  params.dz = time_series(dz);
  params.dx = time_series(dx);
  params.h_before = time_series(h_before);
  params.dh0 = dh0.data_ptr();
  Launch<GatedRnnBackwardParams, GatedRnnParams> launch("gated_rnn_backward", kBackward, &params,
                                                        dx);
  const at::Tensor bound_grads = is_given(gamma) ? launch.partial_sums(wide) : at::Tensor();
  params.dgamma_partial = data_or_null(bound_grads);
  if (launch.plan().by_products) {
    walk_back_by_products(dh_read, dh_final_read, x_read, inputs.w, inputs.gamma, logits_read,
                          h_read, inputs.h0, {dz, dx, h_before, dh0, bound_grads});
  } else {
    launch.run();
  }
  return {dz.to(z_dtype), dx, matrix_gradient(dz, h_before, w_zh),
          is_given(h0) ? dh0.to(h0->scalar_type()) : dh0,
          is_given(gamma)
              ? sum_rows("gated_rnn_backward", {bound_grads})[0].to(gamma->scalar_type())
              : at::empty({0}, h.options().dtype(wide))};
}

at::Tensor step_kernel(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                       at::Tensor& state, const OptionalTensor& gamma) {
  check_step(z, x, w_zh, state, gamma);
  check_values({"gated_rnn_step", "x", x}, {}, gamma);
  at::Tensor h = at::empty(x.sizes(), x.options());
  const KernelInputs inputs(x, w_zh, state, {}, gamma);
  run_forward("gated_rnn_step", z.unsqueeze(1), x.unsqueeze(1), inputs,
              {h.unsqueeze(1), inputs.h0, {}});
  if (!inputs.h0.is_same(state)) {
    state.copy_(inputs.h0);
  }
  return h;
}

// ---- Meta ----

Results meta_results(const char* op, const at::Tensor& z, const at::Tensor& x,
                     const at::Tensor& w_zh, const OptionalTensor& h0,
                     const OptionalTensor& cu_seqlens, const OptionalTensor& gamma) {
  const c10::SymInt sequences = check_forward(op, z, x, w_zh, h0, cu_seqlens, gamma);
  const at::TensorOptions wide = x.options().dtype(state_dtype(x.scalar_type()));
  return {at::empty_symint(x.sym_sizes(), x.options()),
          at::empty_symint({sequences, x.sym_size(2)}, wide),
          at::empty_symint(x.sym_sizes(), wide)};
}

TwoTensors forward_meta(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                        const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                        const OptionalTensor& gamma) {
  const Results results = meta_results("gated_rnn", z, x, w_zh, h0, cu_seqlens, gamma);
  return {results.h, results.h_final};
}

ThreeTensors with_logits_meta(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                              const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                              const OptionalTensor& gamma) {
  const Results results = meta_results("gated_rnn_with_logits", z, x, w_zh, h0, cu_seqlens, gamma);
  return {results.h, results.h_final, results.logits};
}

FiveTensors backward_meta(const at::Tensor& dh, const OptionalTensor& dh_final, const at::Tensor& x,
                          const at::Tensor& w_zh, const at::Tensor& logits, const at::Tensor& h,
                          const OptionalTensor& h0, at::ScalarType z_dtype,
                          const OptionalTensor& cu_seqlens, const OptionalTensor& gamma) {
  const c10::SymInt sequences =
      check_backward(dh, dh_final, x, w_zh, logits, h, h0, z_dtype, cu_seqlens, gamma);
  const auto wide = h.options().dtype(state_dtype(h.scalar_type()));
  return {at::empty_symint(h.sym_sizes(), h.options().dtype(z_dtype)),
          at::empty_symint(h.sym_sizes(), h.options()),
          at::empty_symint(w_zh.sym_sizes(), w_zh.options()),
          at::empty_symint({sequences, h.sym_size(2)}, is_given(h0) ? h0->options() : wide),
          is_given(gamma) ? at::empty_symint(gamma->sym_sizes(), gamma->options())
                          : at::empty({0}, wide)};
}

at::Tensor step_meta(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                     at::Tensor& state, const OptionalTensor& gamma) {
  check_step(z, x, w_zh, state, gamma);
  return at::empty_symint(x.sym_sizes(), x.options());
}

// ---- Autograd, Autocast ----

class GatedRnnFunction : public torch::autograd::Function<GatedRnnFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& z, const at::Tensor& x,
                               const at::Tensor& w_zh, const OptionalTensor& h0,
                               const OptionalTensor& cu_seqlens, const OptionalTensor& gamma) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["z_dtype"] = static_cast<int64_t>(z.scalar_type());
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [h, h_final, logits] = call_op<&with_logits_kernel>("tidegate::gated_rnn_with_logits", z,
                                                             x, w_zh, h0, cu_seqlens, gamma);
    ctx->mark_non_differentiable({logits});
    const at::Tensor none;
    ctx->save_for_backward(
        {x, w_zh, logits, h, h0.value_or(none), cu_seqlens.value_or(none), gamma.value_or(none)});
    return {h, h_final, logits};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& h = saved[3];
    const at::Tensor dh = gradients[0].defined() ? gradients[0] : at::zeros_like(h);
    const auto z_dtype = static_cast<at::ScalarType>(ctx->saved_data["z_dtype"].toInt());
    auto [dz, dx, dw, dh0, dgamma] = call_op<&backward_kernel>(
        "tidegate::gated_rnn_backward", dh, optional(gradients[1]), saved[0], saved[1], saved[2], h,
        optional(saved[4]), z_dtype, optional(saved[5]), optional(saved[6]));
    const at::Tensor none;
    return {dz, dx, dw, saved[4].defined() ? dh0 : none, none, saved[6].defined() ? dgamma : none};
  }
};

/// The gate's logits are kept for a backward pass only where there can be one.
TwoTensors forward_autograd(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                            const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                            const OptionalTensor& gamma) {
  check_given("gated_rnn", {{"z", z}, {"x", x}, {"w_zh", w_zh}});
  const at::Tensor none, state = h0.value_or(none), bound = gamma.value_or(none);
  check_differentiable("gated_rnn", {z, x, w_zh, state, bound});
  if (!asks_for_gradient({z, x, w_zh, state, bound})) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_op<&forward_kernel>("tidegate::gated_rnn", z, x, w_zh, h0, cu_seqlens, gamma);
  }
  const variable_list results = GatedRnnFunction::apply(z, x, w_zh, h0, cu_seqlens, gamma);
  return {results[0], results[1]};
}

ThreeTensors with_logits_autograd(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                                  const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                                  const OptionalTensor& gamma) {
  check_given("gated_rnn_with_logits", {{"z", z}, {"x", x}, {"w_zh", w_zh}});
  const at::Tensor none;
  check_differentiable("gated_rnn_with_logits",
                       {z, x, w_zh, h0.value_or(none), gamma.value_or(none)});
  const variable_list results = GatedRnnFunction::apply(z, x, w_zh, h0, cu_seqlens, gamma);
  return {results[0], results[1], results[2]};
}

/// z and x go to autocast's type. The kernels hold the matrix in fp32 anyway, so that one keeps its
/// digits, as states and bounds do.
TwoTensors forward_autocast(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                            const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                            const OptionalTensor& gamma) {
  const AutocastGuard autocast(x.device());
  return call_op<&forward_kernel>("tidegate::gated_rnn", autocast.cast(z), autocast.cast(x),
                                  autocast.cast_unless_float(w_zh), h0, cu_seqlens, gamma);
}

ThreeTensors with_logits_autocast(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                                  const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                                  const OptionalTensor& gamma) {
  const AutocastGuard autocast(x.device());
  return call_op<&with_logits_kernel>("tidegate::gated_rnn_with_logits", autocast.cast(z),
                                      autocast.cast(x), autocast.cast_unless_float(w_zh), h0,
                                      cu_seqlens, gamma);
}

at::Tensor step_autocast(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                         at::Tensor& state, const OptionalTensor& gamma) {
  const AutocastGuard autocast(x.device());
  return call_op<&step_kernel>("tidegate::gated_rnn_step", autocast.cast(z), autocast.cast(x),
                               autocast.cast_unless_float(w_zh), state, gamma);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m,
            "gated_rnn(Tensor z, Tensor x, Tensor w_zh, Tensor? h0=None, "
            "Tensor? cu_seqlens=None, Tensor? gamma=None) -> (Tensor, Tensor)");
  register_kernels<&forward_kernel, &forward_meta>(m, "gated_rnn");
  register_autograd<&forward_autograd>(m, "gated_rnn");
  register_autocast<&forward_autocast>(m, "gated_rnn");

  define_op(m,
            "gated_rnn_with_logits(Tensor z, Tensor x, Tensor w_zh, Tensor? h0=None, "
            "Tensor? cu_seqlens=None, Tensor? gamma=None) -> (Tensor, Tensor, Tensor)");
  register_kernels<&with_logits_kernel, &with_logits_meta>(m, "gated_rnn_with_logits");
  register_autograd<&with_logits_autograd>(m, "gated_rnn_with_logits");
  register_autocast<&with_logits_autocast>(m, "gated_rnn_with_logits");

  define_op(m,
            "gated_rnn_backward(Tensor dh, Tensor? dh_final, Tensor x, Tensor w_zh, Tensor logits, "
            "Tensor h, Tensor? h0, ScalarType z_dtype, Tensor? cu_seqlens, Tensor? gamma=None) -> "
            "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  register_kernels<&backward_kernel, &backward_meta>(m, "gated_rnn_backward");
  register_no_double_backward(m, "gated_rnn_backward");

  define_op(m,
            "gated_rnn_step(Tensor z, Tensor x, Tensor w_zh, Tensor(a!) state, "
            "Tensor? gamma=None) -> Tensor");
  register_kernels<&step_kernel, &step_meta>(m, "gated_rnn_step");
  register_step(m, "gated_rnn_step");
  register_autocast<&step_autocast>(m, "gated_rnn_step");
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> gated_rnn(const at::Tensor& z, const at::Tensor& x,
                                             const at::Tensor& w_zh,
                                             const std::optional<at::Tensor>& h0,
                                             const std::optional<at::Tensor>& cu_seqlens,
                                             const std::optional<at::Tensor>& gamma) {
  ops::check_given("gated_rnn", {{"z", z}, {"x", x}, {"w_zh", w_zh}});
  return ops::call_op<&ops::forward_kernel>("tidegate::gated_rnn", z, x, w_zh, h0,
                                            ops::offsets_on("gated_rnn", cu_seqlens, x.device()),
                                            gamma);
}

at::Tensor gated_rnn_step(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                          at::Tensor state, const std::optional<at::Tensor>& gamma) {
  ops::check_given("gated_rnn_step", {{"z", z}, {"x", x}, {"w_zh", w_zh}, {"state", state}});
  return ops::call_op<&ops::step_kernel>("tidegate::gated_rnn_step", z, x, w_zh, state, gamma);
}

}  // namespace tidegate
