// gated_rnn: schema, checks, how tensors become the kernels' params. Its step is in
// gated_rnn_step.cpp.

#include "tidegate/ops/gated_rnn.h"

#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/checks.h"
#include "src/ops/gated_rnn.h"
#include "src/ops/kernel_sets.h"
#include "src/ops/op.h"
#include "src/ops/results.h"
#include "src/ops/views.h"

namespace tidegate::ops {

// ---- shared with the step ----

void check_gated_rnn_matrix(const Reference& data, const at::Tensor& w_zh) {
  check_gate(data, "w_zh", w_zh);
  const c10::SymInt width = data.tensor.sym_size(-1);
  check_shape(data.op, "w_zh", w_zh, "[D, D]", {width, width});
}

void check_gated_rnn_values(const Reference& data, const OptionalTensor& cu_seqlens,
                            const OptionalTensor& gamma) {
  check_cu_seqlens_values(data, cu_seqlens);
  check_bound_values(data, "gamma", gamma);
}

kernels::rnn::GatedRnnParams GatedRnnInputs::params(const at::Tensor& data) const {
  kernels::rnn::GatedRnnParams params;
  params.layout = sequence_layout(data, cu_seqlens, /*reverse=*/false);
  params.channels = data.size(2);
  params.w = w.data_ptr();
  params.w_is_16_bit = w_is_16_bit;
  params.h0 = data_or_null(h0);
  params.gamma = data_or_null(gamma);
  return params;
}

void run_gated_rnn(const char* op, const at::Tensor& gate, const at::Tensor& data,
                   const GatedRnnInputs& inputs, const GatedRnnResults& results) {
  const at::Tensor z = gate_in_rows(gate, data.scalar_type());
  const at::Tensor x = in_rows(data);
  kernels::rnn::GatedRnnParams params = inputs.params(x);
  params.z = time_series(z);
  params.x = time_series(x);
  params.h = time_series(results.h);
  params.h_final = results.h_final.data_ptr();
  if (results.logits.defined()) {
    params.logits = time_series(results.logits);
  }
  Launch launch(op, &params, results.h);
  if (launch.plan().by_products) {
    scan_by_products(z, x, inputs.w, inputs.gamma, inputs.h0, results);
  } else {
    launch.run();
  }
}

namespace {

// ---- schemas ----

struct GatedRnn {
  static constexpr std::string_view kSchema =
      "gated_rnn(Tensor z, Tensor x, Tensor w_zh, Tensor? h0=None, "
      "Tensor? cu_seqlens=None, Tensor? gamma=None) -> (Tensor, Tensor)";
  static constexpr std::string_view kData = "x";
  static constexpr auto& kCasts = kGatedRnnCasts;

  const at::Tensor &z, &x, &w_zh;
  const OptionalTensor &h0, &cu_seqlens, &gamma;

  TensorTuple<2> kernel() const;
  TensorTuple<2> meta() const;
};

/// gated_rnn with the gate's logits, which the backward pass needs: gated_rnn calls it where a
/// gradient is asked for.
struct GatedRnnWithLogits {
  static constexpr std::string_view kSchema =
      "gated_rnn_with_logits(Tensor z, Tensor x, Tensor w_zh, Tensor? h0=None, "
      "Tensor? cu_seqlens=None, Tensor? gamma=None) -> (Tensor, Tensor, Tensor)";
  static constexpr std::string_view kResults[] = {"h", "h_final", "logits"};
  static constexpr std::string_view kData = "x";
  static constexpr auto& kCasts = kGatedRnnCasts;

  const at::Tensor &z, &x, &w_zh;
  const OptionalTensor &h0, &cu_seqlens, &gamma;

  TensorTuple<3> kernel() const;
  TensorTuple<3> meta() const;
};

/// The gradients of z, x, w_zh, h0 and gamma.
struct GatedRnnBackward {
  static constexpr std::string_view kSchema =
      "gated_rnn_backward(Tensor dh, Tensor? dh_final, Tensor x, Tensor w_zh, Tensor logits, "
      "Tensor h, Tensor? h0, ScalarType z_dtype, Tensor? cu_seqlens, Tensor? gamma=None) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)";
  static constexpr std::string_view kGradientLike = "h";

  const at::Tensor& dh;
  const OptionalTensor& dh_final;
  const at::Tensor &x, &w_zh, &logits, &h;
  const OptionalTensor& h0;
  at::ScalarType z_dtype;
  const OptionalTensor &cu_seqlens, &gamma;

  TensorTuple<5> kernel() const;
  TensorTuple<5> meta() const;
};

// ---- checks ----

/// What forward and backward read, beside `data`, which is x or h, and z; returns N.
template <class Op>
c10::SymInt check_gated_rnn(const Reference& data, const Op& op) {
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 3, "[B, T, D]");
  check_gated_rnn_matrix(data, op.w_zh);
  check_channel_parameter(data, "gamma", op.gamma, data.tensor.sym_size(2));
  c10::SymInt sequences = check_cu_seqlens(data, op.cu_seqlens);
  check_state(data, "h0", op.h0, "[N, D]", {sequences, data.tensor.sym_size(2)});
  return sequences;
}

// ---- forward ----

/// Both ops are gated_rnn to those who call them, whether a gradient is recorded or not.
constexpr const char* kForwardName = kOpName<GatedRnn>;

template <class Op>
GatedRnnResults gated_rnn_meta(const Op& op) {
  const Reference data{kForwardName, "x", op.x};
  const c10::SymInt sequences = check_gated_rnn(data, op);
  const auto sizes = op.x.sym_sizes();
  check_gate(data, "z", op.z);
  check_shape(data.op, "z", op.z, "[B, T, D]", {sizes[0], sizes[1], sizes[2]}, " like x");
  GatedRnnResults results{new_like(op.x), new_state(op.x, {sequences, sizes[2]}), {}};
  if constexpr (std::is_same_v<Op, GatedRnnWithLogits>) {
    results.logits = new_state(op.x, {sizes[0], sizes[1], sizes[2]});
  }
  return results;
}

template <class Op>
GatedRnnResults gated_rnn_kernel(const Op& op) {
  GatedRnnResults results = gated_rnn_meta(op);
  check_gated_rnn_values({kForwardName, "x", op.x}, op.cu_seqlens, op.gamma);
  run_gated_rnn(kForwardName, op.z, op.x, GatedRnnInputs(op, op.x.scalar_type()), results);
  return results;
}

TensorTuple<2> without_logits(GatedRnnResults results) {
  return {std::move(results.h), std::move(results.h_final)};
}

TensorTuple<3> with_logits(GatedRnnResults results) {
  return {std::move(results.h), std::move(results.h_final), std::move(results.logits)};
}

TensorTuple<2> GatedRnn::meta() const { return without_logits(gated_rnn_meta(*this)); }
TensorTuple<2> GatedRnn::kernel() const { return without_logits(gated_rnn_kernel(*this)); }
TensorTuple<3> GatedRnnWithLogits::meta() const { return with_logits(gated_rnn_meta(*this)); }
TensorTuple<3> GatedRnnWithLogits::kernel() const { return with_logits(gated_rnn_kernel(*this)); }

// ---- backward ----

c10::SymInt check_gated_rnn_backward(const GatedRnnBackward& op) {
  const at::Tensor& h = op.h;
  const Reference data{kOpName<GatedRnnBackward>, "h", h};
  c10::SymInt sequences = check_gated_rnn(data, op);
  check_like(data, "dh", op.dh);
  check_like(data, "x", op.x);
  check_state(data, "dh_final", op.dh_final, "[N, D]", {sequences, h.sym_size(2)});
  const at::ScalarType wide = state_dtype(h.scalar_type());
  check_device(data, "logits", op.logits);
  check_shape(data.op, "logits", op.logits, "[B, T, D]",
              {h.sym_size(0), h.sym_size(1), h.sym_size(2)}, " like h");
  TORCH_CHECK(op.logits.scalar_type() == wide, data.op, ": logits must be ", dtype_name(wide),
              ", got ", dtype_name(op.logits.scalar_type()));
  TORCH_CHECK(op.z_dtype == h.scalar_type() || op.z_dtype == at::kFloat, data.op,
              ": z_dtype must be ", dtype_name(h.scalar_type()), " like h or float32, got ",
              dtype_name(op.z_dtype));
  return sequences;
}

TensorTuple<5> GatedRnnBackward::meta() const {
  const c10::SymInt sequences = check_gated_rnn_backward(*this);
  return {new_like(h, z_dtype), new_like(h), new_like(w_zh),
          new_state_gradient(h0, h, {sequences, h.sym_size(2)}), new_gradient(gamma, h)};
}

TensorTuple<5> GatedRnnBackward::kernel() const {
  constexpr const char* kOp = kOpName<GatedRnnBackward>;
  const c10::SymInt sequences = check_gated_rnn_backward(*this);
  check_gated_rnn_values({kOp, "h", h}, cu_seqlens, gamma);
  const at::ScalarType wide = state_dtype(h.scalar_type());
  const GatedRnnInputs inputs(*this, h.scalar_type());
  const at::Tensor x_read = in_rows(x);
  const at::Tensor h_read = h.contiguous();
  const at::Tensor logits_read = logits.contiguous();
  const at::Tensor dh_read = in_rows(dh);
  const at::Tensor dh_final_read = contiguous_as(dh_final, wide);
  // The kernels know the data's type and the state's: beside float64, z may be narrower than both.
  const at::ScalarType written = z_dtype == wide ? wide : h.scalar_type();
  const at::Tensor dz = new_like(h, written);
  const at::Tensor dx = new_like(h);
  const at::Tensor h_before = new_like(h);
  const at::Tensor dh0 = new_state(h, {sequences, h.sym_size(2)});

  kernels::rnn::GatedRnnBackwardParams params;
  params.forward = inputs.params(h_read);
  params.forward.z = time_series(dz);  // only its type counts here
  params.forward.x = time_series(x_read);
  params.forward.h = time_series(h_read);
  params.forward.logits = time_series(logits_read);
  params.dh = time_series(dh_read);
  params.dh_final = data_or_null(dh_final_read);
  params.dz = time_series(dz);
  params.dx = time_series(dx);
  params.h_before = time_series(h_before);
  params.dh0 = dh0.data_ptr();
  Launch launch(kOp, &params, dx);
  const at::Tensor bound_grads = launch.partial_sums(wide, is_given(gamma));
  params.dgamma_partial = data_or_null(bound_grads);
  if (launch.plan().by_products) {
    scan_back_by_products(dh_read, dh_final_read, x_read, inputs.w, inputs.gamma, logits_read,
                          h_read, inputs.h0, {dz, dx, h_before, dh0, bound_grads});
  } else {
    launch.run();
  }
  return {dz.to(z_dtype), dx, matrix_gradient(dz, h_before, w_zh), in_type_of(h0, dh0),
          parameter_gradient(gamma, sum_rows(kOp, {bound_grads})[0], h)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<GatedRnn>(m);
  register_op<GatedRnnWithLogits>(m);
  register_backward<GatedRnnBackward>(m);
  register_gradient<GatedRnn, GatedRnnBackward, GatedRnnWithLogits>(m);
  register_gradient<GatedRnnWithLogits, GatedRnnBackward>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> gated_rnn(const at::Tensor& z, const at::Tensor& x,
                                             const at::Tensor& w_zh,
                                             const std::optional<at::Tensor>& h0,
                                             const std::optional<at::Tensor>& cu_seqlens,
                                             const std::optional<at::Tensor>& gamma) {
  return ops::call_public<ops::GatedRnn>(z, x, w_zh, h0, cu_seqlens, gamma);
}

}  // namespace tidegate
