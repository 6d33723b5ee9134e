// hgrn2: its schemas. What it shares with gated_linear_attention is in gla.cpp.

#include "tidegate/ops/hgrn2.h"

#include <ATen/ops/zeros.h>

#include <tuple>

#include "src/ops/autograd.h"
#include "src/ops/gla.h"
#include "src/ops/op.h"
#include "src/ops/results.h"

namespace tidegate::ops {
namespace {

/// q, f and v go to autocast's type; bounds and states stay fp32. A float64 q is left alone, and so
/// are its f and v.
constexpr CastRule kHgrn2Casts[] = {
    {"q", Cast::kLower}, {"f", Cast::kAlong, "q"}, {"v", Cast::kAlong, "q"}};

/// The arguments that all of these ops have. `name`: the op in errors. A step has no h0, reverse or
/// cu_seqlens.
template <class Op>
GlaArguments hgrn2_arguments(const Op& op, const char* name, const at::Tensor& q,
                             const at::Tensor& f, const at::Tensor& v) {
  GlaArguments arguments{name, kernels::gla::GateKind::kLogit, q, std::nullopt, v, f};
  arguments.gamma = op.gamma;
  arguments.scale = op.scale;
  arguments.q_activation = parse_input_activation(name, "q_activation", op.q_activation);
  arguments.v_activation = parse_input_activation(name, "v_activation", op.v_activation);
  if constexpr (requires { op.h0; }) {
    arguments.h0 = op.h0;
    arguments.reverse = op.reverse;
    arguments.cu_seqlens = op.cu_seqlens;
  }
  return arguments;
}

template <class Op>
GlaArguments hgrn2_arguments(const Op& op) {
  return hgrn2_arguments(op, kOpName<Op>, op.q, op.f, op.v);
}

struct Hgrn2 {
  static constexpr std::string_view kSchema =
      "hgrn2(Tensor q, Tensor f, Tensor v, Tensor? gamma=None, Tensor? h0=None, "
      "float scale=1.0, str q_activation=\"none\", str v_activation=\"none\", "
      "bool reverse=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor)";
  static constexpr std::string_view kResults[] = {"o", "h_final"};
  static constexpr std::string_view kData = "q";
  static constexpr auto& kCasts = kHgrn2Casts;

  const at::Tensor &q, &f, &v;
  const OptionalTensor &gamma, &h0;
  double scale;
  std::string_view q_activation, v_activation;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  auto kernel() const { return gla_forward_kernel(hgrn2_arguments(*this)); }
  auto meta() const { return gla_forward_meta(hgrn2_arguments(*this)); }
};

/// The gradients of q, f, v, gamma and h0.
struct Hgrn2Backward {
  static constexpr std::string_view kSchema =
      "hgrn2_backward(Tensor do, Tensor? dh_final, Tensor q, Tensor f, Tensor v, "
      "Tensor? gamma, Tensor? h0, float scale, str q_activation, str v_activation, "
      "bool reverse, Tensor? cu_seqlens) -> (Tensor, Tensor, Tensor, Tensor, Tensor)";
  static constexpr std::string_view kGradientLike = "v";

  const at::Tensor& d_o;
  const OptionalTensor& dh_final;
  const at::Tensor &q, &f, &v;
  const OptionalTensor &gamma, &h0;
  double scale;
  std::string_view q_activation, v_activation;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  TensorTuple<5> kernel() const {
    return in_order(gla_backward_kernel(d_o, dh_final, hgrn2_arguments(*this)));
  }
  TensorTuple<5> meta() const {
    return in_order(gla_backward_meta(d_o, dh_final, hgrn2_arguments(*this)));
  }
  static TensorTuple<5> in_order(const GlaGradients& grads) {
    return {grads.dq, grads.dgate, grads.dv, grads.dgamma, grads.dh0};
  }
};

// ---- of one projection ----

/// q, f and v, views of one tensor [B, T, 3, H, K].
struct Hgrn2Parts {
  at::Tensor q, f, v;

  Hgrn2Parts(const char* op, const at::Tensor& qfv) {
    const Reference data{op, "qfv", qfv};
    check_data_dtype(data, ComplexData::kRefused);
    check_rank(data, 5, "[B, T, 3, H, K]");
    const auto sizes = qfv.sym_sizes();
    check_shape(op, "qfv", qfv, "[B, T, 3, H, K]", {sizes[0], sizes[1], 3, sizes[3], sizes[4]});
    q = qfv.select(2, 0);
    f = qfv.select(2, 1);
    v = qfv.select(2, 2);
  }
};

/// Errors about what the parts share with hgrn2 name hgrn2, because modules call this op for users
/// who know that one.
template <class Op>
GlaArguments hgrn2_arguments(const Op& op, const Hgrn2Parts& parts) {
  return hgrn2_arguments(op, "hgrn2", parts.q, parts.f, parts.v);
}

/// hgrn2 of the three parts of one tensor, which the gradient is, too: what autograd makes of three
/// gradients of views of a tensor is a copy of them.
struct Hgrn2Qfv {
  static constexpr std::string_view kSchema =
      "hgrn2_qfv(Tensor qfv, Tensor? gamma=None, Tensor? h0=None, float scale=1.0, "
      "str q_activation=\"none\", str v_activation=\"none\", bool reverse=False, "
      "Tensor? cu_seqlens=None) -> (Tensor, Tensor)";
  static constexpr std::string_view kResults[] = {"o", "h_final"};
  static constexpr std::string_view kData = "qfv";
  static constexpr CastRule kCasts[] = {{"qfv", Cast::kLower}};

  const at::Tensor& qfv;
  const OptionalTensor &gamma, &h0;
  double scale;
  std::string_view q_activation, v_activation;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  auto kernel() const {
    const Hgrn2Parts parts(kOpName<Hgrn2Qfv>, qfv);
    return gla_forward_kernel(hgrn2_arguments(*this, parts));
  }
  auto meta() const {
    const Hgrn2Parts parts(kOpName<Hgrn2Qfv>, qfv);
    return gla_forward_meta(hgrn2_arguments(*this, parts));
  }
};

/// The gradients of qfv, gamma and h0. `do` may be absent, where o was not used: of the tensors
/// that autograd keeps none has o's shape, so that it could not make zeros in its place.
struct Hgrn2QfvBackward {
  static constexpr std::string_view kSchema =
      "hgrn2_qfv_backward(Tensor? do, Tensor? dh_final, Tensor qfv, Tensor? gamma, Tensor? h0, "
      "float scale, str q_activation, str v_activation, bool reverse, Tensor? cu_seqlens) -> "
      "(Tensor, Tensor, Tensor)";

  const OptionalTensor& d_o;
  const OptionalTensor& dh_final;
  const at::Tensor& qfv;
  const OptionalTensor &gamma, &h0;
  double scale;
  std::string_view q_activation, v_activation;
  bool reverse;
  const OptionalTensor& cu_seqlens;

  TensorTuple<3> kernel() const {
    constexpr const char* kOp = kOpName<Hgrn2QfvBackward>;
    const Hgrn2Parts parts(kOp, qfv);
    const at::Tensor dqfv = new_like(qfv);
    const Hgrn2Parts d_parts(kOp, dqfv);
    GlaGradients into;
    into.dq = d_parts.q;
    into.dgate = d_parts.f;
    into.dv = d_parts.v;
    const GlaGradients grads =
        gla_backward_kernel(d_o_or_zeros(parts), dh_final, hgrn2_arguments(*this, parts), into);
    return {dqfv, grads.dgamma, grads.dh0};
  }
  TensorTuple<3> meta() const {
    const Hgrn2Parts parts(kOpName<Hgrn2QfvBackward>, qfv);
    const GlaGradients grads =
        gla_backward_meta(d_o_or_zeros(parts), dh_final, hgrn2_arguments(*this, parts));
    return {new_like(qfv), grads.dgamma, grads.dh0};
  }
  at::Tensor d_o_or_zeros(const Hgrn2Parts& parts) const {
    return is_given(d_o) ? *d_o : at::zeros_symint(parts.v.sym_sizes(), parts.v.options());
  }
};

struct Hgrn2Step {
  static constexpr std::string_view kSchema =
      "hgrn2_step(Tensor q, Tensor f, Tensor v, Tensor? gamma, Tensor(a!) state, "
      "float scale=1.0, str q_activation=\"none\", str v_activation=\"none\") -> Tensor";
  static constexpr std::string_view kData = "q";
  static constexpr auto& kCasts = kHgrn2Casts;

  const at::Tensor &q, &f, &v;
  const OptionalTensor& gamma;
  at::Tensor& state;
  double scale;
  std::string_view q_activation, v_activation;

  auto kernel() const { return gla_step_kernel(hgrn2_arguments(*this), state); }
  auto meta() const { return gla_step_meta(hgrn2_arguments(*this), state); }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<Hgrn2>(m);
  register_backward<Hgrn2Backward>(m);
  register_gradient<Hgrn2, Hgrn2Backward>(m);
  register_op<Hgrn2Qfv>(m);
  register_backward<Hgrn2QfvBackward>(m);
  register_gradient<Hgrn2Qfv, Hgrn2QfvBackward>(m);
  register_step<Hgrn2Step>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> hgrn2(const at::Tensor& q, const at::Tensor& f,
                                         const at::Tensor& v,
                                         const std::optional<at::Tensor>& gamma,
                                         const std::optional<at::Tensor>& h0, double scale,
                                         std::string_view q_activation,
                                         std::string_view v_activation, bool reverse,
                                         const std::optional<at::Tensor>& cu_seqlens) {
  return ops::call_public<ops::Hgrn2>(q, f, v, gamma, h0, scale, q_activation, v_activation,
                                      reverse, cu_seqlens);
}

std::tuple<at::Tensor, at::Tensor> hgrn2_qfv(const at::Tensor& qfv,
                                             const std::optional<at::Tensor>& gamma,
                                             const std::optional<at::Tensor>& h0, double scale,
                                             std::string_view q_activation,
                                             std::string_view v_activation, bool reverse,
                                             const std::optional<at::Tensor>& cu_seqlens) {
  return ops::call_public<ops::Hgrn2Qfv>(qfv, gamma, h0, scale, q_activation, v_activation, reverse,
                                         cu_seqlens);
}

at::Tensor hgrn2_step(const at::Tensor& q, const at::Tensor& f, const at::Tensor& v,
                      const std::optional<at::Tensor>& gamma, at::Tensor state, double scale,
                      std::string_view q_activation, std::string_view v_activation) {
  return ops::call_public<ops::Hgrn2Step>(q, f, v, gamma, state, scale, q_activation, v_activation);
}

}  // namespace tidegate
