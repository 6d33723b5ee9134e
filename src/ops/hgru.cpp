// hgru: schema, checks, how tensors become the kernels' params.

#include "tidegate/ops/hgru.h"

#include <string>
#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/op.h"
#include "src/ops/scans.h"

namespace tidegate::ops {
namespace {

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

  TensorTuple<2> kernel() const;
  TensorTuple<2> meta() const;
};

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

  TensorTuple<5> kernel() const;
  TensorTuple<5> meta() const;
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

kernels::scan::Activation parse_activation(const char* op, std::string_view name) {
  using kernels::scan::Activation;
  TORCH_CHECK(name == "silu" || name == "none", op,
              ": activation must be \"silu\" or \"none\", got \"", name, "\"");
  return name == "silu" ? Activation::kSilu : Activation::kNone;
}

/// c, f, gamma and theta, with or without a time axis.
template <class Op>
void check_hgru_tensors(const Reference& data, const Op& op, bool step) {
  parse_activation(data.op, op.activation);
  const c10::SymInt channels = check_scan_data(data, "theta", op.theta, step);
  check_gate(data, "f", op.f);
  const char* like =
      is_given(op.theta) ? " (theta is given: c is [Re | Im], f has half its width)" : " like c";
  if (step) {
    check_shape(data.op, "f", op.f, "[B, D]", {op.c.sym_size(0), channels}, like);
  } else {
    check_shape(data.op, "f", op.f, "[B, T, D]", {op.c.sym_size(0), op.c.sym_size(1), channels},
                like);
  }
  check_channel_parameter(data, "gamma", op.gamma, channels);
  check_channel_parameter(data, "theta", op.theta, channels);
}

/// What the forward and the backward pass read; returns N.
template <class Op>
c10::SymInt check_hgru(const Op& op) {
  const Reference data{kOpName<Op>, "c", op.c};
  check_hgru_tensors(data, op, /*step=*/false);
  return check_scan_states(data, op.cu_seqlens, op.h0, is_given(op.theta));
}

template <class Op>
void check_hgru_values(const Op& op) {
  const Reference data{kOpName<Op>, "c", op.c};
  if constexpr (requires { op.cu_seqlens; }) {
    check_cu_seqlens_values(data, op.cu_seqlens);
  }
  check_bound_values(data, "gamma", op.gamma);
  check_finite_values(data, "theta", op.theta);
}

// ---- forward ----

/// What both directions read.
template <class Op>
kernels::scan::HgruParams hgru_params(const Op& op, KernelInputs* read) {
  kernels::scan::HgruParams params;
  params.layout = read->layout(op.c, op.cu_seqlens, op.reverse);
  params.channels = op.f.size(2);
  params.activation = parse_activation(kOpName<Op>, op.activation);
  params.c = read->rows(op.c);
  params.f = read->gate(op.f);
  params.gamma = read->state(op.gamma);
  params.theta = read->state(op.theta);
  params.h0 = read->state(op.h0);
  return params;
}

TensorTuple<2> Hgru::meta() const {
  const c10::SymInt sequences = check_hgru(*this);
  return {new_like(c), new_state(c, {sequences, c.sym_size(2)})};
}

TensorTuple<2> Hgru::kernel() const {
  auto results = meta();
  check_hgru_values(*this);
  KernelInputs read(c);
  run_scan(kOpName<Hgru>, hgru_params(*this, &read), std::get<0>(results), std::get<1>(results));
  return results;
}

// ---- backward ----

TensorTuple<5> HgruBackward::meta() const {
  const c10::SymInt sequences = check_hgru(*this);
  check_scan_gradients({kOpName<HgruBackward>, "c", c}, h, dh, dh_final, is_given(theta),
                       sequences);
  return {new_like(c), new_like(f), new_gradient(gamma, c), new_gradient(theta, c),
          new_state_gradient(h0, c, {sequences, c.sym_size(2)})};
}

TensorTuple<5> HgruBackward::kernel() const {
  constexpr const char* kOp = kOpName<HgruBackward>;
  const c10::SymInt sequences = check_hgru(*this);
  check_scan_gradients({kOp, "c", c}, h, dh, dh_final, is_given(theta), sequences);
  check_hgru_values(*this);
  const at::ScalarType wide = state_dtype(c.scalar_type());
  const at::Tensor dc = new_like(c), df = new_like(f, gate_dtype(f, c.scalar_type())),
                   dh0 = new_state(c, {sequences, c.sym_size(2)});
  KernelInputs read(c);
  kernels::scan::HgruBackwardParams params;
  params.forward = hgru_params(*this, &read);
  set_scan_gradients(h, dh, dh_final, dh0, &read, &params);
  params.dc = time_series(dc);
  params.df = time_series(df);
  Launch launch(kOp, &params, dc);
  const at::Tensor dgamma = launch.partial_sums(wide, is_given(gamma));
  const at::Tensor dtheta = launch.partial_sums(wide, is_given(theta));
  params.dgamma_partial = data_or_null(dgamma);
  params.dtheta_partial = data_or_null(dtheta);
  launch.run();

  const std::vector<at::Tensor> sums = sum_rows(kOp, {dgamma, dtheta});
  return {dc, in_type_of(f, df), parameter_gradient(gamma, sums[0], c),
          parameter_gradient(theta, sums[1], c), in_type_of(h0, dh0)};
}

// ---- step ----

at::Tensor HgruStep::meta() const {
  const Reference data{kOpName<HgruStep>, "c", c};
  check_hgru_tensors(data, *this, /*step=*/true);
  check_step_state(data, state, is_given(theta) ? "[B, 2D]" : "[B, D]",
                   {c.sym_size(0), c.sym_size(1)});
  return new_like(c);
}

at::Tensor HgruStep::kernel() const {
  at::Tensor h = meta();
  check_hgru_values(*this);
  const at::Tensor token = c.unsqueeze(1), gate = f.unsqueeze(1);
  const OptionalTensor own = contiguous_as(state, state_dtype(c.scalar_type())), padded;
  const Hgru op{token, gate, gamma, theta, own, activation, /*reverse=*/false, padded};
  KernelInputs read(c);
  run_scan(kOpName<HgruStep>, hgru_params(op, &read), h.unsqueeze(1), *own);
  write_back(kOpName<HgruStep>, *own, state);
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
