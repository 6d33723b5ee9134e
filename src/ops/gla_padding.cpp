#include "src/ops/gla_padding.h"

#include <algorithm>

#include "kernels/gla/gla.h"
#include "src/ops/views.h"

namespace tidegate::ops {
namespace {

using kernels::gla::GateKind;

/// A logit at which a gate is open and a key zero, in every type.
constexpr double kOpenLogit = 1e4;

int64_t padded_dim(int64_t dim) {
  constexpr int64_t kStep = kernels::gla::kTensorCoreDims;
  return (dim + kStep - 1) / kStep * kStep;
}

bool is_padded(int64_t dim) { return dim == padded_dim(dim); }

bool begins_aligned(const OptionalTensor& tensor) {
  return !is_given(tensor) || rows_begin_aligned(*tensor);
}

/// One gate a head stays as it is.
bool has_gate_a_channel(const GlaArguments& a) { return a.gate.size(3) == a.q.size(3); }

/// The first columns of `padded`: written into `into` where that is defined, which has as many as
/// `given`.
at::Tensor narrowed_into(const at::Tensor& into, const at::Tensor& padded,
                         const at::Tensor& given) {
  return into.defined() ? into.copy_(padded.narrow(-1, 0, given.size(-1)))
                        : narrowed(padded, given.size(-1));
}

}  // namespace

bool wants_padding(const GlaArguments& a, const at::Tensor& d_o) {
  const at::ScalarType type = a.q.scalar_type();
  if (!a.q.is_cuda() || (type != at::kBFloat16 && type != at::kHalf) ||
      a.q.size(1) <= kernels::gla::kStepTokens || a.q.numel() == 0 || a.v.numel() == 0) {
    return false;
  }
  const int64_t key_dim = a.q.size(3), value_dim = a.v.size(3);
  if (std::max(padded_dim(key_dim), padded_dim(value_dim)) > kernels::gla::kMostTensorCoreDim) {
    return false;
  }
  const bool aligned = rows_begin_aligned(a.q) && begins_aligned(a.k) && rows_begin_aligned(a.v) &&
                       (!has_gate_a_channel(a) || rows_begin_aligned(a.gate)) &&
                       begins_aligned(a.h0) && (!d_o.defined() || rows_begin_aligned(d_o));
  return !is_padded(key_dim) || !is_padded(value_dim) || !aligned;
}

PaddedGla::PaddedGla(const GlaArguments& a)
    : given_(a),
      key_dim_(padded_dim(a.q.size(3))),
      value_dim_(padded_dim(a.v.size(3))),
      q_(widened(a.q, key_dim_)),
      v_(values(a.v)),
      gate_(has_gate_a_channel(a)
                ? widened(a.gate, key_dim_, a.gate_kind == GateKind::kLogit ? kOpenLogit : 0.0)
                : a.gate),
      h0_(states(a.h0)) {
  if (is_given(a.k)) {
    k_ = widened(*a.k, key_dim_);
  }
  if (is_given(a.gamma)) {
    gamma_ = widened(*a.gamma, key_dim_);
  }
}

GlaArguments PaddedGla::arguments() const {
  GlaArguments padded{given_.op, given_.gate_kind, q_, k_, v_, gate_, gamma_, h0_};
  padded.scale = given_.scale;
  padded.q_activation = given_.q_activation;
  padded.v_activation = given_.v_activation;
  padded.reverse = given_.reverse;
  padded.cu_seqlens = given_.cu_seqlens;
  return padded;
}

at::Tensor PaddedGla::values(const at::Tensor& tensor) const { return widened(tensor, value_dim_); }

OptionalTensor PaddedGla::states(const OptionalTensor& tensor) const {
  if (!is_given(tensor)) {
    return tensor;
  }
  if (tensor->size(2) == key_dim_ && tensor->size(3) == value_dim_) {
    return widened(*tensor, value_dim_);
  }
  const at::Tensor more_columns = widened(*tensor, value_dim_);
  return widened(more_columns.flatten(2), key_dim_ * value_dim_)
      .unflatten(2, {key_dim_, value_dim_});
}

at::Tensor PaddedGla::narrow_keys(const at::Tensor& padded) const {
  return narrowed(padded, given_.q.size(3));
}

at::Tensor PaddedGla::narrow_values(const at::Tensor& padded) const {
  return narrowed(padded, given_.v.size(3));
}

at::Tensor PaddedGla::narrow_states(const at::Tensor& padded) const {
  return narrow_values(padded.narrow(2, 0, given_.q.size(3)));
}

GlaGradients PaddedGla::narrow(const GlaGradients& padded, const GlaGradients& into) const {
  GlaGradients grads = padded;  // dk and dgamma of what was not given have [0]
  grads.dq = narrowed_into(into.dq, padded.dq, given_.q);
  grads.dv = narrowed_into(into.dv, padded.dv, given_.v);
  grads.dgate = narrowed_into(into.dgate, padded.dgate, given_.gate);
  if (is_given(given_.k)) {
    grads.dk = narrow_keys(padded.dk);
  }
  if (is_given(given_.gamma)) {
    grads.dgamma = narrow_keys(padded.dgamma);
  }
  // Without an h0, too: there is a state's gradient in any case.
  grads.dh0 = narrow_states(padded.dh0);
  return grads;
}

}  // namespace tidegate::ops
