#pragma once

#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels::scan {

/// All of hgru for one data type. Defined in hgru_family.cuh, compiled in one unit a type.
template <class Data>
struct HgruFamily {
  static cudaError_t forward_plan(const HgruParams& p, ScanPlan* plan);
  static cudaError_t forward(const HgruParams& p, cudaStream_t stream);
  static cudaError_t backward_plan(const HgruBackwardParams& p, ScanPlan* plan);
  static cudaError_t backward(const HgruBackwardParams& p, cudaStream_t stream);
};

}  // namespace tidegate::kernels::scan
