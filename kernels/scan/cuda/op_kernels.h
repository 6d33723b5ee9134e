#pragma once

// What each op's folder offers to scan_cuda.cu: plan and launch of both directions for one data
// type, defined in <op>/<op>.cuh and compiled in one generated unit a type (units.cmake).

#include "kernels/scan/scan_cuda.h"
#include "kernels/scan/wkv4_cuda.h"

namespace tidegate::kernels::scan {

template <class Data>
struct LinearScanKernels {
  static cudaError_t forward_plan(const LinearScanParams& p, ScanPlan* plan);
  static cudaError_t forward(const LinearScanParams& p, cudaStream_t stream);
  static cudaError_t backward_plan(const LinearScanBackwardParams& p, ScanPlan* plan);
  static cudaError_t backward(const LinearScanBackwardParams& p, cudaStream_t stream);
};

template <class Data>
struct HgruKernels {
  static cudaError_t forward_plan(const HgruParams& p, ScanPlan* plan);
  static cudaError_t forward(const HgruParams& p, cudaStream_t stream);
  static cudaError_t backward_plan(const HgruBackwardParams& p, ScanPlan* plan);
  static cudaError_t backward(const HgruBackwardParams& p, cudaStream_t stream);
};

template <class Data>
struct LruKernels {
  static cudaError_t forward_plan(const LruParams& p, ScanPlan* plan);
  static cudaError_t forward(const LruParams& p, cudaStream_t stream);
  static cudaError_t backward_plan(const LruBackwardParams& p, ScanPlan* plan);
  static cudaError_t backward(const LruBackwardParams& p, cudaStream_t stream);
};

template <class Data>
struct Wkv4Kernels {
  static cudaError_t forward_plan(const Wkv4Params& p, ScanPlan* plan);
  static cudaError_t forward(const Wkv4Params& p, cudaStream_t stream);
  static cudaError_t backward_plan(const Wkv4BackwardParams& p, ScanPlan* plan);
  static cudaError_t backward(const Wkv4BackwardParams& p, cudaStream_t stream);
};

}  // namespace tidegate::kernels::scan
