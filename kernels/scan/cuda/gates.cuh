#pragma once

// The two sigmoids of a gated recurrence, in the form that keeps both of their tails.

#include "kernels/common/cuda/numeric.cuh"

namespace tidegate::kernels {

/// sigmoid(x) and sigmoid(-x), each with its own digits: 1 - sigmoid(x) would have none near one.
template <class Real>
struct Sigmoids {
  Real pos, neg;
};

// exp(x) is capped at 2^60, so that neither 1 + exp(x) nor a product of two of them overflows and
// no tail becomes inf * 0. A sigmoid then bottoms out at 8.7e-19 instead of vanishing, which is far
// below the rounding of whatever it is added to. The minimum keeps NaN, unlike fminf.
constexpr float kExpCapLog2 = 60.0f;
constexpr double kExpCapLog = 41.0;

__device__ inline float min_keeping_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

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

/// exp and reciprocal at the precision that data of a given width can show. kFast (16-bit data):
/// relative error about |x| * 2^-24. Otherwise within 2 ulp.
template <class Real, bool kFast>
struct GateMath;

template <>
struct GateMath<float, true> {
  static __device__ float exp_capped(float x) {
    return exp2_approx(min_keeping_nan(x * 1.4426950408889634f, kExpCapLog2));
  }
  static __device__ float reciprocal(float x) { return reciprocal_approx(x); }
};

template <>
struct GateMath<float, false> {
  static __device__ float exp_capped(float x) {
    // 2^hi * 2^lo with hi + lo = x * log2(e) to about 40 bits.
    const float y = min_keeping_nan(x, static_cast<float>(kExpCapLog));
    const float hi = y * 1.4426950408889634f;
    const float lo = fmaf(y, 1.925963033500212e-8f, fmaf(y, 1.4426950408889634f, -hi));
    const float e = exp2_approx(hi);
    // A large negative y makes hi infinite and lo NaN; there e is zero, and must stay so.
    return hi < -150.0f ? 0.0f : fmaf(e, lo * 0.6931471805599453f, e);
  }
  static __device__ float reciprocal(float x) {
    const float r = reciprocal_approx(x);
    return fmaf(r, fmaf(-x, r, 1.0f), r);
  }
};

template <bool kFast>
struct GateMath<double, kFast> {
  static __device__ double exp_capped(double x) { return exp(x > kExpCapLog ? kExpCapLog : x); }
  static __device__ double reciprocal(double x) { return 1.0 / x; }
};

template <class Math, class Real>
__device__ inline Sigmoids<Real> sigmoids(Real x) {
  const Real e = Math::exp_capped(x);
  const Real neg = Math::reciprocal(Real(1) + e);
  return {e * neg, neg};
}

/// SiLU(x) = x * sigmoid(x), and its derivative.
template <class Math, class Real>
__device__ inline void silu_with_derivative(Real x, Real* value, Real* derivative) {
  const Sigmoids<Real> s = sigmoids<Math>(x);
  *value = x * s.pos;
  *derivative = s.pos * fused(x, s.neg, Real(1));
}

}  // namespace tidegate::kernels
