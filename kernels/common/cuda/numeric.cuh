#pragma once

// Numbers and vectors of numbers as the CUDA kernels see them: how elements lie in memory (Pack),
// and what they become in registers (float, double or Complex of either).

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tidegate::kernels {

constexpr int kWarpSize = 32;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class Real>
struct Complex {
  Real re, im;
};

template <class Real>
__device__ inline Complex<Real> operator+(Complex<Real> a, Complex<Real> b) {
  return {a.re + b.re, a.im + b.im};
}
template <class Real>
__device__ inline Complex<Real> operator-(Complex<Real> a, Complex<Real> b) {
  return {a.re - b.re, a.im - b.im};
}
template <class Real>
__device__ inline Complex<Real> operator*(Real s, Complex<Real> a) {
  return {s * a.re, s * a.im};
}
template <class Real>
__device__ inline Complex<Real> operator*(Complex<Real> a, Complex<Real> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class Real>
__device__ inline Complex<Real> conj(Complex<Real> a) {
  return {a.re, -a.im};
}
__device__ inline float conj(float a) { return a; }
__device__ inline double conj(double a) { return a; }

/// a * b + c, for reals and complex numbers alike.
__device__ inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double fused(double a, double b, double c) { return fma(a, b, c); }
template <class Real>
__device__ inline Complex<Real> fused(Complex<Real> a, Complex<Real> b, Complex<Real> c) {
  return {fused(a.re, b.re, fused(-a.im, b.im, c.re)), fused(a.re, b.im, fused(a.im, b.re, c.im))};
}
template <class Real>
__device__ inline Complex<Real> fused(Real a, Complex<Real> b, Complex<Real> c) {
  return {fused(a, b.re, c.re), fused(a, b.im, c.im)};
}

/// x^n for n of at least one.
template <int n, class Number>
__device__ inline Number power(Number x) {
  if constexpr (n == 1) {
    return x;
  } else {
    const Number half = power<n / 2>(x);
    return n % 2 == 0 ? half * half : half * half * x;
  }
}

/// The inner product of two numbers as vectors of the plane: Re(conj(a) * b).
__device__ inline float dot(float a, float b) { return a * b; }
__device__ inline double dot(double a, double b) { return a * b; }
template <class Real>
__device__ inline Real dot(Complex<Real> a, Complex<Real> b) {
  return fused(a.re, b.re, a.im * b.im);
}

template <class Number>
__device__ inline Number one();
template <>
__device__ inline float one<float>() {
  return 1.0f;
}
template <>
__device__ inline double one<double>() {
  return 1.0;
}
template <>
__device__ inline Complex<float> one<Complex<float>>() {
  return {1.0f, 0.0f};
}
template <>
__device__ inline Complex<double> one<Complex<double>>() {
  return {1.0, 0.0};
}

/// The register type of a memory type.
template <class T>
struct Register {
  using type = float;
};
template <>
struct Register<double> {
  using type = double;
};
template <class Real>
struct Register<Complex<Real>> {
  using type = Complex<Real>;
};

/// The real type of a real or complex number.
template <class Number>
struct RealOfNumber {
  using type = Number;
};
template <class Real>
struct RealOfNumber<Complex<Real>> {
  using type = Real;
};
template <class Number>
using RealOf = typename RealOfNumber<Number>::type;

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }
template <class Real>
__device__ inline Complex<Real> widen(Complex<Real> x) {
  return x;
}

template <class T>
__device__ inline T narrow(typename Register<T>::type x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

template <int kBytes>
struct BitsOf;
template <>
struct BitsOf<2> {
  using type = unsigned short;
};
template <>
struct BitsOf<4> {
  using type = unsigned int;
};
template <>
struct BitsOf<8> {
  using type = uint2;
};
template <>
struct BitsOf<16> {
  using type = uint4;
};

/// kVec adjacent elements as one memory access of kVec * sizeof(T) bytes. They are kept as they lie
/// in memory and taken apart where they are used: two bf16 then wait in one register, not in two.
template <class T, int kVec>
struct Pack {
  using Bits = typename BitsOf<sizeof(T) * kVec>::type;
  Bits bits;

  __device__ auto get(int v) const {
    T elements[kVec];
    memcpy(elements, &bits, sizeof(bits));
    return widen(elements[v]);
  }
};
template <>
__device__ inline auto Pack<__nv_bfloat16, 2>::get(int v) const {
  return __uint_as_float(v == 0 ? bits << 16 : bits & 0xffff0000u);
}

template <class T, int kVec>
__device__ inline Pack<T, kVec> pack_elements(const T (&elements)[kVec]) {
  Pack<T, kVec> p;
  memcpy(&p.bits, elements, sizeof(p.bits));
  return p;
}

template <class T, int kVec, class Number>
__device__ inline Pack<T, kVec> pack(const Number (&x)[kVec]) {
  T elements[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    elements[v] = narrow<T>(x[v]);
  }
  return pack_elements(elements);
}
// Two 16-bit conversions are one instruction.
template <>
__device__ inline Pack<__nv_bfloat16, 2> pack<__nv_bfloat16, 2, float>(const float (&x)[2]) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x[0], x[1]);
  return pack_elements({both.x, both.y});
}
template <>
__device__ inline Pack<__half, 2> pack<__half, 2, float>(const float (&x)[2]) {
  const __half2 both = __floats2half2_rn(x[0], x[1]);
  return pack_elements({both.x, both.y});
}

/// x *= factor where `condition` holds, in one predicated instruction and without a copy of x.
__device__ inline void multiply_if(bool condition, float& x, float factor) {
  asm("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p mul.f32 %0, %0, %1;\n\t}"
      : "+f"(x)
      : "f"(factor), "r"(static_cast<int>(condition)));
}

/// Loads what is read once: it passes the caches by without displacing what others will reuse.
template <class T, int kVec>
__device__ inline Pack<T, kVec> load_streaming(const void* p) {
  return {__ldcs(static_cast<const typename Pack<T, kVec>::Bits*>(p))};
}

}  // namespace tidegate::kernels
