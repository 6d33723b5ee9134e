// wkv4: schema, checks, how tensors become the kernels' params.
// The state goes by its own name, not h0: of its three vectors none is an output. The gradient of o
// is `do` in the schema, d_o in C++, where `do` is a keyword, and grad_o in the kernels' params.

#include "tidegate/ops/wkv4.h"

#include <tuple>

#include "kernels/scan/wkv4.h"
#include "src/ops/autograd.h"
#include "src/ops/capture.h"
#include "src/ops/checks.h"
#include "src/ops/launch.h"
#include "src/ops/op.h"
#include "src/ops/results.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/scan/scan_cuda.h"
#endif

namespace tidegate::ops {
namespace {

namespace scan = kernels::scan;
using scan::Wkv4BackwardParams;
using scan::Wkv4Params;

constexpr KernelSet<Wkv4Params> kForward = {
    &scan::wkv4_unsupported, &scan::wkv4_plan_cpu, &scan::wkv4_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&scan::wkv4_forward_plan), TIDEGATE_CUDA_KERNEL(&scan::wkv4_forward)};

constexpr KernelSet<Wkv4BackwardParams, Wkv4Params> kBackward = {
    &scan::wkv4_unsupported, &scan::wkv4_plan_cpu, &scan::wkv4_backward_cpu,
    TIDEGATE_CUDA_KERNEL(&scan::wkv4_backward_plan), TIDEGATE_CUDA_KERNEL(&scan::wkv4_backward)};

// ---- schemas ----

/// k and v go to autocast's type; w and u keep fp32, as does the state.
constexpr CastRule kWkv4Casts[] = {
    {"w", Cast::kUnlessFloat}, {"u", Cast::kUnlessFloat}, {"k", Cast::kLower}, {"v", Cast::kLower}};

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

struct Wkv4 {
  static constexpr std::string_view kSchema =
      "wkv4(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? state=None, "
      "Tensor? cu_seqlens=None) -> (Tensor, Tensor)";
  static constexpr std::string_view kData = "k";
  static constexpr auto& kCasts = kWkv4Casts;

  const at::Tensor &w, &u, &k, &v;
  const OptionalTensor &state, &cu_seqlens;

  TwoTensors kernel() const;
  TwoTensors meta() const;
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

  ThreeTensors kernel() const;
  ThreeTensors meta() const;
};

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

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

  Gradients kernel() const;
  Gradients meta() const;
};

struct Wkv4Step {
  static constexpr std::string_view kSchema =
      "wkv4_step(Tensor w, Tensor u, Tensor k, Tensor v, Tensor(a!) state) -> Tensor";
  static constexpr std::string_view kData = "k";
  static constexpr auto& kCasts = kWkv4Casts;

  const at::Tensor &w, &u, &k, &v;
  at::Tensor& state;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

// ---- checks ----

/// k, which the others are compared with, then v, w and u of `channels`.
template <class Op>
void check_tensors(const Reference& data, const Op& op, int64_t rank, const char* shape_name) {
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, rank, shape_name);
  check_like(data, "v", op.v);
  const c10::SymInt channels = op.k.sym_sizes().back();
  check_gate(data, "w", op.w);
  check_shape(data.op, "w", op.w, "[D]", {channels});
  check_gate(data, "u", op.u);
  check_shape(data.op, "u", op.u, "[D]", {channels});
}

/// What the forward and the backward pass read; returns N.
template <class Op>
c10::SymInt check_inputs(const Reference& data, const Op& op) {
  check_tensors(data, op, 3, "[B, T, D]");
  c10::SymInt sequences = check_cu_seqlens(data, op.cu_seqlens);
  check_state(data, "state", op.state, "[N, 3, D]", {sequences, 3, op.k.sym_size(2)});
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

template <class Op>
void check_values(const Reference& data, const Op& op) {
  check_cu_seqlens_values(data, op.cu_seqlens);
  check_rates(data.op, op.w);
}

// ---- forward ----

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor w, u, k, v, state, cu_seqlens;

  template <class Op>
  explicit KernelInputs(const Op& op)
      : w(contiguous_as(op.w, state_dtype(op.k.scalar_type()))),
        u(contiguous_as(op.u, state_dtype(op.k.scalar_type()))),
        k(in_rows(op.k)),
        v(in_rows(op.v)),
        state(contiguous_as(op.state, state_dtype(op.k.scalar_type()))),
        cu_seqlens(contiguous_or_none(op.cu_seqlens)) {}

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

/// Both forward ops are called wkv4 in messages.
template <class Op>
TwoTensors forward_meta(const Op& op) {
  const c10::SymInt sequences = check_inputs({kOpName<Wkv4>, "k", op.k}, op);
  return {new_like(op.k), new_state(op.k, {sequences, 3, op.k.sym_size(2)})};
}

/// Fills the results; where `saved` is defined, it becomes what wkv4_backward needs.
template <class Op>
void forward_kernel(const Op& op, const at::Tensor& o, const at::Tensor& final_state,
                    const at::Tensor& saved) {
  check_values({kOpName<Wkv4>, "k", op.k}, op);
  run_forward(kOpName<Wkv4>, KernelInputs(op), o, final_state, saved);
}

TwoTensors Wkv4::meta() const { return forward_meta(*this); }

TwoTensors Wkv4::kernel() const {
  auto results = meta();
  forward_kernel(*this, std::get<0>(results), std::get<1>(results), at::Tensor());
  return results;
}

c10::SymInt saved_rows(const at::Tensor& k) { return k.sym_size(1) / scan::kWkv4SavedEvery + 1; }

ThreeTensors Wkv4Saving::meta() const {
  auto [o, final_state] = forward_meta(*this);
  return {std::move(o), std::move(final_state),
          new_state(k, {k.sym_size(0), saved_rows(k), 3, k.sym_size(2)})};
}

ThreeTensors Wkv4Saving::kernel() const {
  auto results = meta();
  forward_kernel(*this, std::get<0>(results), std::get<1>(results), std::get<2>(results));
  return results;
}

// ---- backward ----

c10::SymInt check_backward(const Reference& data, const Wkv4Backward& op) {
  c10::SymInt sequences = check_inputs(data, op);
  const c10::SymInt channels = op.k.sym_size(2);
  check_like(data, "do", op.d_o);
  check_state(data, "dfinal_state", op.dfinal_state, "[N, 3, D]", {sequences, 3, channels});
  check_state(data, "final_state", op.final_state, "[N, 3, D]", {sequences, 3, channels});
  check_state(data, "saved", op.saved, "[B, T / 8 + 1, 3, D]",
              {op.k.sym_size(0), saved_rows(op.k), 3, channels});
  const at::ScalarType wide = state_dtype(op.k.scalar_type());
  TORCH_CHECK(op.saved.scalar_type() == wide, "wkv4_backward: saved must be of the state's dtype, ",
              wide, ", got ", op.saved.scalar_type());
  return sequences;
}

Gradients Wkv4Backward::meta() const {
  const c10::SymInt sequences = check_backward({kOpName<Wkv4Backward>, "k", k}, *this);
  return {new_like(w), new_like(u), new_like(k), new_like(v),
          new_state_gradient(state, k, {sequences, 3, k.sym_size(2)})};
}

Gradients Wkv4Backward::kernel() const {
  const Reference data{kOpName<Wkv4Backward>, "k", k};
  const c10::SymInt sequences = check_backward(data, *this);
  check_values(data, *this);
  const at::ScalarType wide = state_dtype(k.scalar_type());
  const KernelInputs inputs(*this);
  const at::Tensor do_read = in_rows(d_o);
  const at::Tensor dfinal_state_read = contiguous_as(dfinal_state, wide);
  const at::Tensor final_state_read = contiguous_as(final_state, wide);
  const at::Tensor saved_read = saved.contiguous();
  const at::Tensor dk = new_like(k);
  const at::Tensor dv = new_like(k);
  const at::Tensor dstate = new_state(k, {sequences, 3, k.sym_size(2)});

  Wkv4BackwardParams params;
  params.forward = inputs.params();
  params.forward.final_state = final_state_read.data_ptr();
  params.forward.saved = saved_read.data_ptr();
  params.grad_o = time_series(do_read);
  params.dfinal_state = data_or_null(dfinal_state_read);
  params.dk = time_series(dk);
  params.dv = time_series(dv);
  params.dstate = dstate.data_ptr();
  Launch<Wkv4BackwardParams, Wkv4Params> launch(data.op, kBackward, &params, dk);
  const at::Tensor dw = launch.partial_sums(wide);
  const at::Tensor du = launch.partial_sums(wide);
  params.dw_partial = dw.data_ptr();
  params.du_partial = du.data_ptr();
  launch.run();
  const std::vector<at::Tensor> sums = sum_rows(data.op, {dw, du});
  return {in_type_of(w, sums[0]), in_type_of(u, sums[1]), dk, dv, in_type_of(state, dstate)};
}

// ---- step ----

at::Tensor Wkv4Step::meta() const {
  const Reference data{kOpName<Wkv4Step>, "k", k};
  check_tensors(data, *this, 2, "[B, D]");
  check_gate(data, "state", state);
  check_shape(data.op, "state", state, "[B, 3, D]", {k.sym_size(0), 3, k.sym_size(1)});
  return new_like(k);
}

at::Tensor Wkv4Step::kernel() const {
  at::Tensor o = meta();
  check_rates(kOpName<Wkv4Step>, w);
  const at::Tensor key = k.unsqueeze(1), value = v.unsqueeze(1);
  const OptionalTensor given = state, padded;
  const KernelInputs inputs(Wkv4{w, u, key, value, given, padded});
  run_forward(kOpName<Wkv4Step>, inputs, o.unsqueeze(1), inputs.state, at::Tensor());
  write_back(inputs.state, state);
  return o;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<Wkv4>(m);
  register_op<Wkv4Saving>(m);
  register_no_gradient(m, kOpName<Wkv4Saving>);
  register_backward<Wkv4Backward>(m);
  register_gradient<Wkv4, Wkv4Backward, Wkv4Saving>(m);
  register_step<Wkv4Step>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> wkv4(const at::Tensor& w, const at::Tensor& u,
                                        const at::Tensor& k, const at::Tensor& v,
                                        const std::optional<at::Tensor>& state,
                                        const std::optional<at::Tensor>& cu_seqlens) {
  return ops::call_public<ops::Wkv4>(w, u, k, v, state, cu_seqlens);
}

at::Tensor wkv4_step(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k,
                     const at::Tensor& v, at::Tensor state) {
  return ops::call_public<ops::Wkv4Step>(w, u, k, v, state);
}

}  // namespace tidegate
