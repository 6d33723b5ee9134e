// linear_scan: schema, checks, how tensors become the kernels' params.

#include "tidegate/ops/linear_scan.h"

#include <string>
#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/op.h"
#include "src/ops/scans.h"

namespace tidegate::ops {
namespace {

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

  TensorTuple<2> kernel() const;
  TensorTuple<2> meta() const;
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

  TensorTuple<3> kernel() const;
  TensorTuple<3> meta() const;
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
              " (", data.name, " is ", dtype_name(own), "), got ", dtype_name(given));
}

/// x or h, and a, with or without a time axis.
void check_linear_scan_tensors(const Reference& data, const at::Tensor& a, bool step) {
  check_data_dtype(data, ComplexData::kAccepted);
  check_rank(data, step ? 2 : 3, step ? "[B, D]" : "[B, T, D]");
  const auto sizes = data.tensor.sym_sizes();
  check_decay_dtype(data, a);
  const std::string like = std::string(" like ") + data.name + " (or [D] when constant)";
  if (a.dim() == 1) {
    check_shape(data.op, "a", a, "[D]", {sizes.back()});
  } else if (step) {
    check_shape(data.op, "a", a, "[B, D]", {sizes[0], sizes[1]}, like);
  } else {
    check_shape(data.op, "a", a, "[B, T, D]", {sizes[0], sizes[1], sizes[2]}, like);
  }
}

/// Everything that forward and backward read, beside `data`, which is x or h; returns N.
template <class Op>
c10::SymInt check_linear_scan(const Reference& data, const Op& op) {
  check_linear_scan_tensors(data, op.a, /*step=*/false);
  return check_scan_states(data, op.cu_seqlens, op.h0, /*complex=*/false);
}

// ---- forward ----

/// What both directions read, beside x or h.
template <class Op>
kernels::scan::LinearScanParams linear_scan_params(const at::Tensor& data, const Op& op,
                                                   KernelInputs* read) {
  kernels::scan::LinearScanParams params;
  params.layout = read->layout(data, op.cu_seqlens, op.reverse);
  params.channels = data.size(2);
  params.a_is_constant = op.a.dim() == 1;
  params.a = params.a_is_constant
                 ? constant_series(read->keep(gate_in_rows(op.a, data.scalar_type())))
                 : read->gate(op.a);
  params.h0 = read->state(op.h0);
  return params;
}

/// `h_final` may be the op's h0 when T = 1.
void run_linear_scan(const char* name, const LinearScan& op, const at::Tensor& h,
                     const at::Tensor& h_final) {
  KernelInputs read(op.x);
  kernels::scan::LinearScanParams params = linear_scan_params(op.x, op, &read);
  params.x = read.rows(op.x);
  run_scan(name, params, h, h_final);
}

TensorTuple<2> LinearScan::meta() const {
  const c10::SymInt sequences = check_linear_scan({kOpName<LinearScan>, "x", x}, *this);
  return {new_like(x), new_state(x, {sequences, x.sym_size(2)})};
}

TensorTuple<2> LinearScan::kernel() const {
  auto results = meta();
  check_cu_seqlens_values({kOpName<LinearScan>, "x", x}, cu_seqlens);
  run_linear_scan(kOpName<LinearScan>, *this, std::get<0>(results), std::get<1>(results));
  return results;
}

// ---- backward ----

TensorTuple<3> LinearScanBackward::meta() const {
  const Reference data{kOpName<LinearScanBackward>, "h", h};
  const c10::SymInt sequences = check_linear_scan(data, *this);
  check_scan_gradients(data, h, dh, dh_final, /*complex=*/false, sequences);
  return {new_like(h), new_like(a), new_state_gradient(h0, h, {sequences, h.sym_size(2)})};
}

TensorTuple<3> LinearScanBackward::kernel() const {
  const Reference data{kOpName<LinearScanBackward>, "h", h};
  const c10::SymInt sequences = check_linear_scan(data, *this);
  check_scan_gradients(data, h, dh, dh_final, /*complex=*/false, sequences);
  check_cu_seqlens_values(data, cu_seqlens);
  const at::Tensor dx = new_like(h), dh0 = new_state(h, {sequences, h.sym_size(2)});
  KernelInputs read(h);
  kernels::scan::LinearScanBackwardParams params;
  params.forward = linear_scan_params(h, *this, &read);
  params.forward.x = time_series(dx);  // only its type and shape count here
  set_scan_gradients(h, dh, dh_final, dh0, &read, &params);
  params.dx = time_series(dx);
  const bool is_constant = params.forward.a_is_constant;
  at::Tensor da;
  if (!is_constant) {
    da = new_like(a, gate_dtype(a, h.scalar_type()));
    params.da = time_series(da);
  }
  Launch launch(data.op, &params, dx);
  if (is_constant) {
    da = launch.partial_sums(state_dtype(h.scalar_type()));
    params.da_partial = da.data_ptr();
  }
  launch.run();
  return {dx, in_type_of(a, is_constant ? sum_rows(data.op, {da})[0] : da), in_type_of(h0, dh0)};
}

// ---- step ----

at::Tensor LinearScanStep::meta() const {
  const Reference data{kOpName<LinearScanStep>, "x", x};
  check_linear_scan_tensors(data, a, /*step=*/true);
  check_step_state(data, state, "[B, D]", {x.sym_size(0), x.sym_size(1)});
  return new_like(x);
}

at::Tensor LinearScanStep::kernel() const {
  at::Tensor h = meta();
  const at::Tensor token = x.unsqueeze(1), decay = a.dim() == 1 ? a : a.unsqueeze(1);
  const OptionalTensor own = contiguous_as(state, state_dtype(x.scalar_type())), padded;
  const LinearScan op{token, decay, own, /*reverse=*/false, padded};
  run_linear_scan(kOpName<LinearScanStep>, op, h.unsqueeze(1), *own);
  write_back(kOpName<LinearScanStep>, *own, state);
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
