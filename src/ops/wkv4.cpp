// wkv4: schema, checks, how tensors become the kernels' params. Its step is in wkv4_step.cpp.
// The state goes by its own name, not h0: of its three vectors none is an output. The gradient of o
// is `do` in the schema, d_o in C++, where `do` is a keyword, and grad_o in the kernels' params.

#include "tidegate/ops/wkv4.h"

#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/capture.h"
#include "src/ops/checks.h"
#include "src/ops/op.h"
#include "src/ops/results.h"
#include "src/ops/wkv4.h"

namespace tidegate::ops {

void check_wkv4_rates(const char* op, const at::Tensor& w) {
  if (!debug_checks_enabled() || is_capturing(w.device()) || w.numel() == 0) {
    return;
  }
  TORCH_CHECK(w.ge(0).all().item<bool>(), op, ": w must be at least 0, got values down to ",
              w.min().item<double>());
}

namespace {

// ---- schemas ----

struct Wkv4 {
  static constexpr std::string_view kSchema =
      "wkv4(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? state=None, "
      "Tensor? cu_seqlens=None) -> (Tensor, Tensor)";
  static constexpr std::string_view kData = "k";
  static constexpr auto& kCasts = kWkv4Casts;

  const at::Tensor &w, &u, &k, &v;
  const OptionalTensor &state, &cu_seqlens;

  TensorTuple<2> kernel() const;
  TensorTuple<2> meta() const;
};

/// wkv4 for training: the third result is what wkv4_backward needs. It is called by wkv4 where
/// there is a gradient to compute, and records none itself.
struct Wkv4Saving {
  static constexpr std::string_view kSchema =
      "wkv4_saving(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? state=None, "
      "Tensor? cu_seqlens=None) -> (Tensor, Tensor, Tensor)";
  static constexpr std::string_view kResults[] = {"o", "final_state", "saved"};

  const at::Tensor &w, &u, &k, &v;
  const OptionalTensor &state, &cu_seqlens;

  TensorTuple<3> kernel() const;
  TensorTuple<3> meta() const;
};

/// The gradients of w, u, k, v and state.
struct Wkv4Backward {
  static constexpr std::string_view kSchema =
      "wkv4_backward(Tensor do, Tensor? dfinal_state, Tensor w, Tensor u, Tensor k, "
      "Tensor v, Tensor? state, Tensor final_state, Tensor saved, Tensor? cu_seqlens) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)";
  static constexpr std::string_view kGradientLike = "k";

  const at::Tensor& d_o;
  const OptionalTensor& dfinal_state;
  const at::Tensor &w, &u, &k, &v;
  const OptionalTensor& state;
  const at::Tensor &final_state, &saved;
  const OptionalTensor& cu_seqlens;

  TensorTuple<5> kernel() const;
  TensorTuple<5> meta() const;
};

// ---- checks ----

/// What the forward and the backward pass read; returns N.
template <class Op>
c10::SymInt check_wkv4(const Reference& data, const Op& op) {
  check_wkv4_tensors(data, op, 3, "[B, T, D]");
  c10::SymInt sequences = check_cu_seqlens(data, op.cu_seqlens);
  check_state(data, "state", op.state, "[N, 3, D]", {sequences, 3, op.k.sym_size(2)});
  return sequences;
}

template <class Op>
void check_wkv4_values(const Reference& data, const Op& op) {
  check_cu_seqlens_values(data, op.cu_seqlens);
  check_wkv4_rates(data.op, op.w);
}

// ---- forward ----

/// Both forward ops are called wkv4 in messages.
template <class Op>
TensorTuple<2> wkv4_meta(const Op& op) {
  const c10::SymInt sequences = check_wkv4({kOpName<Wkv4>, "k", op.k}, op);
  return {new_like(op.k), new_state(op.k, {sequences, 3, op.k.sym_size(2)})};
}

TensorTuple<2> Wkv4::meta() const { return wkv4_meta(*this); }

TensorTuple<2> Wkv4::kernel() const {
  auto results = meta();
  check_wkv4_values({kOpName<Wkv4>, "k", k}, *this);
  run_wkv4(kOpName<Wkv4>, *this, std::get<0>(results), std::get<1>(results), at::Tensor());
  return results;
}

c10::SymInt wkv4_saved_rows(const at::Tensor& k) {
  return k.sym_size(1) / kernels::scan::kWkv4SavedEvery + 1;
}

TensorTuple<3> Wkv4Saving::meta() const {
  auto [o, final_state] = wkv4_meta(*this);
  return {std::move(o), std::move(final_state),
          new_state(k, {k.sym_size(0), wkv4_saved_rows(k), 3, k.sym_size(2)})};
}

TensorTuple<3> Wkv4Saving::kernel() const {
  auto results = meta();
  check_wkv4_values({kOpName<Wkv4>, "k", k}, *this);
  const auto& [o, final_state, saved] = results;
  run_wkv4(kOpName<Wkv4>, *this, o, final_state, saved);
  return results;
}

// ---- backward ----

c10::SymInt check_wkv4_backward(const Reference& data, const Wkv4Backward& op) {
  c10::SymInt sequences = check_wkv4(data, op);
  const c10::SymInt channels = op.k.sym_size(2);
  check_like(data, "do", op.d_o);
  check_state(data, "dfinal_state", op.dfinal_state, "[N, 3, D]", {sequences, 3, channels});
  check_state(data, "final_state", op.final_state, "[N, 3, D]", {sequences, 3, channels});
  check_state(data, "saved", op.saved, "[B, T / 8 + 1, 3, D]",
              {op.k.sym_size(0), wkv4_saved_rows(op.k), 3, channels});
  const at::ScalarType wide = state_dtype(op.k.scalar_type());
  TORCH_CHECK(op.saved.scalar_type() == wide, "wkv4_backward: saved must be of the state's dtype, ",
              wide, ", got ", op.saved.scalar_type());
  return sequences;
}

TensorTuple<5> Wkv4Backward::meta() const {
  const c10::SymInt sequences = check_wkv4_backward({kOpName<Wkv4Backward>, "k", k}, *this);
  return {new_like(w), new_like(u), new_like(k), new_like(v),
          new_state_gradient(state, k, {sequences, 3, k.sym_size(2)})};
}

TensorTuple<5> Wkv4Backward::kernel() const {
  const Reference data{kOpName<Wkv4Backward>, "k", k};
  const c10::SymInt sequences = check_wkv4_backward(data, *this);
  check_wkv4_values(data, *this);
  const at::ScalarType wide = state_dtype(k.scalar_type());
  const at::Tensor dk = new_like(k), dv = new_like(k),
                   dstate = new_state(k, {sequences, 3, k.sym_size(2)});
  KernelInputs read(k);
  kernels::scan::Wkv4BackwardParams params;
  params.forward = wkv4_params(*this, &read);
  params.forward.final_state = read.state(final_state);
  params.forward.saved = read.state(saved);
  params.grad_o = read.rows(d_o);
  params.dfinal_state = read.state(dfinal_state);
  params.dk = time_series(dk);
  params.dv = time_series(dv);
  params.dstate = dstate.data_ptr();
  Launch launch(data.op, &params, dk);
  const at::Tensor dw = launch.partial_sums(wide);
  const at::Tensor du = launch.partial_sums(wide);
  params.dw_partial = dw.data_ptr();
  params.du_partial = du.data_ptr();
  launch.run();
  const std::vector<at::Tensor> sums = sum_rows(data.op, {dw, du});
  return {in_type_of(w, sums[0]), in_type_of(u, sums[1]), dk, dv, in_type_of(state, dstate)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<Wkv4>(m);
  register_op<Wkv4Saving>(m);
  register_no_gradient(m, kOpName<Wkv4Saving>);
  register_backward<Wkv4Backward>(m);
  register_gradient<Wkv4, Wkv4Backward, Wkv4Saving>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> wkv4(const at::Tensor& w, const at::Tensor& u,
                                        const at::Tensor& k, const at::Tensor& v,
                                        const std::optional<at::Tensor>& state,
                                        const std::optional<at::Tensor>& cu_seqlens) {
  return ops::call_public<ops::Wkv4>(w, u, k, v, state, cu_seqlens);
}

}  // namespace tidegate
