#pragma once

// Which tiles the backward pass takes, by head dimension and by the shared memory there is.

#include <type_traits>

#include "kernels/attention/cuda/tensor_forward.h"
#include "kernels/attention/cuda/tensor_query_gradient.cuh"

namespace tidegate::kernels::attention {

/// Calls f with the shapes of a head dimension of the class: f.template operator()<Shape of
/// forgetting_backward_kernel, its Shape for near heads, Shape of query_gradient_kernel>().
/// cudaErrorNotSupported where no shape fits.
template <class T, HeadDims kDims, class F>
cudaError_t with_backward_shapes(int64_t dim, const DeviceLimits& limits, const F& f) {
  const auto first_that_fits = [&]<class Query, class First, class Second, class Near = First>() {
    // Sums of dq are laid out by either, and read by the first.
    static_assert(First::kRows == Near::kRows &&
                  First::QuerySums::kWarpsOfRows == Near::QuerySums::kWarpsOfRows);
    if (Query::kSharedBytes <= limits.shared_bytes &&
        First::shared_bytes(limits) <= limits.shared_bytes) {
      return f.template operator()<First, Near, Query>();
    }
    if (Query::kSharedBytes <= limits.shared_bytes &&
        Second::shared_bytes(limits) <= limits.shared_bytes) {
      return f.template operator()<Second, Second, Query>();
    }
    return cudaErrorNotSupported;
  };
  if constexpr (kDims == HeadDims::kSmall) {
    if (dim <= 32) {
      using Only = BackwardShape<T, 32, 64, 128, 2, 4, 4, 2>;
      return first_that_fits.template operator()<QueryGradientShape<T, 32, 2, 4, 64>, Only, Only>();
    }
    if (dim <= 64) {
      return first_that_fits.template
      operator()<QueryGradientShape<T, 64, 2, 4, 64>, BackwardShape<T, 64, 128, 128, 4, 4, 4, 2>,
                 BackwardShape<T, 64, 64, 128, 2, 4, 4, 1>>();
    }
    return first_that_fits.template
    operator()<QueryGradientShape<T, 96, 2, 4, 32>, BackwardShape<T, 96, 64, 128, 2, 4, 4, 2>,
               BackwardShape<T, 96, 64, 64, 4, 4, 4, 1>>();
  } else {
    if (dim <= 128) {
      return first_that_fits.template
      operator()<QueryGradientShape<T, 128, 2, 4, 32>, BackwardShape<T, 128, 64, 128, 2, 4, 2, 2>,
                 BackwardShape<T, 128, 64, 64, 4, 4, 2, 1>,
                 BackwardShape<T, 128, 64, 64, 2, 2, 2, 1, 2>>();
    }
    if (dim <= 192) {
      return first_that_fits.template
      operator()<QueryGradientShape<T, 192, 1, 4, 32>, BackwardShape<T, 192, 64, 64, 4, 2, 2, 1>,
                 BackwardShape<T, 192, 32, 64, 2, 2, 2, 1>>();
    }
    using Only = BackwardShape<T, 256, 64, 64, 4, 2, 2, 1>;
    return first_that_fits.template operator()<QueryGradientShape<T, 256, 1, 4, 32>, Only, Only>();
  }
}

}  // namespace tidegate::kernels::attention
