#pragma once

// What norms and the gated linear unit share on the CPU, for the per-ISA units (see cpu_simd.h
// about what those may include).

#include "kernels/common/cpu_gates.h"
#include "kernels/common/cpu_types.h"
#include "kernels/norm/cpu/norm_kernels.h"

namespace tidegate::kernels::norm::TIDEGATE_ISA {
namespace {

using namespace kernels::TIDEGATE_ISA;

/// The row's first element in a tensor, which may have no data.
template <class E, class Params>
TIDEGATE_INLINE E* row_in(const Params& p, const HeadSeries& series, int64_t row) {
  if (series.data == nullptr) return nullptr;
  const int64_t head = row % p.heads, token = row / p.heads;
  return static_cast<E*>(series.data) + token / p.time * series.stride_b +
         token % p.time * series.stride_t + head * series.stride_h;
}

/// act(x) and its derivative.
template <class R>
struct Activated {
  Vec<R> value, derivative;
};

template <class R>
TIDEGATE_INLINE Activated<R> activated(Activation kind, Vec<R> x) {
  if (kind == Activation::kNone) return {x, splat(R(1))};
  const Sigmoids<R> s = sigmoids<R>(x);
  if (kind == Activation::kSigmoid) return {s.pos, s.pos * s.neg};
  return {x * s.pos, s.pos * fma(x, s.neg, splat(R(1)))};
}

/// x, and zero in the lanes past the end of a row.
template <class R, class Extent>
TIDEGATE_INLINE Vec<R> within(Vec<R> x, Extent extent) {
  if constexpr (!Extent::kIsWhole) {
    for (int i = extent.count; i < kLanes<R>; ++i) x[i] = R(0);
  }
  return x;
}

/// x as it is rounded: the compiler may not make it part of an FMA, which has more digits.
template <class V>
TIDEGATE_INLINE V rounded(V x) {
#if defined(TIDEGATE_SIMD_AVX512)
  asm("" : "+v"(x));
#elif defined(__SSE2__)
  asm("" : "+x"(x));
#endif
  return x;
}

template <class R>
TIDEGATE_INLINE R sum_of_lanes(Vec<R> x) {
  R sum = 0;
  for (int i = 0; i < kLanes<R>; ++i) sum += x[i];
  return sum;
}

TIDEGATE_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
TIDEGATE_INLINE double square_root(double x) { return __builtin_sqrt(x); }

}  // namespace
}  // namespace tidegate::kernels::norm::TIDEGATE_ISA
