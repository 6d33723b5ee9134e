#pragma once

#include <cstdint>

namespace tidegate::kernels {

/// Element types that cross the boundary between `src/` and `kernels/`.
enum class DType : uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16, kComplex64, kComplex128 };

constexpr bool is_16_bit(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

/// The type in which a recurrence over `dtype` accumulates and keeps its state:
/// fp32 for 16- and 32-bit reals, and itself for everything wider.
constexpr DType state_dtype(DType dtype) { return is_16_bit(dtype) ? DType::kFloat32 : dtype; }

constexpr bool is_complex(DType dtype) {
  return dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

constexpr int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kComplex64:
      return "complex64";
    case DType::kComplex128:
      return "complex128";
  }
  return "unknown";
}

}  // namespace tidegate::kernels
