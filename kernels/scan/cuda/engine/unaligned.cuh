#pragma once

// An element type for rows that begin at any element: 16-bit data with odd D, or in a view that
// begins in the middle of a pack. Such data is another type to an Op, and the Op the same; how rows
// of it travel is in unaligned_ring.cuh.

#include "kernels/common/cuda/numeric.cuh"

namespace tidegate::kernels {

/// A T whose rows may begin at any multiple of its own size.
template <class T>
struct Unaligned {
  T value;
};
/// A T whose rows are multiples of a thread's pack apart, as most data are.
template <class T>
using Aligned = T;

template <class T>
constexpr bool kIsUnaligned = false;
template <class T>
constexpr bool kIsUnaligned<Unaligned<T>> = true;

template <class T>
struct Register<Unaligned<T>> : Register<T> {};
template <class T, int kVec>
struct Pack<Unaligned<T>, kVec> : Pack<T, kVec> {};

template <class T, int kVec, class Number>
  requires kIsUnaligned<T>
__device__ inline Pack<T, kVec> pack(const Number (&x)[kVec]) {
  Pack<T, kVec> p;
  p.bits = pack<decltype(T::value), kVec>(x).bits;
  return p;
}
template <>
__device__ inline Unaligned<__nv_bfloat16> narrow<Unaligned<__nv_bfloat16>>(float x) {
  return {narrow<__nv_bfloat16>(x)};
}
template <>
__device__ inline Unaligned<__half> narrow<Unaligned<__half>>(float x) {
  return {narrow<__half>(x)};
}

}  // namespace tidegate::kernels
