#include "kernels/common/limits.h"

#include <cstdarg>
#include <cstdio>

namespace tidegate::kernels {

const char* unsupported(const char* format, ...) {
  thread_local char text[200];
  std::va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  return text;
}

const char* complex_unsupported(const char* name, DType dtype) {
  return is_complex(dtype) ? unsupported("%s must be real, got %s", name, dtype_name(dtype))
                           : nullptr;
}

const char* dtype_unsupported(const char* name, DType dtype, const char* like, DType data) {
  return dtype != data ? unsupported("%s must have %s's dtype, %s, got %s", name, like,
                                     dtype_name(data), dtype_name(dtype))
                       : nullptr;
}

const char* gate_unsupported(const char* name, DType dtype, const char* like, DType data) {
  return !gate_dtype_fits(dtype, data)
             ? unsupported("%s must have %s's dtype, %s, or that of the state, %s, got %s", name,
                           like, dtype_name(data), dtype_name(state_dtype(data)), dtype_name(dtype))
             : nullptr;
}

const char* layout_unsupported(const SequenceLayout& layout) {
  const auto batch = static_cast<long long>(layout.batch);
  const auto time = static_cast<long long>(layout.time);
  const auto sequences = static_cast<long long>(layout.sequences);
  if (layout.time > kMaxTime) {
    return unsupported("T must be at most 2^30 time steps, got %lld", time);
  }
  if (batch < 0 || time < 0 || sequences < 0) {
    return unsupported("B, T and N must not be negative, got %lld, %lld and %lld", batch, time,
                       sequences);
  }
  if (layout.offsets != nullptr && batch != 1) {
    return unsupported("B must be 1 where sequences are packed, got %lld", batch);
  }
  return nullptr;
}

}  // namespace tidegate::kernels
