#pragma once

// Gates: the two sigmoids of a gated recurrence, in the form that keeps both of their tails, and
// the forget gate that they make with a lower bound.

#include "kernels/common/cuda/numeric.cuh"

namespace tidegate::kernels {

/// sigmoid(x) and sigmoid(-x), each with its own digits: 1 - sigmoid(x) would have none near one.
template <class Real>
struct Sigmoids {
  Real pos, neg;

  __device__ Sigmoids both() const { return *this; }
};

__device__ inline float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ inline float reciprocal_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/// exp(-|x|) and reciprocal at the precision that data of a given width can show. kFast (16-bit
/// data): relative error about |x| * 2^-24. Otherwise within 2 ulp. The exponential never
/// overflows, and its tail reaches zero where the true one leaves the range.
template <class Real, bool kFast>
struct GateMath;

template <>
struct GateMath<float, true> {
  static __device__ float exp_minus_abs(float x) { return exp2_approx(fabsf(x) * -kLog2E); }
  static __device__ float reciprocal(float x) { return reciprocal_approx(x); }
};

template <>
struct GateMath<float, false> {
  static __device__ float exp_minus_abs(float x) {
    // 2^hi * 2^lo with hi + lo = -|x| * log2(e) to about 40 bits.
    const float y = -fabsf(x);
    const float hi = y * kLog2E;
    const float lo = fmaf(y, 1.925963033500212e-8f, fmaf(y, kLog2E, -hi));
    const float e = exp2_approx(hi);
    // An infinite y makes lo NaN; there e is zero, and must stay so.
    return hi < -150.0f ? 0.0f : fmaf(e, lo * kLn2, e);
  }
  static __device__ float reciprocal(float x) {
    const float r = reciprocal_approx(x);
    return fmaf(r, fmaf(-x, r, 1.0f), r);
  }
};

template <bool kFast>
struct GateMath<double, kFast> {
  static __device__ double exp_minus_abs(double x) { return exp(-fabs(x)); }
  static __device__ double reciprocal(double x) { return 1.0 / x; }
};

/// sigmoid(x) = pos / sum and sigmoid(-x) = neg / sum, before the division.
template <class Real>
struct SigmoidRatio {
  Real pos, neg, sum;
};

template <class Math, class Real>
__device__ inline SigmoidRatio<Real> sigmoid_ratio(Real x) {
  const Real e = Math::exp_minus_abs(x);
  const bool positive = x > Real(0);
  return {positive ? Real(1) : e, positive ? e : Real(1), Real(1) + e};
}

template <class Math, class Real>
__device__ inline Sigmoids<Real> sigmoids(Real x) {
  const SigmoidRatio<Real> s = sigmoid_ratio<Math>(x);
  const Real r = Math::reciprocal(s.sum);
  return {s.pos * r, s.neg * r};
}

__device__ inline bool has_sign(float x) { return __float_as_int(x) < 0; }
__device__ inline bool has_sign(double x) { return __double2hiint(x) < 0; }

/// Both sigmoids in one register: the smaller one, negative where that is sigmoid(-x). Takes a few
/// instructions more than two registers do.
template <class Real>
struct PackedSigmoids {
  Real smaller;

  __device__ bool open() const { return has_sign(smaller); }  // also where it is -0
  __device__ Sigmoids<Real> both() const {
    const Real small = fabs(smaller);
    const Real large = Real(1) - small;
    return {open() ? large : small, open() ? small : large};
  }
};

template <class Math, class Real>
__device__ inline void find_sigmoids(Real x, Sigmoids<Real>* s) {
  *s = sigmoids<Math>(x);
}
template <class Math, class Real>
__device__ inline void find_sigmoids(Real x, PackedSigmoids<Real>* s) {
  const Real e = Math::exp_minus_abs(x);
  const Real smaller = e * Math::reciprocal(Real(1) + e);
  s->smaller = x > Real(0) ? -smaller : smaller;
}

/// SiLU(x) = x * sigmoid(x), and its derivative.
template <class Math, class Real>
__device__ inline void silu_with_derivative(Real x, Real* value, Real* derivative) {
  const Sigmoids<Real> s = sigmoids<Math>(x);
  *value = x * s.pos;
  *derivative = s.pos * fused(x, s.neg, Real(1));
}

// ---- Forget gates with a lower bound ----

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
