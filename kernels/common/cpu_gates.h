#pragma once

// Sigmoids and the forget gates made of them, for the per-ISA units (see cpu_simd.h about what
// those may include).

#include "kernels/common/cpu_simd.h"

namespace tidegate::kernels::TIDEGATE_ISA {
namespace {

/// sigmoid(x) and sigmoid(-x), each to full relative precision (1 - sigmoid(x) would cancel).
template <class R>
struct Sigmoids {
  Vec<R> pos = Vec<R>{};
  Vec<R> neg = Vec<R>{};
  Vec<R> smaller = Vec<R>{};  // sigmoid(-|x|)
};

/// With e = exp(-|x|) and r = 1 / (1 + e) the two are r and e r.
template <class R>
TIDEGATE_INLINE Sigmoids<R> sigmoids_from(Vec<R> x, Vec<R> e, Vec<R> r) {
  const Vec<R> smaller = e * r;
  return {x < 0 ? smaller : r, x < 0 ? r : smaller, smaller};
}

template <class R>
TIDEGATE_INLINE Sigmoids<R> sigmoids(Vec<R> x) {
  const Vec<R> e = exp_of_nonpositive(minus_abs(x));
  return sigmoids_from<R>(x, e, R(1) / (e + R(1)));
}

/// Both arguments share one division: the denominators lie in (1, 2], so their product is harmless.
template <class R>
TIDEGATE_INLINE void sigmoids_of_two(Vec<R> x, Vec<R> y, Sigmoids<R>& of_x, Sigmoids<R>& of_y) {
  const Vec<R> ex = exp_of_nonpositive(minus_abs(x));
  const Vec<R> ey = exp_of_nonpositive(minus_abs(y));
  const Vec<R> dx = ex + R(1);
  const Vec<R> dy = ey + R(1);
  const Vec<R> both = R(1) / (dx * dy);
  of_x = sigmoids_from<R>(x, ex, both * dy);
  of_y = sigmoids_from<R>(y, ey, both * dx);
}

/// lambda = gamma + (1 - gamma) sigmoid(f), for f >= 0 as 1 - (1 - gamma) sigmoid(-f): an open gate
/// gives one exactly, and next to one no more than the last rounding is lost, which thousands of
/// steps would multiply.
template <class R>
TIDEGATE_INLINE Vec<R> forget_gate(Vec<R> f, const Sigmoids<R>& of_f, Vec<R> gamma,
                                   Vec<R> one_minus_gamma) {
  const auto shut = f < 0;  // one test for both: the sign bit of -0.0 would say otherwise
  return fma(shut ? one_minus_gamma : -one_minus_gamma, of_f.smaller, shut ? gamma : splat(R(1)));
}

}  // namespace
}  // namespace tidegate::kernels::TIDEGATE_ISA
