#include "src/ops/gla_padding.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "kernels/gla/forward_rows.h"
#include "kernels/gla/gla.h"
#include "src/ops/views.h"
#include "src/ops/width_copies.h"

namespace tidegate::ops {
namespace {

using kernels::gla::GateKind;

/// A logit at which a gate is open and a key zero, in every type.
constexpr double kOpenLogit = 1e4;

int64_t padded_dim(int64_t dim) {
  constexpr int64_t kStep = kernels::gla::kTensorCoreDims;
  return (dim + kStep - 1) / kStep * kStep;
}

bool needs_no_padding(int64_t dim) { return dim == padded_dim(dim); }

bool begins_aligned(const OptionalTensor& tensor) {
  return !is_given(tensor) || rows_begin_aligned(*tensor);
}

/// Whether the forward kernel takes the rows as they are, or as in_rows copies them.
bool fits_forward_tile(const OptionalTensor& tensor) {
  if (!is_given(tensor)) {
    return true;
  }
  const int64_t dim = tensor->size(-1), size = tensor->element_size();
  if (has_unit_rows(*tensor)) {
    return kernels::gla::rows_fit_tile(head_series(*tensor), dim);
  }
  const int64_t late = kernels::gla::most_late_bytes(static_cast<uint64_t>(dim * size));
  return kernels::gla::rows_fit_tile(late, size, dim);
}

/// One gate a head stays as it is.
bool has_gate_a_channel(const GlaArguments& a) { return a.gate.size(3) == a.q.size(3); }

/// 16-bit data on CUDA, more tokens than the plain kernels take as fast, K and V that may be
/// padded.
bool is_for_tensor_cores(const GlaArguments& a) {
  const at::ScalarType type = a.q.scalar_type();
  return a.q.is_cuda() && (type == at::kBFloat16 || type == at::kHalf) &&
         a.q.size(1) > kernels::gla::kMostUnpaddedTokens && a.q.numel() > 0 && a.v.numel() > 0 &&
         std::max(a.q.size(3), a.v.size(3)) <= kernels::gla::kMostTensorCoreDim;
}

}  // namespace

bool forward_wants_padding(const GlaArguments& a) {
  return is_for_tensor_cores(a) &&
         !(fits_forward_tile(a.q) && fits_forward_tile(a.k) && fits_forward_tile(a.v) &&
           (!has_gate_a_channel(a) || fits_forward_tile(a.gate)));
}

bool backward_wants_padding(const GlaArguments& a, const at::Tensor& d_o,
                            const OptionalTensor& dh_final) {
  if (!is_for_tensor_cores(a)) {
    return false;
  }
  const int64_t key_dim = a.q.size(3), value_dim = a.v.size(3);
  const bool aligned = rows_begin_aligned(a.q) && begins_aligned(a.k) && rows_begin_aligned(a.v) &&
                       (!has_gate_a_channel(a) || rows_begin_aligned(a.gate)) &&
                       begins_aligned(a.h0) && begins_aligned(a.gamma) && rows_begin_aligned(d_o) &&
                       begins_aligned(dh_final);
  return !needs_no_padding(key_dim) || !needs_no_padding(value_dim) || !aligned;
}

PaddedGla::PaddedGla(const GlaArguments& a, const OptionalTensor& d_o,
                     const OptionalTensor& dh_final)
    : given_(a), key_dim_(padded_dim(a.q.size(3))), value_dim_(padded_dim(a.v.size(3))) {
  WidthCopies copies(a.op);
  const auto states = [&](const OptionalTensor& state) {
    return is_given(state) ? OptionalTensor(copies.widened_state(*state, key_dim_, value_dim_))
                           : state;
  };
  q_ = copies.widened(a.q, key_dim_);
  v_ = copies.widened(a.v, value_dim_);
  gate_ = a.gate;
  if (has_gate_a_channel(a)) {
    gate_ = copies.widened(a.gate, key_dim_, a.gate_kind == GateKind::kLogit ? kOpenLogit : 0.0);
  }
  if (is_given(a.k)) {
    k_ = copies.widened(*a.k, key_dim_);
  }
  if (is_given(a.gamma)) {
    gamma_ = copies.widened(*a.gamma, key_dim_);
  }
  h0_ = states(a.h0);
  if (is_given(d_o)) {
    d_o_ = copies.widened(*d_o, value_dim_);
  }
  dh_final_ = states(dh_final);
  copies.run();
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

at::Tensor PaddedGla::narrow_states(WidthCopies* copies, const at::Tensor& padded) const {
  at::Tensor states = at::empty(
      {padded.size(0), padded.size(1), given_.q.size(3), given_.v.size(3)}, padded.options());
  copies->narrow(padded, states);
  return states;
}

std::tuple<at::Tensor, at::Tensor> PaddedGla::narrow_results(const at::Tensor& o,
                                                             const at::Tensor& h_final) const {
  WidthCopies copies(given_.op);
  std::tuple<at::Tensor, at::Tensor> results = {copies.narrowed(o, given_.v.size(3)),
                                                narrow_states(&copies, h_final)};
  copies.run();
  return results;
}

GlaGradients PaddedGla::narrow(const GlaGradients& padded, const GlaGradients& into) const {
  WidthCopies copies(given_.op);
  // Written into `own` where that is defined.
  const auto narrowed = [&copies](const at::Tensor& own, const at::Tensor& gradient,
                                  const at::Tensor& given) {
    if (!own.defined()) {
      return copies.narrowed(gradient, given.size(-1));
    }
    copies.narrow(gradient, own);
    return own;
  };
  GlaGradients grads = padded;  // dk and dgamma of what was not given have [0]
  grads.dq = narrowed(into.dq, padded.dq, given_.q);
  grads.dv = narrowed(into.dv, padded.dv, given_.v);
  grads.dgate = narrowed(into.dgate, padded.dgate, given_.gate);
  if (is_given(given_.k)) {
    grads.dk = narrowed({}, padded.dk, *given_.k);
  }
  if (is_given(given_.gamma)) {
    grads.dgamma = narrowed({}, padded.dgamma, *given_.gamma);
  }
  // Without an h0, too: there is a state's gradient in any case.
  grads.dh0 = narrow_states(&copies, padded.dh0);
  copies.run();
  return grads;
}

}  // namespace tidegate::ops
