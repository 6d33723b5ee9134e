#pragma once

// RWKV-4's token mixing on CUDA devices; wkv4.h says what it computes, scan_cuda.h how to launch.

#include <cuda_runtime_api.h>

#include "kernels/scan/wkv4.h"

namespace tidegate::kernels::scan {

[[nodiscard]] cudaError_t wkv4_forward_plan(const Wkv4Params& params, ScanPlan* plan);
[[nodiscard]] cudaError_t wkv4_backward_plan(const Wkv4BackwardParams& params, ScanPlan* plan);
[[nodiscard]] cudaError_t wkv4_forward(const Wkv4Params& params, cudaStream_t stream);
[[nodiscard]] cudaError_t wkv4_backward(const Wkv4BackwardParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::scan
