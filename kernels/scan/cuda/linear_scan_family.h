#pragma once

#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels::scan {

/// All of linear_scan for one data type. Defined in linear_scan_family.cuh, compiled in one unit a
/// type.
template <class Data>
struct LinearScanFamily {
  static cudaError_t forward_plan(const LinearScanParams& p, ScanPlan* plan);
  static cudaError_t forward(const LinearScanParams& p, cudaStream_t stream);
  static cudaError_t backward_plan(const LinearScanBackwardParams& p, ScanPlan* plan);
  static cudaError_t backward(const LinearScanBackwardParams& p, cudaStream_t stream);
};

}  // namespace tidegate::kernels::scan
