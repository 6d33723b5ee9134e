#pragma once

#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels::scan {

/// All of lru for one data type. Defined in lru_family.cuh, compiled in one unit a type.
template <class Data>
struct LruFamily {
  static cudaError_t forward_plan(const LruParams& p, ScanPlan* plan);
  static cudaError_t forward(const LruParams& p, cudaStream_t stream);
  static cudaError_t backward_plan(const LruBackwardParams& p, ScanPlan* plan);
  static cudaError_t backward(const LruBackwardParams& p, cudaStream_t stream);
};

}  // namespace tidegate::kernels::scan
