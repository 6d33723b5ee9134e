#pragma once

// Loops over registers, and whole vectors of scratch memory: what the matrix products of the CPU
// kernels are written with, in the per-ISA units.

#include "kernels/common/cpu_simd.h"

namespace tidegate::kernels::TIDEGATE_ISA {
namespace {

template <int kIndex>
struct Constant {
  static constexpr int value = kIndex;
};
template <class Body, int... kIndex>
TIDEGATE_INLINE void call_with_each(Body& body, Indices<kIndex...>) {
  (body(Constant<kIndex>{}), ...);
}
/// body(Constant<0>{}), ..., so that arrays indexed by the constant stay in registers.
template <int kCount, class Body>
TIDEGATE_INLINE void unrolled(Body body) {
  call_with_each(body, typename IndicesUpTo<kCount>::Type{});
}

/// `value` in every lane. (x - 0 is x, which the compiler knows; of x + 0 it is not sure.)
template <class R>
TIDEGATE_INLINE Vec<R> broadcast(R value) {
  return value - Vec<R>{};
}

template <class R>
TIDEGATE_INLINE Vec<R> row_vector(const R* from) {
  return load<R>(from, Whole{});
}
template <class R>
TIDEGATE_INLINE void set_row_vector(R* to, Vec<R> v) {
  store<R>(to, v, Whole{});
}

// ---- Tiles of a matrix product in registers ---------------------------------------------------

#if defined(TIDEGATE_SIMD_AVX512)
constexpr int kTileRows = 8;  // of a tile in registers, two vectors wide
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileVectors = 2;

/// body(j, Constant<vectors>{}) over the columns [0, width), two vectors at a time where it goes.
template <class R, class Body>
TIDEGATE_INLINE void for_each_tile_column(int64_t width, Body body) {
  int64_t j = 0;
  for (; j + kTileVectors * kLanes<R> <= width; j += kTileVectors * kLanes<R>) {
    body(j, Constant<kTileVectors>{});
  }
  for (; j < width; j += kLanes<R>) body(j, Constant<1>{});
}

// ---- Sums over lanes ------------------------------------------------------------------------

template <class R, int... kFrom>
TIDEGATE_INLINE Vec<R> picked(Vec<R> a, Vec<R> b, Indices<kFrom...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFrom...);
#else
  return __builtin_shuffle(a, b, VecInt<R>{kFrom...});
#endif
}
/// Lane l is a[l] + a[l ^ step] where l has not the bit `step`, else the same of b.
template <class R, int kStep, int... kLane>
TIDEGATE_INLINE Vec<R> folded(Vec<R> a, Vec<R> b, Indices<kLane...>) {
  constexpr int kOfB = kLanes<R>;
  return picked<R>(a, b, Indices<(kLane & kStep ? kOfB + kLane : kLane)...>{}) +
         picked<R>(a, b, Indices<(kLane & kStep ? kOfB + (kLane ^ kStep) : kLane ^ kStep)...>{});
}
/// Lane l is the sum over the lanes of v[l]. Overwrites v.
template <class R, int kStep = 1>
TIDEGATE_INLINE Vec<R> sums_of_lanes(Vec<R>* v) {
  if constexpr (kStep == kLanes<R>) {
    return v[0];
  } else {
    unrolled<kLanes<R> / (2 * kStep)>([&](auto i) {
      v[i.value] = folded<R, kStep>(v[2 * i.value], v[2 * i.value + 1],
                                    typename IndicesUpTo<kLanes<R>>::Type{});
    });
    return sums_of_lanes<R, 2 * kStep>(v);
  }
}

}  // namespace
}  // namespace tidegate::kernels::TIDEGATE_ISA
