// The entry points of scan_cuda.h and wkv4_cuda.h: from a dtype to the unit compiled for it.

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/scan/cuda/hgru_family.h"
#include "kernels/scan/cuda/linear_scan_family.h"
#include "kernels/scan/cuda/lru_family.h"
#include "kernels/scan/cuda/wkv4_family.h"

namespace tidegate::kernels::scan {

namespace {

template <class Visit>
cudaError_t choose_real(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit.template operator()<float>();
    case DType::kFloat64:
      return visit.template operator()<double>();
    case DType::kBFloat16:
      return visit.template operator()<__nv_bfloat16>();
    case DType::kFloat16:
      return visit.template operator()<__half>();
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Visit>
cudaError_t choose_any(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kComplex64:
      return visit.template operator()<Complex<float>>();
    case DType::kComplex128:
      return visit.template operator()<Complex<double>>();
    default:
      return choose_real(dtype, visit);
  }
}

}  // namespace

cudaError_t linear_scan_forward_plan(const LinearScanParams& params, ScanPlan* plan) {
  return choose_any(params.x.dtype,
                    [&]<class T>() { return LinearScanFamily<T>::forward_plan(params, plan); });
}

cudaError_t linear_scan_backward_plan(const LinearScanBackwardParams& params, ScanPlan* plan) {
  return choose_any(params.dh.dtype,
                    [&]<class T>() { return LinearScanFamily<T>::backward_plan(params, plan); });
}

cudaError_t hgru_forward_plan(const HgruParams& params, ScanPlan* plan) {
  return choose_real(params.c.dtype,
                     [&]<class T>() { return HgruFamily<T>::forward_plan(params, plan); });
}

cudaError_t hgru_backward_plan(const HgruBackwardParams& params, ScanPlan* plan) {
  return choose_real(params.dh.dtype,
                     [&]<class T>() { return HgruFamily<T>::backward_plan(params, plan); });
}

cudaError_t linear_scan_forward(const LinearScanParams& params, cudaStream_t stream) {
  return choose_any(params.x.dtype,
                    [&]<class T>() { return LinearScanFamily<T>::forward(params, stream); });
}

cudaError_t linear_scan_backward(const LinearScanBackwardParams& params, cudaStream_t stream) {
  return choose_any(params.dh.dtype,
                    [&]<class T>() { return LinearScanFamily<T>::backward(params, stream); });
}

cudaError_t hgru_forward(const HgruParams& params, cudaStream_t stream) {
  return choose_real(params.c.dtype,
                     [&]<class T>() { return HgruFamily<T>::forward(params, stream); });
}

cudaError_t hgru_backward(const HgruBackwardParams& params, cudaStream_t stream) {
  return choose_real(params.dh.dtype,
                     [&]<class T>() { return HgruFamily<T>::backward(params, stream); });
}

cudaError_t lru_forward_plan(const LruParams& params, ScanPlan* plan) {
  return choose_real(params.x.dtype,
                     [&]<class T>() { return LruFamily<T>::forward_plan(params, plan); });
}

cudaError_t lru_backward_plan(const LruBackwardParams& params, ScanPlan* plan) {
  return choose_real(params.dh.dtype,
                     [&]<class T>() { return LruFamily<T>::backward_plan(params, plan); });
}

cudaError_t lru_forward(const LruParams& params, cudaStream_t stream) {
  return choose_real(params.x.dtype,
                     [&]<class T>() { return LruFamily<T>::forward(params, stream); });
}

cudaError_t lru_backward(const LruBackwardParams& params, cudaStream_t stream) {
  return choose_real(params.dh.dtype,
                     [&]<class T>() { return LruFamily<T>::backward(params, stream); });
}

cudaError_t wkv4_forward_plan(const Wkv4Params& params, ScanPlan* plan) {
  return choose_real(params.k.dtype,
                     [&]<class T>() { return Wkv4Family<T>::forward_plan(params, plan); });
}

cudaError_t wkv4_backward_plan(const Wkv4BackwardParams& params, ScanPlan* plan) {
  return choose_real(params.forward.k.dtype,
                     [&]<class T>() { return Wkv4Family<T>::backward_plan(params, plan); });
}

cudaError_t wkv4_forward(const Wkv4Params& params, cudaStream_t stream) {
  return choose_real(params.k.dtype,
                     [&]<class T>() { return Wkv4Family<T>::forward(params, stream); });
}

cudaError_t wkv4_backward(const Wkv4BackwardParams& params, cudaStream_t stream) {
  return choose_real(params.forward.k.dtype,
                     [&]<class T>() { return Wkv4Family<T>::backward(params, stream); });
}

}  // namespace tidegate::kernels::scan
