#pragma once

// What is exact enough to be applied thousands of times: numbers as unevaluated sums hi + lo
// (two-float and double-double numbers). The product of a long run of decays multiplies every state
// that passes through it, again and again: an error of one ulp that is the same for every run (a
// constant decay's) would add up over thousands of them. With lo, what is left is the rounding of
// the state itself.

#include <cstdint>
#include <cstring>

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

// ---- exp, sin and cos for decays and rotations that are applied again and again ----

/// 2^n where that is a normal number.
__host__ __device__ inline double power_of_two(int n) {
  const int64_t bits = int64_t{n + 1023} << 52;
  double power;
  memcpy(&power, &bits, sizeof(power));
  return power;
}

/// exp of |x| < 700 as a sum of two numbers, the second of which holds what the first has rounded
/// away (to a thousandth of its last place). The argument less a multiple of ln 2, in two doubles,
/// then the series, with what its leading terms round away. A decay or a phase is used again and
/// again, and the error of one ulp that CUDA's exp may have would be made at every step.
__host__ __device__ inline Precise<double> exp_by_series(Precise<double> x) {
  const double n = rint(x.hi * 1.4426950408889634074);
  const double first = fma(-n, 6.93147180369123816490e-01, x.hi);  // exact
  const double rest = n * 1.90821492927058770002e-10;
  const double r = first - rest;
  const double r_rest = ((first - r) - rest) + x.lo;
  double q = 1.0 / 6227020800.0;  // of the thirteenth power
  q = fma(q, r, 1.0 / 479001600.0);
  q = fma(q, r, 1.0 / 39916800.0);
  q = fma(q, r, 1.0 / 3628800.0);
  q = fma(q, r, 1.0 / 362880.0);
  q = fma(q, r, 1.0 / 40320.0);
  q = fma(q, r, 1.0 / 5040.0);
  q = fma(q, r, 1.0 / 720.0);
  q = fma(q, r, 1.0 / 120.0);
  q = fma(q, r, 1.0 / 24.0);
  q = fma(q, r, 1.0 / 6.0);
  const double square = r * r;
  const double square_rest = fma(r, r, -square);
  const double cube = fma(square * r, q, fma(0.5, square_rest, fma(r_rest, r, r_rest)));
  const double after = fma(0.5, square, cube);  // all terms after r
  const double after_rest = fma(0.5, square, -after) + cube;
  const double small = r + after;
  const double small_rest = (r - small) + after;
  const double sum = 1.0 + small;
  const double lost = ((1.0 - sum) + small) + (small_rest + after_rest);
  const double hi = sum + lost;
  const double scale = power_of_two(static_cast<int>(n));
  return {hi * scale, ((sum - hi) + lost) * scale};
}

/// exp of any x as a sum of two numbers.
__host__ __device__ inline Precise<double> exact_exp(Precise<double> x) {
  if (!(fabs(x.hi) < 700.0)) {  // out of range, or next to it
    return {exp(x.hi), 0.0};
  }
  return exp_by_series(x);
}

struct Turn {
  Precise<double> sine, cosine;
};

/// sin and cos of |angle| < 1e5 as sums of two numbers, the first within 0.71 units of the last
/// place, where CUDA's sincos errs by up to 1.4 (both measured for angles between -3 and 3):
/// whoever rotates a state by them makes the same error at every step. The angle less a multiple of
/// pi / 2, in two doubles, then fdlibm's polynomials with what their leading terms round away.
__host__ __device__ inline Turn turn_by_series(Precise<double> angle) {
  const double turns = rint(angle.hi * 0.63661977236758134308);
  const double first = fma(-turns, 1.57079632679489655800, angle.hi);  // exact
  const double product = turns * 6.12323399573676603587e-17;
  const double x = first - product;
  const double y =
      ((first - x - product) - fma(turns, 6.12323399573676603587e-17, -product)) + angle.lo;

  const double z = x * x;
  const double z_rest = fma(x, x, -z);
  double s = fma(z, 1.58969099521155010221e-10, -2.50507602534068634195e-08);
  s = fma(z, s, 2.75573137070700676789e-06);
  s = fma(z, s, -1.98412698298579493134e-04);
  s = fma(z, s, 8.33333333332248946124e-03);
  s = fma(z, s, -1.66666666666666324348e-01);
  const double sin_rest = fma(x * z, s, fma(-0.5 * z, y, y));
  const double sin_x = x + sin_rest;

  double c = fma(z, -1.13596475577881948265e-11, 2.08757232129817482790e-09);
  c = fma(z, c, -2.75573143513906633035e-07);
  c = fma(z, c, 2.48015872894767294178e-05);
  c = fma(z, c, -1.38888888888741095749e-03);
  c = fma(z, c, 4.16666666666666019037e-02);
  const double top = fma(-0.5, z, 1.0);
  const double top_rest = (1.0 - top) - 0.5 * z;
  const double cos_rest = fma(z * z, c, -x * y) + (top_rest - 0.5 * z_rest);
  const double cos_x = top + cos_rest;

  const Precise<double> sine = {sin_x, (x - sin_x) + sin_rest};
  const Precise<double> cosine = {cos_x, (top - cos_x) + cos_rest};
  const int quarter = static_cast<int>(turns) & 3;
  const Precise<double> a = quarter % 2 == 0 ? sine : cosine;
  const Precise<double> b = quarter % 2 == 0 ? cosine : sine;
  const double sign_a = quarter >= 2 ? -1.0 : 1.0;
  const double sign_b = quarter == 1 || quarter == 2 ? -1.0 : 1.0;
  return {{sign_a * a.hi, sign_a * a.lo}, {sign_b * b.hi, sign_b * b.lo}};
}

/// sin and cos of any angle as sums of two numbers.
__host__ __device__ inline Turn exact_turn(Precise<double> angle) {
  if (!(fabs(angle.hi) < 1e5)) {  // the remainder would need more words
    return {{sin(angle.hi), 0.0}, {cos(angle.hi), 0.0}};
  }
  return turn_by_series(angle);
}

__host__ __device__ inline void exact_sincos(double angle, double* sine, double* cosine) {
  const Turn turn = exact_turn({angle, 0.0});
  *sine = turn.sine.hi;
  *cosine = turn.cosine.hi;
}

}  // namespace tidegate::kernels
