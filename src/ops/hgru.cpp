// hgru: schema, checks, how tensors become the kernels' params.

#include "tidegate/ops/hgru.h"

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
using scan::HgruBackwardParams;
using scan::HgruParams;

constexpr KernelSet<HgruParams> kForward = {
    &scan::hgru_unsupported, &scan::hgru_plan_cpu, &scan::hgru_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&scan::hgru_forward_plan), TIDEGATE_CUDA_KERNEL(&scan::hgru_forward)};

constexpr KernelSet<HgruBackwardParams, HgruParams> kBackward = {
    &scan::hgru_unsupported, &scan::hgru_plan_cpu, &scan::hgru_backward_cpu,
    TIDEGATE_CUDA_KERNEL(&scan::hgru_backward_plan), TIDEGATE_CUDA_KERNEL(&scan::hgru_backward)};

// ---- schemas ----

/// c and f go to autocast's type; bounds, phases and states stay fp32. A float64 c is left alone,
/// and so is its f.
constexpr CastRule kHgruCasts[] = {{"c", Cast::kLower}, {"f", Cast::kAlong, "c"}};

struct Hgru {
  static constexpr std::string_view kSchema =
      "hgru(Tensor c, Tensor f, Tensor? gamma=None, Tensor? theta=None, Tensor? h0=None, "
      "str activation=\"silu\", bool reverse=False, Tensor? cu_seqlens=None) "
      "-> (Tensor, Tensor)";
  static constexpr std::string_view kResults[] = {"h", "h_final"};
  static constexpr std::string_view kData = "c";
  static constexpr auto& kCasts = kHgruCasts;

  const at::Tensor &c, &f;
  const OptionalTensor &gamma, &theta, &h0;
  std::string_view activation;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  std::tuple<at::Tensor, at::Tensor> kernel() const;
  std::tuple<at::Tensor, at::Tensor> meta() const;
};

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// The gradients of c, f, gamma, theta and h0.
struct HgruBackward {
  static constexpr std::string_view kSchema =
      "hgru_backward(Tensor dh, Tensor? dh_final, Tensor c, Tensor f, Tensor h, "
      "Tensor? gamma, Tensor? theta, Tensor? h0, str activation, bool reverse, "
      "Tensor? cu_seqlens) -> (Tensor, Tensor, Tensor, Tensor, Tensor)";
  static constexpr std::string_view kGradientLike = "h";

  const at::Tensor& dh;
  const OptionalTensor& dh_final;
  const at::Tensor &c, &f, &h;
  const OptionalTensor &gamma, &theta, &h0;
  std::string_view activation;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  Gradients kernel() const;
  Gradients meta() const;
};

struct HgruStep {
  static constexpr std::string_view kSchema =
      "hgru_step(Tensor c, Tensor f, Tensor? gamma, Tensor? theta, Tensor(a!) state, "
      "str activation=\"silu\") -> Tensor";
  static constexpr std::string_view kData = "c";
  static constexpr auto& kCasts = kHgruCasts;

  const at::Tensor &c, &f;
  const OptionalTensor &gamma, &theta;
  at::Tensor& state;
  std::string_view activation;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

// ---- checks ----

scan::Activation parse_activation(const char* op, std::string_view name) {
  TORCH_CHECK(name == "silu" || name == "none", op,
              ": activation must be \"silu\" or \"none\", got \"", name, "\"");
  return name == "silu" ? scan::Activation::kSilu : scan::Activation::kNone;
}

/// c and f of [.., D], with or without a time axis. Returns D.
c10::SymInt check_data(const Reference& data, const at::Tensor& f, bool complex, bool step) {
  const char* kShapes[2][2] = {{"[B, T, D]", "[B, T, 2D] (theta is given)"},
                               {"[B, D]", "[B, 2D] (theta is given)"}};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, step ? 2 : 3, kShapes[step][complex]);
  check_gate(data, "f", f);
  const auto sizes = data.tensor.sym_sizes();
  const c10::SymInt width = sizes.back();
  if (complex) {
    TORCH_SYM_CHECK((width % 2).sym_eq(0), data.op, ": ", data.name, " must have shape ",
                    kShapes[step][complex], " with an even number of channels, got ",
                    data.tensor.sym_sizes());
  }
  const c10::SymInt channels = complex ? width / 2 : width;
  const std::string like = complex ? std::string(" (theta is given: ") + data.name +
                                         " is [Re | Im], f has half its width)"
                                   : std::string(" like ") + data.name;
  if (step) {
    check_shape(data.op, "f", f, "[B, D]", {sizes[0], channels}, like);
  } else {
    check_shape(data.op, "f", f, "[B, T, D]", {sizes[0], sizes[1], channels}, like);
  }
  return channels;
}

/// What the forward and the backward pass read; returns N.
template <class Op>
c10::SymInt check_inputs(const Op& op) {
  const Reference data{kOpName<Op>, "c", op.c};
  parse_activation(data.op, op.activation);
  const bool complex = is_given(op.theta);
  const c10::SymInt channels = check_data(data, op.f, complex, /*step=*/false);
  check_channel_parameter(data, "gamma", op.gamma, channels);
  check_channel_parameter(data, "theta", op.theta, channels);
  c10::SymInt sequences = check_cu_seqlens(data, op.cu_seqlens);
  check_state(data, "h0", op.h0, complex ? "[N, 2D]" : "[N, D]", {sequences, op.c.sym_size(2)});
  return sequences;
}

template <class Op>
void check_values(const Op& op) {
  const Reference data{kOpName<Op>, "c", op.c};
  if constexpr (requires { op.cu_seqlens; }) {
    check_cu_seqlens_values(data, op.cu_seqlens);
  }
  check_bound_values(data, "gamma", op.gamma);
  check_finite_values(data, "theta", op.theta);
}

// ---- forward ----

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor c, f, gamma, theta, h0, cu_seqlens;

  template <class Op>
  explicit KernelInputs(const Op& op)
      : c(in_rows(op.c)),
        f(gate_in_rows(op.f, op.c.scalar_type())),
        gamma(contiguous_as(op.gamma, state_dtype(op.c.scalar_type()))),
        theta(contiguous_as(op.theta, state_dtype(op.c.scalar_type()))),
        h0(contiguous_as(op.h0, state_dtype(op.c.scalar_type()))),
        cu_seqlens(contiguous_or_none(op.cu_seqlens)) {}

  template <class Op>
  HgruParams params(const Op& op) const {
    HgruParams params;
    params.layout = sequence_layout(c, cu_seqlens, op.reverse);
    params.channels = f.size(2);
    params.activation = parse_activation(kOpName<Op>, op.activation);
    params.c = time_series(c);
    params.f = time_series(f);
    params.gamma = data_or_null(gamma);
    params.theta = data_or_null(theta);
    params.h0 = data_or_null(h0);
    return params;
  }
};

/// Writes `h` [B, T, ..] and `h_final` [N, ..], which may be `inputs.h0` when T = 1.
void run_forward(const char* op, HgruParams params, const at::Tensor& h,
                 const at::Tensor& h_final) {
  params.h = time_series(h);
  params.h_final = h_final.data_ptr();
  Launch<HgruParams>(op, kForward, &params, h).run();
}

std::tuple<at::Tensor, at::Tensor> Hgru::meta() const {
  const c10::SymInt sequences = check_inputs(*this);
  return {new_like(c), new_state(c, {sequences, c.sym_size(2)})};
}

std::tuple<at::Tensor, at::Tensor> Hgru::kernel() const {
  auto results = meta();
  check_values(*this);
  const auto& [h, h_final] = results;
  const KernelInputs inputs(*this);
  run_forward(kOpName<Hgru>, inputs.params(*this), h, h_final);
  return results;
}

// ---- backward ----

c10::SymInt check_backward(const HgruBackward& op) {
  const Reference data{kOpName<HgruBackward>, "c", op.c};
  c10::SymInt sequences = check_inputs(op);
  check_like(data, "h", op.h);
  check_like(data, "dh", op.dh);
  check_state(data, "dh_final", op.dh_final, is_given(op.theta) ? "[N, 2D]" : "[N, D]",
              {sequences, op.c.sym_size(2)});
  return sequences;
}

Gradients HgruBackward::meta() const {
  const c10::SymInt sequences = check_backward(*this);
  return {new_like(c), new_like(f), new_gradient(gamma, c), new_gradient(theta, c),
          new_state_gradient(h0, c, {sequences, c.sym_size(2)})};
}

Gradients HgruBackward::kernel() const {
  const c10::SymInt sequences = check_backward(*this);
  check_values(*this);
  const at::ScalarType wide = state_dtype(c.scalar_type());
  const KernelInputs inputs(*this);
  const at::Tensor h_read = in_rows(h);
  const at::Tensor dh_read = in_rows(dh);
  const at::Tensor dh_final_read = contiguous_as(dh_final, wide);
  const at::Tensor dc = new_like(c);
  const at::Tensor df = new_like(inputs.f);
  const at::Tensor dh0 = new_state(c, {sequences, c.sym_size(2)});

  HgruBackwardParams params;
  params.forward = inputs.params(*this);
  params.forward.h = time_series(h_read);
  params.dh = time_series(dh_read);
  params.dh_final = data_or_null(dh_final_read);
  params.dc = time_series(dc);
  params.df = time_series(df);
  params.dh0 = dh0.data_ptr();
  Launch<HgruBackwardParams, HgruParams> launch(kOpName<HgruBackward>, kBackward, &params, dc);
  const at::Tensor dgamma = is_given(gamma) ? launch.partial_sums(wide) : at::Tensor();
  const at::Tensor dtheta = is_given(theta) ? launch.partial_sums(wide) : at::Tensor();
  params.dgamma_partial = data_or_null(dgamma);
  params.dtheta_partial = data_or_null(dtheta);
  launch.run();

  const std::vector<at::Tensor> sums = sum_rows(kOpName<HgruBackward>, {dgamma, dtheta});
  return {dc, in_type_of(f, df), parameter_gradient(gamma, sums[0], c),
          parameter_gradient(theta, sums[1], c), in_type_of(h0, dh0)};
}

// ---- step ----

at::Tensor HgruStep::meta() const {
  const Reference data{kOpName<HgruStep>, "c", c};
  parse_activation(data.op, activation);
  const bool complex = is_given(theta);
  const c10::SymInt channels = check_data(data, f, complex, /*step=*/true);
  check_channel_parameter(data, "gamma", gamma, channels);
  check_channel_parameter(data, "theta", theta, channels);
  check_gate(data, "state", state);
  check_shape(data.op, "state", state, complex ? "[B, 2D]" : "[B, D]",
              {c.sym_size(0), c.sym_size(1)});
  return new_like(c);
}

at::Tensor HgruStep::kernel() const {
  at::Tensor h = meta();
  check_values(*this);
  const at::Tensor token = c.unsqueeze(1), gate = f.unsqueeze(1);
  const OptionalTensor given = state, padded;
  const Hgru op{token, gate, gamma, theta, given, activation, /*reverse=*/false, padded};
  const KernelInputs inputs(op);
  run_forward(kOpName<HgruStep>, inputs.params(op), h.unsqueeze(1), inputs.h0);
  write_back(inputs.h0, state);
  return h;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<Hgru>(m);
  register_backward<HgruBackward>(m);
  register_gradient<Hgru, HgruBackward>(m);
  register_step<HgruStep>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> hgru(const at::Tensor& c, const at::Tensor& f,
                                        const std::optional<at::Tensor>& gamma,
                                        const std::optional<at::Tensor>& theta,
                                        const std::optional<at::Tensor>& h0,
                                        std::string_view activation, bool reverse,
                                        const std::optional<at::Tensor>& cu_seqlens) {
  return ops::call_public<ops::Hgru>(c, f, gamma, theta, h0, activation, reverse, cu_seqlens);
}

at::Tensor hgru_step(const at::Tensor& c, const at::Tensor& f,
                     const std::optional<at::Tensor>& gamma, const std::optional<at::Tensor>& theta,
                     at::Tensor state, std::string_view activation) {
  return ops::call_public<ops::HgruStep>(c, f, gamma, theta, state, activation);
}

}  // namespace tidegate
