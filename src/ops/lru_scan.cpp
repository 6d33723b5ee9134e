// lru_scan: schema, checks, how tensors become the kernels' params.

#include "tidegate/ops/lru_scan.h"

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
using scan::LruBackwardParams;
using scan::LruParams;

constexpr KernelSet<LruParams> kForward = {
    &scan::lru_unsupported, &scan::lru_plan_cpu, &scan::lru_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&scan::lru_forward_plan), TIDEGATE_CUDA_KERNEL(&scan::lru_forward)};

constexpr KernelSet<LruBackwardParams, LruParams> kBackward = {
    &scan::lru_unsupported, &scan::lru_plan_cpu, &scan::lru_backward_cpu,
    TIDEGATE_CUDA_KERNEL(&scan::lru_backward_plan), TIDEGATE_CUDA_KERNEL(&scan::lru_backward)};

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

  std::tuple<at::Tensor, at::Tensor> kernel() const;
  std::tuple<at::Tensor, at::Tensor> meta() const;
};

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

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

  Gradients kernel() const;
  Gradients meta() const;
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
template <class Op>
void check_data(const Op& op, bool step) {
  const char* kShapes[2][2] = {{"[B, T, D]", "[B, T, 2D] (theta_log is given)"},
                               {"[B, D]", "[B, 2D] (theta_log is given)"}};
  const Reference data{kOpName<Op>, "x", op.x};
  const bool complex = is_given(op.theta_log);
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, step ? 2 : 3, kShapes[step][complex]);
  const c10::SymInt width = data.tensor.sym_sizes().back();
  if (complex) {
    TORCH_SYM_CHECK((width % 2).sym_eq(0), data.op, ": ", data.name, " must have shape ",
                    kShapes[step][complex], " with an even number of channels, got ",
                    data.tensor.sym_sizes());
  }
  const c10::SymInt channels = complex ? width / 2 : width;
  check_parameter(data, "nu_log", op.nu_log, channels);
  if (complex) {
    check_parameter(data, "theta_log", *op.theta_log, channels);
  }
  check_parameter(data, "gamma_log", op.gamma_log, channels);
}

/// What the forward and the backward pass read; returns N.
template <class Op>
c10::SymInt check_inputs(const Op& op) {
  const Reference data{kOpName<Op>, "x", op.x};
  check_data(op, /*step=*/false);
  c10::SymInt sequences = check_cu_seqlens(data, op.cu_seqlens);
  check_state(data, "h0", op.h0, is_given(op.theta_log) ? "[N, 2D]" : "[N, D]",
              {sequences, op.x.sym_size(2)});
  return sequences;
}

template <class Op>
void check_values(const Op& op) {
  const Reference data{kOpName<Op>, "x", op.x};
  if constexpr (requires { op.cu_seqlens; }) {
    check_cu_seqlens_values(data, op.cu_seqlens);
  }
  check_finite_values(data, "nu_log", op.nu_log);
  check_finite_values(data, "theta_log", op.theta_log);
  check_finite_values(data, "gamma_log", op.gamma_log);
}

// ---- forward ----

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor x, nu_log, theta_log, gamma_log, h0, cu_seqlens;

  template <class Op>
  explicit KernelInputs(const Op& op)
      : x(in_rows(op.x)),
        nu_log(contiguous_as(op.nu_log, state_dtype(op.x.scalar_type()))),
        theta_log(contiguous_as(op.theta_log, state_dtype(op.x.scalar_type()))),
        gamma_log(contiguous_as(op.gamma_log, state_dtype(op.x.scalar_type()))),
        h0(contiguous_as(op.h0, state_dtype(op.x.scalar_type()))),
        cu_seqlens(contiguous_or_none(op.cu_seqlens)) {}

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

/// Writes `h` [B, T, ..] and `h_final` [N, ..], which may be the params' h0 when T = 1.
void run_forward(const char* op, LruParams params, const at::Tensor& h, const at::Tensor& h_final) {
  params.h = time_series(h);
  params.h_final = h_final.data_ptr();
  Launch<LruParams>(op, kForward, &params, h).run();
}

std::tuple<at::Tensor, at::Tensor> LruScan::meta() const {
  const c10::SymInt sequences = check_inputs(*this);
  return {new_like(x), new_state(x, {sequences, x.sym_size(2)})};
}

std::tuple<at::Tensor, at::Tensor> LruScan::kernel() const {
  auto results = meta();
  check_values(*this);
  const auto& [h, h_final] = results;
  const KernelInputs inputs(*this);
  run_forward(kOpName<LruScan>, inputs.params(reverse), h, h_final);
  return results;
}

// ---- backward ----

c10::SymInt check_backward(const LruScanBackward& op) {
  const Reference data{kOpName<LruScanBackward>, "x", op.x};
  c10::SymInt sequences = check_inputs(op);
  check_like(data, "h", op.h);
  check_like(data, "dh", op.dh);
  check_state(data, "dh_final", op.dh_final, is_given(op.theta_log) ? "[N, 2D]" : "[N, D]",
              {sequences, op.x.sym_size(2)});
  return sequences;
}

Gradients LruScanBackward::meta() const {
  const c10::SymInt sequences = check_backward(*this);
  return {new_like(x), new_like(nu_log), new_gradient(theta_log, x), new_like(gamma_log),
          new_state_gradient(h0, x, {sequences, x.sym_size(2)})};
}

Gradients LruScanBackward::kernel() const {
  constexpr const char* kOp = kOpName<LruScanBackward>;
  const c10::SymInt sequences = check_backward(*this);
  check_values(*this);
  const at::ScalarType wide = state_dtype(x.scalar_type());
  const KernelInputs inputs(*this);
  const at::Tensor h_read = in_rows(h);
  const at::Tensor dh_read = in_rows(dh);
  const at::Tensor dh_final_read = contiguous_as(dh_final, wide);
  const at::Tensor dx = new_like(x);
  const at::Tensor dh0 = new_state(x, {sequences, x.sym_size(2)});

  LruBackwardParams params;
  params.forward = inputs.params(reverse);
  params.forward.h = time_series(h_read);
  params.dh = time_series(dh_read);
  params.dh_final = data_or_null(dh_final_read);
  params.dx = time_series(dx);
  params.dh0 = dh0.data_ptr();
  Launch<LruBackwardParams, LruParams> launch(kOp, kBackward, &params, dx);
  const at::Tensor dnu = launch.partial_sums(wide);
  const at::Tensor dtheta = is_given(theta_log) ? launch.partial_sums(wide) : at::Tensor();
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
  check_data(*this, /*step=*/true);
  check_gate(data, "state", state);
  check_shape(data.op, "state", state, is_given(theta_log) ? "[B, 2D]" : "[B, D]",
              {x.sym_size(0), x.sym_size(1)});
  return new_like(x);
}

at::Tensor LruScanStep::kernel() const {
  at::Tensor h = meta();
  check_values(*this);
  const at::Tensor token = x.unsqueeze(1);
  const OptionalTensor given = state, padded;
  const LruScan op{token, nu_log, theta_log, gamma_log, given, /*reverse=*/false, padded};
  const KernelInputs inputs(op);
  run_forward(kOpName<LruScanStep>, inputs.params(op.reverse), h.unsqueeze(1), inputs.h0);
  write_back(inputs.h0, state);
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
