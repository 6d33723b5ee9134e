#pragma once

// What every kernel of the family reads: the rows of one head along the direction of the scan, the
// decays and keys that a logit stands for, and the activations of q and v.

#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

/// Rows of one head of one sequence: row k is what the k-th step of the scan sees.
class HeadRows {
 public:
  HeadRows() = default;

  __device__ HeadRows(const HeadSeries& series, const Sequence& seq, bool backwards, int64_t head)
      : dtype_(series.dtype) {
    const int64_t size = dtype_ == DType::kFloat64 ? 8 : dtype_ == DType::kFloat32 ? 4 : 2;
    base_ = static_cast<char*>(series.data) +
            element_offset(series, seq.batch, first_token(seq, backwards), head) * size;
    stride_ = (backwards ? -series.stride_t : series.stride_t) * size;
  }

  __device__ char* row(int64_t k) const { return base_ + k * stride_; }
  /// Bytes from one row to the next, which fit 32 bits: see in_rows of src/ops/views.h.
  __device__ int stride_bytes() const { return static_cast<int>(stride_); }

  template <class Real>
  __device__ Real load(int64_t k, int channel) const {
    return load_any_element<Real>(row(k), dtype_, channel);
  }
  template <class Real>
  __device__ void store(int64_t k, int channel, Real x) const {
    store_any_element(row(k), dtype_, channel, x);
  }

 private:
  char* base_ = nullptr;
  int64_t stride_ = 0;  // bytes
  DType dtype_ = DType::kFloat32;
};

/// What a logit x stands for: f = gamma + (1 - gamma) s(x) and k = (1 - gamma) s(-x), each from the
/// smaller of the two sigmoids, so that a gate keeps its digits at either end.
template <class Real>
struct LogitGate {
  Real decay, key;
};

/// Decay and key of a logit; `open` is 1 - gamma.
template <class Math, class Real>
__device__ inline LogitGate<Real> logit_gate(Real x, Real gamma, Real open) {
  const Real e = Math::exp_minus_abs(x);
  const Real larger = Math::reciprocal(Real(1) + e);
  const Real smaller = e * larger;
  LogitGate<Real> gate;
  if (x > Real(0)) {
    gate.key = open * smaller;
    gate.decay = Real(1) - gate.key;
  } else {
    gate.key = open * larger;
    gate.decay = fused(open, smaller, gamma);
  }
  return gate;
}

template <class Math, class Real>
__device__ inline Real activate(InputActivation activation, Real x) {
  if (activation == InputActivation::kNone) {
    return x;
  }
  const Real s = sigmoids<Math>(x).pos;
  return activation == InputActivation::kSilu ? x * s : s;
}

/// The derivative of activate(x).
template <class Math, class Real>
__device__ inline Real activation_slope(InputActivation activation, Real x) {
  if (activation == InputActivation::kNone) {
    return Real(1);
  }
  const Sigmoids<Real> s = sigmoids<Math>(x);
  return activation == InputActivation::kSilu ? s.pos * fused(x, s.neg, Real(1)) : s.pos * s.neg;
}

}  // namespace tidegate::kernels::gla
