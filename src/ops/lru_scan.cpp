// lru_scan: schema, checks, how tensors become the kernels' params.

#include "tidegate/ops/lru_scan.h"

#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/op.h"
#include "src/ops/scans.h"

namespace tidegate::ops {
namespace {

// ---- schemas ----

/// x goes to autocast's type; parameters and states keep theirs.
constexpr CastRule kLruScanCasts[] = {{"x", Cast::kLower}};

struct LruScan {
  static constexpr std::string_view kSchema =
      "lru_scan(Tensor x, Tensor nu_log, Tensor? theta_log, Tensor gamma_log, "
      "Tensor? h0=None, bool reverse=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor)";
  static constexpr std::string_view kResults[] = {"h", "h_final"};
  static constexpr std::string_view kData = "x";
  static constexpr auto& kCasts = kLruScanCasts;

  const at::Tensor &x, &nu_log;
  const OptionalTensor& theta_log;
  const at::Tensor& gamma_log;
  const OptionalTensor& h0;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  TensorTuple<2> kernel() const;
  TensorTuple<2> meta() const;
};

/// The gradients of x, nu_log, theta_log, gamma_log and h0.
struct LruScanBackward {
  static constexpr std::string_view kSchema =
      "lru_scan_backward(Tensor dh, Tensor? dh_final, Tensor x, Tensor h, Tensor nu_log, "
      "Tensor? theta_log, Tensor gamma_log, Tensor? h0, bool reverse, Tensor? cu_seqlens) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)";
  static constexpr std::string_view kGradientLike = "h";

  const at::Tensor& dh;
  const OptionalTensor& dh_final;
  const at::Tensor &x, &h, &nu_log;
  const OptionalTensor& theta_log;
  const at::Tensor& gamma_log;
  const OptionalTensor& h0;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  TensorTuple<5> kernel() const;
  TensorTuple<5> meta() const;
};

struct LruScanStep {
  static constexpr std::string_view kSchema =
      "lru_scan_step(Tensor x, Tensor nu_log, Tensor? theta_log, Tensor gamma_log, "
      "Tensor(a!) state) -> Tensor";
  static constexpr std::string_view kData = "x";
  static constexpr auto& kCasts = kLruScanCasts;

  const at::Tensor &x, &nu_log;
  const OptionalTensor& theta_log;
  const at::Tensor& gamma_log;
  at::Tensor& state;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

// ---- checks ----

/// A rate or a phase rounded to eight bits is another recurrence: 16-bit parameters are refused.
void check_lru_parameter(const Reference& data, const char* name, const at::Tensor& parameter,
                         const c10::SymInt& channels) {
  check_device(data, name, parameter);
  const at::ScalarType own = data.tensor.scalar_type();
  const at::ScalarType given = parameter.scalar_type();
  const bool is_double = own == at::kDouble;
  TORCH_CHECK(given == at::kFloat || (is_double && given == at::kDouble), data.op, ": ", name,
              " must be ", is_double ? "float64 or float32" : "float32", " (", data.name, " is ",
              dtype_name(own), "), got ", dtype_name(given));
  check_shape(data.op, name, parameter, "[D]", {channels});
}

/// x (or its token in the step op) and the parameters.
template <class Op>
void check_lru_tensors(const Reference& data, const Op& op, bool step) {
  const c10::SymInt channels = check_scan_data(data, "theta_log", op.theta_log, step);
  check_lru_parameter(data, "nu_log", op.nu_log, channels);
  if (is_given(op.theta_log)) {
    check_lru_parameter(data, "theta_log", *op.theta_log, channels);
  }
  check_lru_parameter(data, "gamma_log", op.gamma_log, channels);
}

/// What the forward and the backward pass read; returns N.
template <class Op>
c10::SymInt check_lru(const Op& op) {
  const Reference data{kOpName<Op>, "x", op.x};
  check_lru_tensors(data, op, /*step=*/false);
  return check_scan_states(data, op.cu_seqlens, op.h0, is_given(op.theta_log));
}

template <class Op>
void check_lru_values(const Op& op) {
  const Reference data{kOpName<Op>, "x", op.x};
  if constexpr (requires { op.cu_seqlens; }) {
    check_cu_seqlens_values(data, op.cu_seqlens);
  }
  check_finite_values(data, "nu_log", op.nu_log);
  check_finite_values(data, "theta_log", op.theta_log);
  check_finite_values(data, "gamma_log", op.gamma_log);
}

// ---- forward ----

/// What both directions read.
template <class Op>
kernels::scan::LruParams lru_params(const Op& op, KernelInputs* read) {
  kernels::scan::LruParams params;
  params.layout = read->layout(op.x, op.cu_seqlens, op.reverse);
  params.channels = op.nu_log.size(0);
  params.x = read->rows(op.x);
  params.nu_log = read->state(op.nu_log);
  params.theta_log = read->state(op.theta_log);
  params.gamma_log = read->state(op.gamma_log);
  params.h0 = read->state(op.h0);
  return params;
}

TensorTuple<2> LruScan::meta() const {
  const c10::SymInt sequences = check_lru(*this);
  return {new_like(x), new_state(x, {sequences, x.sym_size(2)})};
}

TensorTuple<2> LruScan::kernel() const {
  auto results = meta();
  check_lru_values(*this);
  KernelInputs read(x);
  run_scan(kOpName<LruScan>, lru_params(*this, &read), std::get<0>(results), std::get<1>(results));
  return results;
}

// ---- backward ----

TensorTuple<5> LruScanBackward::meta() const {
  const c10::SymInt sequences = check_lru(*this);
  check_scan_gradients({kOpName<LruScanBackward>, "x", x}, h, dh, dh_final, is_given(theta_log),
                       sequences);
  return {new_like(x), new_like(nu_log), new_gradient(theta_log, x), new_like(gamma_log),
          new_state_gradient(h0, x, {sequences, x.sym_size(2)})};
}

TensorTuple<5> LruScanBackward::kernel() const {
  constexpr const char* kOp = kOpName<LruScanBackward>;
  const c10::SymInt sequences = check_lru(*this);
  check_scan_gradients({kOp, "x", x}, h, dh, dh_final, is_given(theta_log), sequences);
  check_lru_values(*this);
  const at::ScalarType wide = state_dtype(x.scalar_type());
  const at::Tensor dx = new_like(x), dh0 = new_state(x, {sequences, x.sym_size(2)});
  KernelInputs read(x);
  kernels::scan::LruBackwardParams params;
  params.forward = lru_params(*this, &read);
  set_scan_gradients(h, dh, dh_final, dh0, &read, &params);
  params.dx = time_series(dx);
  Launch launch(kOp, &params, dx);
  const at::Tensor dnu = launch.partial_sums(wide);
  const at::Tensor dtheta = launch.partial_sums(wide, is_given(theta_log));
  const at::Tensor dgamma = launch.partial_sums(wide);
  params.dnu_log_partial = dnu.data_ptr();
  params.dtheta_log_partial = data_or_null(dtheta);
  params.dgamma_log_partial = dgamma.data_ptr();
  launch.run();

  const std::vector<at::Tensor> sums = sum_rows(kOp, {dnu, dtheta, dgamma});
  return {dx, in_type_of(nu_log, sums[0]), parameter_gradient(theta_log, sums[1], x),
          in_type_of(gamma_log, sums[2]), in_type_of(h0, dh0)};
}

// ---- step ----

at::Tensor LruScanStep::meta() const {
  const Reference data{kOpName<LruScanStep>, "x", x};
  check_lru_tensors(data, *this, /*step=*/true);
  check_step_state(data, state, is_given(theta_log) ? "[B, 2D]" : "[B, D]",
                   {x.sym_size(0), x.sym_size(1)});
  return new_like(x);
}

at::Tensor LruScanStep::kernel() const {
  at::Tensor h = meta();
  check_lru_values(*this);
  const at::Tensor token = x.unsqueeze(1);
  const OptionalTensor own = contiguous_as(state, state_dtype(x.scalar_type())), padded;
  const LruScan op{token, nu_log, theta_log, gamma_log, own, /*reverse=*/false, padded};
  KernelInputs read(x);
  run_scan(kOpName<LruScanStep>, lru_params(op, &read), h.unsqueeze(1), *own);
  write_back(kOpName<LruScanStep>, *own, state);
  return h;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<LruScan>(m);
  register_backward<LruScanBackward>(m);
  register_gradient<LruScan, LruScanBackward>(m);
  register_step<LruScanStep>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> lru_scan(const at::Tensor& x, const at::Tensor& nu_log,
                                            const std::optional<at::Tensor>& theta_log,
                                            const at::Tensor& gamma_log,
                                            const std::optional<at::Tensor>& h0, bool reverse,
                                            const std::optional<at::Tensor>& cu_seqlens) {
  return ops::call_public<ops::LruScan>(x, nu_log, theta_log, gamma_log, h0, reverse, cu_seqlens);
}

at::Tensor lru_scan_step(const at::Tensor& x, const at::Tensor& nu_log,
                         const std::optional<at::Tensor>& theta_log, const at::Tensor& gamma_log,
                         at::Tensor state) {
  return ops::call_public<ops::LruScanStep>(x, nu_log, theta_log, gamma_log, state);
}

}  // namespace tidegate
