// linear_scan: schema, checks, how tensors become the kernels' params.

#include "tidegate/ops/linear_scan.h"

#include <ATen/ops/empty.h>

#include <string>
#include <tuple>

#include "kernels/scan/scan.h"
#include "src/ops/autograd.h"
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
using scan::LinearScanBackwardParams;
using scan::LinearScanParams;

constexpr KernelSet<LinearScanParams> kForward = {
    &scan::linear_scan_unsupported, &scan::linear_scan_plan_cpu, &scan::linear_scan_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&scan::linear_scan_forward_plan),
    TIDEGATE_CUDA_KERNEL(&scan::linear_scan_forward)};

constexpr KernelSet<LinearScanBackwardParams, LinearScanParams> kBackward = {
    &scan::linear_scan_unsupported, &scan::linear_scan_plan_cpu, &scan::linear_scan_backward_cpu,
    TIDEGATE_CUDA_KERNEL(&scan::linear_scan_backward_plan),
    TIDEGATE_CUDA_KERNEL(&scan::linear_scan_backward)};

// ---- schemas ----

/// x goes to autocast's type; a decay near one would lose what makes it differ from one, so a keeps
/// fp32, as do the states.
constexpr CastRule kLinearScanCasts[] = {{"x", Cast::kLower}, {"a", Cast::kUnlessFloat}};

struct LinearScan {
  static constexpr std::string_view kSchema =
      "linear_scan(Tensor x, Tensor a, Tensor? h0=None, bool reverse=False, "
      "Tensor? cu_seqlens=None) -> (Tensor, Tensor)";
  static constexpr std::string_view kResults[] = {"h", "h_final"};
  static constexpr std::string_view kData = "x";
  static constexpr auto& kCasts = kLinearScanCasts;

  const at::Tensor &x, &a;
  const OptionalTensor& h0;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  std::tuple<at::Tensor, at::Tensor> kernel() const;
  std::tuple<at::Tensor, at::Tensor> meta() const;
};

/// The gradients of x, a and h0.
struct LinearScanBackward {
  static constexpr std::string_view kSchema =
      "linear_scan_backward(Tensor dh, Tensor? dh_final, Tensor a, Tensor h, Tensor? h0, "
      "bool reverse, Tensor? cu_seqlens) -> (Tensor, Tensor, Tensor)";
  static constexpr std::string_view kGradientLike = "h";

  const at::Tensor& dh;
  const OptionalTensor& dh_final;
  const at::Tensor &a, &h;
  const OptionalTensor& h0;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  std::tuple<at::Tensor, at::Tensor, at::Tensor> kernel() const;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> meta() const;
};

struct LinearScanStep {
  static constexpr std::string_view kSchema =
      "linear_scan_step(Tensor x, Tensor a, Tensor(a!) state) -> Tensor";
  static constexpr std::string_view kData = "x";
  static constexpr auto& kCasts = kLinearScanCasts;

  const at::Tensor &x, &a;
  at::Tensor& state;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

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

/// Everything that forward and backward read, beside `data`, which is x or h; returns N.
template <class Op>
c10::SymInt check_inputs(const Reference& data, const Op& op) {
  check_data_dtype(data, ComplexData::kAccepted);
  check_rank(data, 3, "[B, T, D]");
  const auto sizes = data.tensor.sym_sizes();
  check_decay_dtype(data, op.a);
  if (op.a.dim() == 1) {
    check_shape(data.op, "a", op.a, "[D]", {sizes[2]});
  } else {
    check_shape(data.op, "a", op.a, "[B, T, D]", {sizes[0], sizes[1], sizes[2]}, like_data(data));
  }
  c10::SymInt sequences = check_cu_seqlens(data, op.cu_seqlens);
  check_state(data, "h0", op.h0, "[N, D]", {sequences, sizes[2]});
  return sequences;
}

// ---- forward ----

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor a, h0, cu_seqlens;

  template <class Op>
  KernelInputs(const Op& op, at::ScalarType data)
      : a(gate_in_rows(op.a, data)),
        h0(contiguous_as(op.h0, state_dtype(data))),
        cu_seqlens(contiguous_or_none(op.cu_seqlens)) {}

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

std::tuple<at::Tensor, at::Tensor> LinearScan::meta() const {
  const c10::SymInt sequences = check_inputs({kOpName<LinearScan>, "x", x}, *this);
  return {new_like(x), new_state(x, {sequences, x.sym_size(2)})};
}

std::tuple<at::Tensor, at::Tensor> LinearScan::kernel() const {
  auto results = meta();
  check_cu_seqlens_values({kOpName<LinearScan>, "x", x}, cu_seqlens);
  const auto& [h, h_final] = results;
  run_forward(kOpName<LinearScan>, x, KernelInputs(*this, x.scalar_type()), reverse, h, h_final);
  return results;
}

// ---- backward ----

c10::SymInt check_backward(const LinearScanBackward& op) {
  const Reference data{kOpName<LinearScanBackward>, "h", op.h};
  c10::SymInt sequences = check_inputs(data, op);
  check_like(data, "dh", op.dh);
  check_state(data, "dh_final", op.dh_final, "[N, D]", {sequences, op.h.sym_size(2)});
  return sequences;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> LinearScanBackward::meta() const {
  const c10::SymInt sequences = check_backward(*this);
  return {new_like(h), new_like(a), new_state_gradient(h0, h, {sequences, h.sym_size(2)})};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> LinearScanBackward::kernel() const {
  constexpr const char* kOp = kOpName<LinearScanBackward>;
  const c10::SymInt sequences = check_backward(*this);
  check_cu_seqlens_values({kOp, "h", h}, cu_seqlens);
  const at::ScalarType wide = state_dtype(h.scalar_type());
  const KernelInputs inputs(*this, h.scalar_type());
  const at::Tensor h_read = in_rows(h);
  const at::Tensor dh_read = in_rows(dh);
  const at::Tensor dh_final_read = contiguous_as(dh_final, wide);
  const at::Tensor dx = new_like(h);
  const at::Tensor dh0 = new_state(h, {sequences, h.sym_size(2)});

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
  Launch<LinearScanBackwardParams, LinearScanParams> launch(kOp, kBackward, &params, dx);
  if (params.forward.a_is_constant) {
    da = launch.partial_sums(wide);
    params.da_partial = da.data_ptr();
  }
  launch.run();
  if (params.forward.a_is_constant) {
    da = sum_rows(kOp, {da})[0];
  }
  return {dx, in_type_of(a, da), in_type_of(h0, dh0)};
}

// ---- step ----

at::Tensor LinearScanStep::meta() const {
  const Reference data{kOpName<LinearScanStep>, "x", x};
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
  return new_like(x);
}

at::Tensor LinearScanStep::kernel() const {
  at::Tensor h = meta();
  const at::Tensor token = x.unsqueeze(1), decay = a.dim() == 1 ? a : a.unsqueeze(1);
  const OptionalTensor given = state, padded;
  const LinearScan op{token, decay, given, /*reverse=*/false, padded};
  const KernelInputs inputs(op, x.scalar_type());
  run_forward(kOpName<LinearScanStep>, token, inputs, op.reverse, h.unsqueeze(1), inputs.h0);
  write_back(inputs.h0, state);
  return h;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<LinearScan>(m);
  register_backward<LinearScanBackward>(m);
  register_gradient<LinearScan, LinearScanBackward>(m);
  register_step<LinearScanStep>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> linear_scan(const at::Tensor& x, const at::Tensor& a,
                                               const std::optional<at::Tensor>& h0, bool reverse,
                                               const std::optional<at::Tensor>& cu_seqlens) {
  return ops::call_public<ops::LinearScan>(x, a, h0, reverse, cu_seqlens);
}

at::Tensor linear_scan_step(const at::Tensor& x, const at::Tensor& a, at::Tensor state) {
  return ops::call_public<ops::LinearScanStep>(x, a, state);
}

}  // namespace tidegate
