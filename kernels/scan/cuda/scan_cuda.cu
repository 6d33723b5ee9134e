// The entry points of scan_cuda.h: from a dtype to the unit compiled for it.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels::scan {

cudaError_t linear_scan_forward_plan(const LinearScanParams& params, ScanPlan* plan) {
  return dispatch_number(
      params.x.dtype, [&]<class T>() { return LinearScanKernels<T>::forward_plan(params, plan); });
}

cudaError_t linear_scan_forward(const LinearScanParams& params, cudaStream_t stream) {
  return dispatch_number(params.x.dtype,
                         [&]<class T>() { return LinearScanKernels<T>::forward(params, stream); });
}

cudaError_t linear_scan_backward_plan(const LinearScanBackwardParams& params, ScanPlan* plan) {
  return dispatch_number(params.dh.dtype, [&]<class T>() {
    return LinearScanKernels<T>::backward_plan(params, plan);
  });
}

cudaError_t linear_scan_backward(const LinearScanBackwardParams& params, cudaStream_t stream) {
  return dispatch_number(params.dh.dtype,
                         [&]<class T>() { return LinearScanKernels<T>::backward(params, stream); });
}

cudaError_t hgru_forward_plan(const HgruParams& params, ScanPlan* plan) {
  return dispatch_real(params.c.dtype,
                       [&]<class T>() { return HgruKernels<T>::forward_plan(params, plan); });
}

cudaError_t hgru_forward(const HgruParams& params, cudaStream_t stream) {
  return dispatch_real(params.c.dtype,
                       [&]<class T>() { return HgruKernels<T>::forward(params, stream); });
}

cudaError_t hgru_backward_plan(const HgruBackwardParams& params, ScanPlan* plan) {
  return dispatch_real(params.dh.dtype,
                       [&]<class T>() { return HgruKernels<T>::backward_plan(params, plan); });
}

cudaError_t hgru_backward(const HgruBackwardParams& params, cudaStream_t stream) {
  return dispatch_real(params.dh.dtype,
                       [&]<class T>() { return HgruKernels<T>::backward(params, stream); });
}

cudaError_t lru_forward_plan(const LruParams& params, ScanPlan* plan) {
  return dispatch_real(params.x.dtype,
                       [&]<class T>() { return LruKernels<T>::forward_plan(params, plan); });
}

cudaError_t lru_forward(const LruParams& params, cudaStream_t stream) {
  return dispatch_real(params.x.dtype,
                       [&]<class T>() { return LruKernels<T>::forward(params, stream); });
}

cudaError_t lru_backward_plan(const LruBackwardParams& params, ScanPlan* plan) {
  return dispatch_real(params.dh.dtype,
                       [&]<class T>() { return LruKernels<T>::backward_plan(params, plan); });
}

cudaError_t lru_backward(const LruBackwardParams& params, cudaStream_t stream) {
  return dispatch_real(params.dh.dtype,
                       [&]<class T>() { return LruKernels<T>::backward(params, stream); });
}

cudaError_t wkv4_forward_plan(const Wkv4Params& params, ScanPlan* plan) {
  return dispatch_real(params.k.dtype,
                       [&]<class T>() { return Wkv4Kernels<T>::forward_plan(params, plan); });
}

cudaError_t wkv4_forward(const Wkv4Params& params, cudaStream_t stream) {
  return dispatch_real(params.k.dtype,
                       [&]<class T>() { return Wkv4Kernels<T>::forward(params, stream); });
}

cudaError_t wkv4_backward_plan(const Wkv4BackwardParams& params, ScanPlan* plan) {
  return dispatch_real(params.forward.k.dtype,
                       [&]<class T>() { return Wkv4Kernels<T>::backward_plan(params, plan); });
}

cudaError_t wkv4_backward(const Wkv4BackwardParams& params, cudaStream_t stream) {
  return dispatch_real(params.forward.k.dtype,
                       [&]<class T>() { return Wkv4Kernels<T>::backward(params, stream); });
}

}  // namespace tidegate::kernels::scan
