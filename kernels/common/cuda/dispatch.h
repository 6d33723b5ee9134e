#pragma once

// From a dtype that is known when the program runs to a type that is known when it is compiled.
// Each function calls visit.template operator()<T>(), which returns a cudaError_t, with the CUDA
// type T of `dtype`. A dtype for which it has no case is cudaErrorInvalidValue.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/dtype.h"

namespace tidegate::kernels {

/// bf16 and f16, the types of the tensor-core kernels.
template <class Visit>
cudaError_t dispatch_16_bit(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit.template operator()<__nv_bfloat16>();
    case DType::kFloat16:
      return visit.template operator()<__half>();
    default:
      return cudaErrorInvalidValue;
  }
}

/// All real types.
template <class Visit>
cudaError_t dispatch_real(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit.template operator()<float>();
    case DType::kFloat64:
      return visit.template operator()<double>();
    default:
      return dispatch_16_bit(dtype, visit);
  }
}

/// All real and complex types.
template <class Visit>
cudaError_t dispatch_number(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kComplex64:
      return visit.template operator()<Complex<float>>();
    case DType::kComplex128:
      return visit.template operator()<Complex<double>>();
    default:
      return dispatch_real(dtype, visit);
  }
}

/// The type of the state beside real data of `dtype`: double, or float for everything narrower.
template <class Visit>
cudaError_t dispatch_state(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kFloat64:
      return visit.template operator()<double>();
    case DType::kFloat32:
    case DType::kBFloat16:
    case DType::kFloat16:
      return visit.template operator()<float>();
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace tidegate::kernels
