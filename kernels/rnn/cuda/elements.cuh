#pragma once

// Elements of a tensor whose type is known at run time only: beside a product with a matrix, what
// the choice costs does not show, and one kernel serves all types.

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/dtype.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::rnn {

/// The element at `index`, counted from the first one of `data`.
template <class Real>
__device__ inline Real load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBFloat16:
      return static_cast<Real>(widen(static_cast<const __nv_bfloat16*>(data)[index]));
    case DType::kFloat16:
      return static_cast<Real>(widen(static_cast<const __half*>(data)[index]));
    default:  // the state's type
      return static_cast<const Real*>(data)[index];
  }
}

template <class Real>
__device__ inline void store_element(void* data, DType dtype, int64_t index, Real value) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[index] = narrow<__nv_bfloat16>(static_cast<float>(value));
      return;
    case DType::kFloat16:
      static_cast<__half*>(data)[index] = narrow<__half>(static_cast<float>(value));
      return;
    default:
      static_cast<Real*>(data)[index] = value;
  }
}

__device__ inline int64_t element_index(const TimeSeries& series, int64_t batch, int64_t t,
                                        int64_t channel) {
  return batch * series.stride_b + t * series.stride_t + channel;
}

}  // namespace tidegate::kernels::rnn
