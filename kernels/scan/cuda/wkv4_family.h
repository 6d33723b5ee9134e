#pragma once

#include "kernels/scan/wkv4_cuda.h"

namespace tidegate::kernels::scan {

/// All of wkv4 for one data type. Defined in wkv4_family.cuh, compiled in one unit a type.
template <class Data>
struct Wkv4Family {
  static cudaError_t forward_plan(const Wkv4Params& p, ScanPlan* plan);
  static cudaError_t forward(const Wkv4Params& p, cudaStream_t stream);
  static cudaError_t backward_plan(const Wkv4BackwardParams& p, ScanPlan* plan);
  static cudaError_t backward(const Wkv4BackwardParams& p, cudaStream_t stream);
};

}  // namespace tidegate::kernels::scan
