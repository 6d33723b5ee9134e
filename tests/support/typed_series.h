#pragma once

// Host tensors of any dtype with any strides, for tests on raw pointers.

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/common/time_series.h"

namespace tidegate::testing {

using kernels::DType;

inline double half_to_double(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double sign = (bits >> 15) != 0 ? -1 : 1;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

inline uint16_t double_to_half(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  value = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (value >= 65520) return sign | 0x7c00;
  const int exponent = value == 0 ? -14 : std::max(std::ilogb(value), -14);
  const double units = std::nearbyint(std::ldexp(value, 10 - exponent));  // 0 ... 2048
  const int biased = units < 1024 ? 0 : exponent + 15;
  return sign | static_cast<uint16_t>(biased == 0 ? units : (biased << 10) + units - 1024);
}

inline double bfloat16_to_double(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t double_to_bfloat16(double value) {
  const float narrow = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof bits);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/// One number at `to`, an element of `dtype`; complex ones are written whole.
inline void encode(void* to, DType dtype, std::complex<double> value) {
  const auto put = [to](auto number) { std::memcpy(to, &number, sizeof number); };
  switch (dtype) {
    case DType::kFloat32:
      return put(static_cast<float>(value.real()));
    case DType::kFloat64:
      return put(value.real());
    case DType::kBFloat16:
      return put(double_to_bfloat16(value.real()));
    case DType::kFloat16:
      return put(double_to_half(value.real()));
    case DType::kComplex64:
      return put(std::complex<float>(value));
    case DType::kComplex128:
      return put(value);
  }
}

inline std::complex<double> decode(const void* from, DType dtype) {
  const auto get = [from](auto number) {
    std::memcpy(&number, from, sizeof number);
    return number;
  };
  switch (dtype) {
    case DType::kFloat32:
      return get(0.0f);
    case DType::kFloat64:
      return get(0.0);
    case DType::kBFloat16:
      return bfloat16_to_double(get(uint16_t{}));
    case DType::kFloat16:
      return half_to_double(get(uint16_t{}));
    case DType::kComplex64:
      return get(std::complex<float>());
    case DType::kComplex128:
      return get(std::complex<double>());
  }
  return 0;
}

/// `value` as it comes back from memory.
inline std::complex<double> rounded(DType dtype, std::complex<double> value) {
  char bytes[16];
  encode(bytes, dtype, value);
  return decode(bytes, dtype);
}

/// A [B, T, columns] tensor inside a larger buffer whose every byte is 0xff at first: NaN in all
/// dtypes, and a canary where nothing may be written.
class TypedSeries {
 public:
  TypedSeries() = default;
  /// Rows are `gap` elements apart, and the data begins `shift` elements into the buffer.
  TypedSeries(DType dtype, int64_t batch, int64_t time, int64_t columns, int64_t gap = 0,
              int64_t shift = 0)
      : dtype_(dtype),
        time_(time),
        columns_(columns),
        stride_t_(columns + gap),
        shift_(shift),
        bytes_((shift + batch * time * (columns + gap) + gap) * element_size(dtype) + kAlign, 0xff),
        tokens_(batch * time) {}

  int64_t tokens() const { return tokens_; }
  int64_t columns() const { return columns_; }
  DType dtype() const { return dtype_; }

  void* at(int64_t token, int64_t column) { return base() + offset(token, column); }
  const void* at(int64_t token, int64_t column) const {
    return const_cast<TypedSeries*>(this)->at(token, column);
  }
  std::complex<double> get(int64_t token, int64_t column) const {
    return decode(at(token, column), dtype_);
  }
  void set(int64_t token, int64_t column, std::complex<double> value) {
    encode(at(token, column), dtype_, value);
  }

  kernels::TimeSeries series() { return {at(0, 0), time_ * stride_t_, stride_t_, dtype_}; }

  /// All of the buffer, what surrounds the elements included.
  std::vector<unsigned char>& buffer() { return bytes_; }

  /// Back to all 0xff.
  void poison() { std::fill(bytes_.begin(), bytes_.end(), 0xff); }

  /// Whether the bytes that belong to no element are as they were.
  bool surroundings_untouched() const {
    std::vector<unsigned char> copy = bytes_;
    const int64_t begin = reinterpret_cast<const unsigned char*>(at(0, 0)) - bytes_.data();
    for (int64_t token = 0; token < tokens_; ++token) {
      const int64_t row = begin + token * stride_t_ * element_size(dtype_);
      std::fill_n(copy.begin() + row, columns_ * element_size(dtype_), 0xff);
    }
    for (unsigned char byte : copy) {
      if (byte != 0xff) return false;
    }
    return true;
  }

  bool same_bits(const TypedSeries& other) const {
    for (int64_t token = 0; token < tokens_; ++token) {
      if (std::memcmp(at(token, 0), other.at(token, 0), columns_ * element_size(dtype_)) != 0) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kAlign = 64;

  int64_t offset(int64_t token, int64_t column) const {
    return (shift_ + token * stride_t_ + column) * element_size(dtype_);
  }
  unsigned char* base() {
    const uintptr_t address = reinterpret_cast<uintptr_t>(bytes_.data());
    return bytes_.data() + (kAlign - address % kAlign) % kAlign;
  }

  DType dtype_ = DType::kFloat32;
  int64_t time_ = 0;
  int64_t columns_ = 0;
  int64_t stride_t_ = 0;
  int64_t shift_ = 0;
  std::vector<unsigned char> bytes_;
  int64_t tokens_ = 0;
};

}  // namespace tidegate::testing
