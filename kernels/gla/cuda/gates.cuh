#pragma once

// Decays and keys from logits, and the activations of q and v.

#include "kernels/common/cuda/gates.cuh"
#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

/// What a logit x stands for: f = gamma + (1 - gamma) s(x) and k = (1 - gamma) s(-x), each from the
/// smaller of the two sigmoids, so that a gate keeps its digits at either end.
template <class Real>
struct LogitGate {
  Real decay, key;
};

/// `open` is 1 - gamma.
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

/// d activate(x) / dx.
template <class Math, class Real>
__device__ inline Real activation_slope(InputActivation activation, Real x) {
  if (activation == InputActivation::kNone) {
    return Real(1);
  }
  const Sigmoids<Real> s = sigmoids<Math>(x);
  return activation == InputActivation::kSilu ? s.pos * fused(x, s.neg, Real(1)) : s.pos * s.neg;
}

}  // namespace tidegate::kernels::gla
