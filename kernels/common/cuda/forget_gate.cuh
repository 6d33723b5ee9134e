#pragma once

// Forget gates with a lower bound.

#include "kernels/common/cuda/gates.cuh"

namespace tidegate::kernels {

/// lambda = gamma + (1 - gamma) sigmoid(f) = 1 - (1 - gamma) sigmoid(-f), from the smaller of the
/// two sigmoids: an open gate forgets exactly nothing, and next to one no more than the last
/// rounding is lost, which thousands of steps would multiply. `open`: sigmoid(-f) is the smaller
/// one.
template <class Real>
__device__ inline Real forget_gate(Real gamma, bool open, Real smaller) {
  const Real one_minus_gamma = Real(1) - gamma;
  return fused(open ? -one_minus_gamma : one_minus_gamma, smaller, open ? Real(1) : gamma);
}
template <class Real>
__device__ inline Real forget_gate(Real gamma, Sigmoids<Real> s) {
  const bool open = s.pos > s.neg;
  return forget_gate(gamma, open, open ? s.neg : s.pos);
}
template <class Real>
__device__ inline Real forget_gate(Real gamma, PackedSigmoids<Real> s) {
  return fused(Real(1) - gamma, s.smaller, s.open() ? Real(1) : gamma);
}

}  // namespace tidegate::kernels
