#pragma once

// What no family of kernels takes, whatever it computes: the parts of their `<name>_unsupported`.

#include <cstdint>

#include "kernels/common/time_series.h"

namespace tidegate::kernels {

// The kernels count steps, and the bytes from one row to the next, in 32 bits.
constexpr int64_t kMaxTime = int64_t{1} << 30;
constexpr int64_t kMaxRowDistance = int64_t{1} << 31;  // bytes

/// A gate may come in the data's type or in the wider type of the state.
constexpr bool gate_dtype_fits(DType gate, DType data) {
  return gate == data || gate == state_dtype(data);
}

/// Whether rows of a TimeSeries or HeadSeries are further apart than the kernels can count.
template <class Series>
bool rows_too_far_apart(const Series& t) {
  const int64_t bytes = t.stride_t * element_size(t.dtype);
  return bytes >= kMaxRowDistance || bytes <= -kMaxRowDistance;
}

/// A sentence that says what was expected and what was given. It lies in a buffer of the calling
/// thread, since kernels allocate nothing, and holds until that thread's next call.
[[gnu::format(printf, 1, 2)]] const char* unsupported(const char* format, ...);

// Each of these is such a sentence about the tensor `name`, or null where nothing is wrong with it.

const char* complex_unsupported(const char* name, DType dtype);

/// `dtype` must be `data`, the dtype of the tensor called `like`.
const char* dtype_unsupported(const char* name, DType dtype, const char* like, DType data);
/// ... or the dtype of the state, as gates may.
const char* gate_unsupported(const char* name, DType dtype, const char* like, DType data);

template <class Series>
const char* rows_unsupported(const char* name, const Series& t) {
  return !rows_too_far_apart(t)
             ? nullptr
             : unsupported(
                   "rows of %s must be less than 2^31 bytes apart along the time axis, got %lld",
                   name, static_cast<long long>(t.stride_t * element_size(t.dtype)));
}

const char* layout_unsupported(const SequenceLayout& layout);

}  // namespace tidegate::kernels
