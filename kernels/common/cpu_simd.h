#pragma once

// Vectors of float or double as wide as the instruction set that the including unit is compiled
// for, with the few operations that the CPU kernels need.
//
// Only the per-ISA units (X/cpu/X_isa.cpp) include this. Everything has
// internal linkage, so that the linker can never merge a function compiled for AVX-512 with its
// namesake elsewhere; for the same reason those units use no inline functions of the standard
// library and none of kernels/.
//
// Products that feed a sum are written as fma(): with the compiler left to contract them, the last
// bit of a channel could depend on whether it lies in a whole vector or in a row's tail.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define TIDEGATE_ISA avx512
#define TIDEGATE_SIMD_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TIDEGATE_ISA avx2
#define TIDEGATE_SIMD_AVX2
#else
#define TIDEGATE_ISA generic
#endif

#if defined(__SSE2__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own "undefined" vectors are initialised with themselves, which it then warns about.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

#define TIDEGATE_INLINE inline __attribute__((always_inline))
#define TIDEGATE_NOINLINE __attribute__((noinline))

namespace tidegate::kernels::TIDEGATE_ISA {
namespace {

#if defined(TIDEGATE_SIMD_AVX512)
constexpr int kVectorBytes = 64;
#elif defined(TIDEGATE_SIMD_AVX2)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class R>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float Real __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
};
template <>
struct VectorOf<double> {
  typedef double Real __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
};

template <class R>
using Vec = typename VectorOf<R>::Real;
template <class R>
using VecInt = typename VectorOf<R>::Int;
using VecF = Vec<float>;
using VecD = Vec<double>;
using VecHalf = VectorOf<float>::Half;
template <class R>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(R));

template <class R>
TIDEGATE_INLINE Vec<R> splat(R value) {
  // A difference, which is the value also where that is -0, so that the compiler leaves it out:
  // next to FMAs, a sum for each splat of the gated RNN's products took half of their time.
  return value - Vec<R>{};
}

// ---- Arithmetic whose best instruction depends on the set -----------------------------------

#if defined(TIDEGATE_SIMD_AVX512)
TIDEGATE_INLINE VecF fma(VecF a, VecF b, VecF c) { return (VecF)_mm512_fmadd_ps(a, b, c); }
TIDEGATE_INLINE VecD fma(VecD a, VecD b, VecD c) { return (VecD)_mm512_fmadd_pd(a, b, c); }
/// max(floor, x), and NaN where x is NaN (the instruction returns its second operand then).
TIDEGATE_INLINE VecF at_least(VecF floor, VecF x) { return (VecF)_mm512_max_ps(floor, x); }
TIDEGATE_INLINE VecD at_least(VecD floor, VecD x) { return (VecD)_mm512_max_pd(floor, x); }
#elif defined(TIDEGATE_SIMD_AVX2)
TIDEGATE_INLINE VecF fma(VecF a, VecF b, VecF c) { return (VecF)_mm256_fmadd_ps(a, b, c); }
TIDEGATE_INLINE VecD fma(VecD a, VecD b, VecD c) { return (VecD)_mm256_fmadd_pd(a, b, c); }
TIDEGATE_INLINE VecF at_least(VecF floor, VecF x) { return (VecF)_mm256_max_ps(floor, x); }
TIDEGATE_INLINE VecD at_least(VecD floor, VecD x) { return (VecD)_mm256_max_pd(floor, x); }
#else
template <class V>
TIDEGATE_INLINE V fma(V a, V b, V c) {
  return a * b + c;
}
template <class V>
TIDEGATE_INLINE V at_least(V floor, V x) {
  return x < floor ? floor : x;
}
#endif

/// -|x|
TIDEGATE_INLINE VecF minus_abs(VecF x) { return (VecF)((VecInt<float>)x | INT32_MIN); }
TIDEGATE_INLINE VecD minus_abs(VecD x) { return (VecD)((VecInt<double>)x | INT64_MIN); }

/// exp(x) for x <= 0 within about 1 ulp; 0 below the smallest normal number; NaN for NaN.
/// x = n ln2 + r, |r| <= ln2 / 2; exp(r) = 1 + (r + r^2 q(r)), in this order: next to one the sum
/// rounds once and without bias, which thousands of decays would multiply. n is rounded by
/// adding 1.5 * 2^23, which leaves it in the low bits, from where a shift moves it into the
/// exponent. At the floor n is minus the bias, so that the scale becomes exactly zero.
TIDEGATE_INLINE VecF exp_of_nonpositive(VecF x) {
  x = at_least(splat(-88.0f), x);
  const VecF magic = splat(12582912.0f);
  const VecF shifted = fma(x, splat(1.44269504f), magic);
  const VecF n = shifted - magic;
  // ln2 in two parts, the first with so few digits that n times it is exact.
  const VecF r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  VecF q = splat(0.00139261836f);
  q = fma(q, r, splat(0.00836317905f));
  q = fma(q, r, splat(0.0416665546f));
  q = fma(q, r, splat(0.16666577f));
  q = fma(q, r, splat(0.5f));
  const VecF scale = (VecF)(((VecInt<float>)shifted << 23) + 0x3f800000);
  return (fma(r * r, q, r) + 1.0f) * scale;
}

TIDEGATE_INLINE VecD exp_of_nonpositive(VecD x) {
  x = at_least(splat(-709.0), x);
  const VecD magic = splat(6755399441055744.0);  // 1.5 * 2^52
  const VecD shifted = fma(x, splat(1.4426950408889634), magic);
  const VecD n = shifted - magic;
  const VecD r =
      fma(n, splat(-1.90821492927058770002e-10), fma(n, splat(-6.93147180369123816490e-01), x));
  VecD q = splat(2.510038549551032e-08);
  q = fma(q, r, splat(2.7620088445409746e-07));
  q = fma(q, r, splat(2.7557268459997064e-06));
  q = fma(q, r, splat(2.4801521295954376e-05));
  q = fma(q, r, splat(0.00019841269863053618));
  q = fma(q, r, splat(0.0013888888917213717));
  q = fma(q, r, splat(0.0083333333333300615));
  q = fma(q, r, splat(0.041666666666624129));
  q = fma(q, r, splat(0.16666666666666669));
  q = fma(q, r, splat(0.5));
  const VecD scale = (VecD)(((VecInt<double>)shifted << 52) + 0x3ff0000000000000);
  return (fma(r * r, q, r) + 1.0) * scale;
}

// ---- Complex numbers as neighbouring lanes ---------------------------------------------------

template <int... kIndex>
struct Indices {};
template <int kCount, int... kIndex>
struct IndicesUpTo : IndicesUpTo<kCount - 1, kCount - 1, kIndex...> {};
template <int... kIndex>
struct IndicesUpTo<0, kIndex...> {
  using Type = Indices<kIndex...>;
};

template <class R, int... kFrom>
TIDEGATE_INLINE Vec<R> permuted(Vec<R> v, Indices<kFrom...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, kFrom...);
#else
  return __builtin_shuffle(v, VecInt<R>{kFrom...});
#endif
}
template <class R, int... kIndex>
TIDEGATE_INLINE Vec<R> real_lanes(Vec<R> v, Indices<kIndex...>) {
  return permuted<R>(v, Indices<(kIndex & ~1)...>{});
}
template <class R, int... kIndex>
TIDEGATE_INLINE Vec<R> imaginary_lanes(Vec<R> v, Indices<kIndex...>) {
  return permuted<R>(v, Indices<(kIndex | 1)...>{});
}
template <class R, int... kIndex>
TIDEGATE_INLINE Vec<R> swapped_lanes(Vec<R> v, Indices<kIndex...>) {
  return permuted<R>(v, Indices<(kIndex ^ 1)...>{});
}
template <class R, int... kIndex>
TIDEGATE_INLINE Vec<R> alternating_signs(Indices<kIndex...>) {
  return Vec<R>{((kIndex & 1) != 0 ? R(1) : R(-1))...};
}

/// a * b + c for numbers [re, im, re, im, ...].
template <class R>
TIDEGATE_INLINE Vec<R> complex_fma(Vec<R> a, Vec<R> b, Vec<R> c) {
  using All = typename IndicesUpTo<kLanes<R>>::Type;
  const Vec<R> turned = swapped_lanes<R>(b, All{}) * alternating_signs<R>(All{});  // i b
  return fma(imaginary_lanes<R>(a, All{}), turned, fma(real_lanes<R>(a, All{}), b, c));
}

/// conj(a) * b.
template <class R>
TIDEGATE_INLINE Vec<R> complex_conj_mul(Vec<R> a, Vec<R> b) {
  using All = typename IndicesUpTo<kLanes<R>>::Type;
  const Vec<R> turned = swapped_lanes<R>(b, All{}) * alternating_signs<R>(All{});  // i b
  return fma(-imaginary_lanes<R>(a, All{}), turned, real_lanes<R>(a, All{}) * b);
}

// ---- 16-bit types ---------------------------------------------------------------------------

#if defined(TIDEGATE_SIMD_AVX512)
TIDEGATE_INLINE VecF widened(VecHalf v, BFloat16) {
  return (VecF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
}
TIDEGATE_INLINE VecF widened(VecHalf v, Float16) { return (VecF)_mm512_cvtph_ps((__m256i)v); }
TIDEGATE_INLINE VecHalf low_halves(VecInt<float> v) {
  return (VecHalf)_mm512_cvtepi32_epi16((__m512i)v);
}
TIDEGATE_INLINE VecHalf narrowed(VecF v, Float16) {
  return (VecHalf)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(TIDEGATE_SIMD_AVX2)
TIDEGATE_INLINE VecF widened(VecHalf v, BFloat16) {
  return (VecF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)v), 16);
}
TIDEGATE_INLINE VecF widened(VecHalf v, Float16) { return (VecF)_mm256_cvtph_ps((__m128i)v); }
TIDEGATE_INLINE VecHalf low_halves(VecInt<float> v) {
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (VecHalf)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
}
TIDEGATE_INLINE VecHalf narrowed(VecF v, Float16) {
  return (VecHalf)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
}
#else
TIDEGATE_INLINE VecF widened(VecHalf v, BFloat16) {
  VecInt<float> bits;
  for (int i = 0; i < kLanes<float>; ++i) bits[i] = static_cast<int32_t>(uint32_t{v[i]} << 16);
  return (VecF)bits;
}
TIDEGATE_INLINE VecHalf low_halves(VecInt<float> v) {
  VecHalf result;
  for (int i = 0; i < kLanes<float>; ++i) result[i] = static_cast<uint16_t>(v[i]);
  return result;
}

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

/// Exact, subnormal numbers too, whatever the processor does with those of its own.
inline float float_from_half(uint16_t half) {
  const uint32_t magnitude = uint32_t{half} & 0x7fff;
  const uint32_t sign = (uint32_t{half} & 0x8000) << 16;
  if (magnitude >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x0400) return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
  return float_from_bits(sign | bits_of_float(static_cast<float>(magnitude) * 0x1p-24f));
}

/// To nearest, ties to even. Adding a power of two 2^10 times as large as the wanted spacing makes
/// the addition itself round there.
inline uint16_t half_from_float(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more
  if (magnitude < 0x38800000) {                                              // below 2^-14
    const float rounded = float_from_bits(magnitude) + 0.5f;                 // spacing 2^-24
    return static_cast<uint16_t>(sign | (bits_of_float(rounded) - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
}

TIDEGATE_INLINE VecF widened(VecHalf v, Float16) {
  VecF result;
  for (int i = 0; i < kLanes<float>; ++i) result[i] = float_from_half(v[i]);
  return result;
}
TIDEGATE_INLINE VecHalf narrowed(VecF v, Float16) {
  VecHalf result;
  for (int i = 0; i < kLanes<float>; ++i) result[i] = half_from_float(v[i]);
  return result;
}
#endif

/// To nearest, ties to even; NaN stays NaN, which the rounding could otherwise carry into infinity.
TIDEGATE_INLINE VecHalf narrowed(VecF v, BFloat16) {
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  const Bits bits = (Bits)v;
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits quiet = (bits >> 16) | 0x40;
  return low_halves((VecInt<float>)(v == v ? rounded : quiet));
}

// ---- Loads and stores -----------------------------------------------------------------------

/// A whole vector, or the first `count` lanes at the end of a row (loads fill up with zeros).
struct Whole {
  static constexpr bool kIsWhole = true;
  int count = 0;
};
struct Part {
  static constexpr bool kIsWhole = false;
  int count = 0;
};

template <class V, class E, class Extent>
TIDEGATE_INLINE V load_bits(const E* from, Extent extent) {
  V v{};
  if constexpr (Extent::kIsWhole) {
    std::memcpy(&v, from, sizeof v);
  } else {
    std::memcpy(&v, from, static_cast<size_t>(extent.count) * sizeof(E));
  }
  return v;
}

template <class R, class Extent>
TIDEGATE_INLINE Vec<R> load(const R* from, Extent extent) {
  return load_bits<Vec<R>>(from, extent);
}
template <class R, class Extent>
TIDEGATE_INLINE VecF load(const BFloat16* from, Extent extent) {
  return widened(load_bits<VecHalf>(from, extent), BFloat16{});
}
template <class R, class Extent>
TIDEGATE_INLINE VecF load(const Float16* from, Extent extent) {
  return widened(load_bits<VecHalf>(from, extent), Float16{});
}

/// Writes a whole vector past the caches; `to` is aligned to the vector.
template <class V>
TIDEGATE_INLINE void stream_bits(void* to, V v) {
#if defined(TIDEGATE_SIMD_AVX512)
  if constexpr (sizeof(V) == 64) {
    _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)v);
    return;
  }
#endif
#if defined(TIDEGATE_SIMD_AVX512) || defined(TIDEGATE_SIMD_AVX2)
  if constexpr (sizeof(V) == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)v);
    return;
  }
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16) {
    _mm_stream_si128(static_cast<__m128i*>(to), (__m128i)v);
    return;
  }
#endif
  std::memcpy(to, &v, sizeof v);
}

template <class V, class E, class Extent>
TIDEGATE_INLINE void store_bits(E* to, V v, Extent extent, bool stream) {
  if constexpr (!Extent::kIsWhole) {
    std::memcpy(to, &v, static_cast<size_t>(extent.count) * sizeof(E));
  } else if (stream) {
    stream_bits(to, v);
  } else {
    std::memcpy(to, &v, sizeof v);
  }
}

template <class R, class Extent>
TIDEGATE_INLINE void store(R* to, Vec<R> v, Extent extent, bool stream = false) {
  store_bits(to, v, extent, stream);
}
template <class R, class Extent>
TIDEGATE_INLINE void store(BFloat16* to, VecF v, Extent extent, bool stream = false) {
  store_bits(to, narrowed(v, BFloat16{}), extent, stream);
}
template <class R, class Extent>
TIDEGATE_INLINE void store(Float16* to, VecF v, Extent extent, bool stream = false) {
  store_bits(to, narrowed(v, Float16{}), extent, stream);
}

/// Orders streamed stores before whatever tells other threads that the data is there.
TIDEGATE_INLINE void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/// While it lives, this thread treats subnormal numbers as zero (below 1.2e-38, or 2.2e-308 for
/// double). A state or a gradient that decays for long enough ends among them and, because a small
/// one times 0.9 rounds to itself, stays there: ten times slower a step on x86.
/// The compiler does not know that this changes what arithmetic does, so the arithmetic has to be
/// in a function that is not inlined.
class SubnormalsAreZero {
 public:
#if defined(__SSE2__)
  SubnormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushResults | kZeroInputs); }
  ~SubnormalsAreZero() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushResults = 0x8000;
  static constexpr unsigned kZeroInputs = 0x0040;
  unsigned before_;
#endif
};

/// body(j, extent) for the vectors that cover [0, count), the whole ones from the first to the last
/// or the other way round.
template <class R, class Body>
TIDEGATE_INLINE void for_each_vector(int64_t count, bool descending, Body body) {
  const int64_t whole = count / kLanes<R>;
  const int64_t stride = descending ? -kLanes<R> : kLanes<R>;
  int64_t j = descending ? (whole - 1) * kLanes<R> : 0;
  for (int64_t i = 0; i < whole; ++i, j += stride) body(j, Whole{});
  const int64_t rest = whole * kLanes<R>;
  if (rest < count) body(rest, Part{static_cast<int>(count - rest)});
}

template <class R, class Body>
TIDEGATE_INLINE void for_each_vector(int64_t count, Body body) {
  for_each_vector<R>(count, false, body);
}

}  // namespace
}  // namespace tidegate::kernels::TIDEGATE_ISA
