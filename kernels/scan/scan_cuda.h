#pragma once

// Element-wise gated linear recurrences, and RWKV-4's token mixing, on CUDA devices. See scan.h and
// wkv4.h for what each one computes.
//
// Use: fill the tensors in, ask for a plan on the current device, allocate plan.workspace_bytes
// (and, backward, plan.partials rows of partial sums), launch on a stream of that device. Nothing
// here allocates, synchronises or reads device memory on the host, so a launch can be captured in a
// CUDA graph.
//
// The entry points come first. Below them is what they choose among, for cuda/ alone.

#include <cuda_runtime_api.h>

#include "kernels/scan/scan.h"
#include "kernels/scan/wkv4.h"

namespace tidegate::kernels::scan {

// ---- The entry points ----

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

[[nodiscard]] cudaError_t wkv4_forward_plan(const Wkv4Params& params, ScanPlan* plan);
[[nodiscard]] cudaError_t wkv4_backward_plan(const Wkv4BackwardParams& params, ScanPlan* plan);
[[nodiscard]] cudaError_t wkv4_forward(const Wkv4Params& params, cudaStream_t stream);
[[nodiscard]] cudaError_t wkv4_backward(const Wkv4BackwardParams& params, cudaStream_t stream);

// ---- The ops' kernels ----
//
// What each op's folder offers to scan_cuda.cu: plan and launch of both directions for one data
// type, defined in <op>/<op>.cuh and compiled in a generated unit (units.cmake).

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
