#pragma once

// Numbers as unevaluated sums hi + lo (two-float and double-double numbers). The product of a long
// run of decays multiplies every state that passes through it, again and again: an error of one ulp
// that is the same for every run (a constant decay's) would add up over thousands of them. With lo,
// what is left is the rounding of the state itself.

#include "kernels/common/cuda/numeric.cuh"

namespace tidegate::kernels {

template <class Number>
struct Precise {
  Number hi, lo;
};

/// hi + lo = a * b, exactly.
template <class Real>
__device__ inline Precise<Real> exact_product(Real a, Real b) {
  const Real p = a * b;
  return {p, fused(a, b, -p)};
}

/// hi + lo = a + b, exactly.
template <class Real>
__device__ inline Precise<Real> exact_sum(Real a, Real b) {
  const Real s = a + b;
  const Real bb = s - a;
  return {s, (a - (s - bb)) + (b - bb)};
}

template <class Real>
__device__ inline Precise<Real> operator*(Precise<Real> a, Real b) {
  const Precise<Real> p = exact_product(a.hi, b);
  return {p.hi, fused(a.lo, b, p.lo)};
}

template <class Real>
__device__ inline Precise<Real> multiply(Precise<Real> a, Precise<Real> b) {
  const Precise<Real> p = exact_product(a.hi, b.hi);
  return {p.hi, fused(a.hi, b.lo, fused(a.lo, b.hi, p.lo))};
}

/// a * b + c * d.
template <class Real>
__device__ inline Precise<Real> sum_of_products(Precise<Real> a, Precise<Real> b, Precise<Real> c,
                                                Precise<Real> d) {
  const Precise<Real> p = multiply(a, b);
  const Precise<Real> q = multiply(c, d);
  const Precise<Real> s = exact_sum(p.hi, q.hi);
  return {s.hi, s.lo + (p.lo + q.lo)};
}

template <class Real>
__device__ inline Precise<Real> real_part(const Precise<Complex<Real>>& a) {
  return {a.hi.re, a.lo.re};
}
template <class Real>
__device__ inline Precise<Real> imaginary_part(const Precise<Complex<Real>>& a) {
  return {a.hi.im, a.lo.im};
}
template <class Real>
__device__ inline Precise<Complex<Real>> complex_of(Precise<Real> re, Precise<Real> im) {
  return {{re.hi, im.hi}, {re.lo, im.lo}};
}

template <class Real>
__device__ inline Precise<Complex<Real>> multiply(const Precise<Complex<Real>>& a,
                                                  const Precise<Complex<Real>>& b) {
  const Precise<Real> ar = real_part(a), ai = imaginary_part(a);
  const Precise<Real> br = real_part(b), bi = imaginary_part(b);
  return complex_of(sum_of_products(ar, br, {-ai.hi, -ai.lo}, bi), sum_of_products(ar, bi, ai, br));
}

template <class Real>
__device__ inline Precise<Complex<Real>> operator*(const Precise<Complex<Real>>& a,
                                                   Complex<Real> b) {
  return multiply(a, Precise<Complex<Real>>{b, {}});
}

/// A sum over many steps. kPrecise keeps what its additions round away; 16-bit data do not need it.
template <class Number, bool kPrecise>
struct Sum {
  Precise<Number> total = {};

  __device__ void add(Number x) {
    if constexpr (kPrecise) {
      add_exactly(total, x);
    } else {
      total.hi = total.hi + x;
    }
  }
  __device__ Number value() const { return total.hi + total.lo; }

 private:
  template <class Real>
  static __device__ void add_exactly(Precise<Real>& total, Real x) {
    const Precise<Real> s = exact_sum(total.hi, x);
    total = {s.hi, total.lo + s.lo};
  }
  template <class Real>
  static __device__ void add_exactly(Precise<Complex<Real>>& total, Complex<Real> x) {
    Precise<Real> re = real_part(total), im = imaginary_part(total);
    add_exactly(re, x.re);
    add_exactly(im, x.im);
    total = complex_of(re, im);
  }
};

__device__ inline Precise<float> as_precise(float x) { return {x, 0.0f}; }
__device__ inline Precise<double> as_precise(double x) { return {x, 0.0}; }
template <class Real>
__device__ inline Precise<Complex<Real>> as_precise(Complex<Real> x) {
  return {x, {}};
}

__device__ inline bool is_zero(float x) { return x == 0.0f; }
__device__ inline bool is_zero(double x) { return x == 0.0; }
template <class Real>
__device__ inline bool is_zero(Complex<Real> x) {
  return x.re == Real(0) && x.im == Real(0);
}

/// a * s + x. A product that has overflowed leaves a state of zero alone, as its factors would.
template <class Number>
__device__ inline Number fused(const Precise<Number>& a, Number s, Number x) {
  return is_zero(s) ? x : fused(a.hi, s, fused(a.lo, s, x));
}

/// A double-double number as a sum of two Reals.
template <class Real>
__device__ inline Precise<Real> in_words_of(Precise<double> x) {
  const auto hi = static_cast<Real>(x.hi);
  return {hi, static_cast<Real>((x.hi - static_cast<double>(hi)) + x.lo)};
}

template <class Real>
__device__ inline Precise<Complex<Real>> conj(const Precise<Complex<Real>>& a) {
  return {conj(a.hi), conj(a.lo)};
}
template <class Real>
__device__ inline Precise<Real> conj(const Precise<Real>& a) {
  return a;
}

}  // namespace tidegate::kernels
