#pragma once

// Element-wise gated linear recurrences on CUDA devices. See scan.h for what each one computes.
//
// Use: fill the tensors in, ask for a plan on the current device, allocate plan.workspace_bytes
// (and, backward, plan.partials rows of partial sums), launch on a stream of that device. Nothing
// here allocates, synchronises or reads device memory on the host, so a launch can be captured in a
// CUDA graph.

#include <cuda_runtime_api.h>

#include "kernels/scan/scan.h"

namespace tidegate::kernels::scan {

[[nodiscard]] cudaError_t linear_scan_forward_plan(const LinearScanParams& params, ScanPlan* plan);
[[nodiscard]] cudaError_t linear_scan_backward_plan(const LinearScanBackwardParams& params,
                                                    ScanPlan* plan);
[[nodiscard]] cudaError_t hgru_forward_plan(const HgruParams& params, ScanPlan* plan);
[[nodiscard]] cudaError_t hgru_backward_plan(const HgruBackwardParams& params, ScanPlan* plan);
[[nodiscard]] cudaError_t lru_forward_plan(const LruParams& params, ScanPlan* plan);
[[nodiscard]] cudaError_t lru_backward_plan(const LruBackwardParams& params, ScanPlan* plan);

[[nodiscard]] cudaError_t linear_scan_forward(const LinearScanParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t linear_scan_backward(const LinearScanBackwardParams& params,
                                               cudaStream_t stream);
[[nodiscard]] cudaError_t hgru_forward(const HgruParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t hgru_backward(const HgruBackwardParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t lru_forward(const LruParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t lru_backward(const LruBackwardParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::scan
