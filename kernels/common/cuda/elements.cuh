#pragma once

// Where the elements and rows of a tensor lie, and reading and writing elements of any type.

#include <cstdint>

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/sequence.cuh"
#include "kernels/common/dtype.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels {

/// Elements from a tensor's first one to the first channel of a token and head.
__device__ inline int64_t element_offset(const HeadSeries& t, int64_t batch, int64_t token,
                                         int64_t head) {
  return batch * t.stride_b + token * t.stride_t + head * t.stride_h;
}
/// Elements from a tensor's first one to a channel of a token.
__device__ inline int64_t element_offset(const TimeSeries& t, int64_t batch, int64_t token,
                                         int64_t channel) {
  return batch * t.stride_b + token * t.stride_t + channel;
}

/// The token at which a scan of a sequence begins: its first one, or backwards its last one.
__device__ inline int64_t first_token(const Sequence& seq, bool backwards) {
  return seq.start + (backwards ? seq.length - 1 : 0);
}

/// The first byte of a token's row of a head; `token` counts from the sequence's start. Elements
/// are kBytes wide.
template <int kBytes>
__device__ inline char* row_address(const HeadSeries& t, const Sequence& seq, int64_t head,
                                    int64_t token) {
  return static_cast<char*>(t.data) +
         (seq.batch * t.stride_b + (seq.start + token) * t.stride_t + head * t.stride_h) * kBytes;
}

/// Bytes from one row to the next, which fit 32 bits: see `rows_too_far_apart`.
template <int kBytes>
__device__ inline int row_stride(const HeadSeries& t) {
  return static_cast<int>(t.stride_t) * kBytes;
}

// Elements whose type is known when the program runs only: for kernels that something else bounds,
// where one kernel serves all types. The host has seen to it that the type is one of those named.

/// Element `index` of `data`, whose type is that of the state (Real) or one of 16 bits.
template <class Real>
__device__ inline Real load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBFloat16:
      return static_cast<Real>(widen(static_cast<const __nv_bfloat16*>(data)[index]));
    case DType::kFloat16:
      return static_cast<Real>(widen(static_cast<const __half*>(data)[index]));
    default:
      return static_cast<const Real*>(data)[index];
  }
}
template <class Real>
__device__ inline void store_element(void* data, DType dtype, int64_t index, Real x) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[index] = narrow<__nv_bfloat16>(static_cast<float>(x));
      return;
    case DType::kFloat16:
      static_cast<__half*>(data)[index] = narrow<__half>(static_cast<float>(x));
      return;
    default:
      static_cast<Real*>(data)[index] = x;
  }
}

/// Element `index` of `data`, whose type is any real one, whatever Real is.
template <class Real>
__device__ inline Real load_any_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kFloat64:
      return static_cast<Real>(static_cast<const double*>(data)[index]);
    case DType::kBFloat16:
      return widen(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return widen(static_cast<const __half*>(data)[index]);
  }
}
template <class Real>
__device__ inline void store_any_element(void* data, DType dtype, int64_t index, Real x) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[index] = static_cast<float>(x);
      return;
    case DType::kFloat64:
      static_cast<double*>(data)[index] = x;
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[index] = narrow<__nv_bfloat16>(static_cast<float>(x));
      return;
    default:
      static_cast<__half*>(data)[index] = narrow<__half>(static_cast<float>(x));
  }
}

}  // namespace tidegate::kernels
