#pragma once

// Nonlinear recurrences on CUDA devices. See rnn.h for what each one computes.
//
// Use: fill the tensors in, ask for a plan on the current device, allocate plan.workspace_bytes,
// launch on a stream of that device. Nothing here allocates, synchronises or reads device memory on
// the host, so a launch can be captured in a CUDA graph.
//
// The entry points come first. Below them is what they choose among, for cuda/ alone.

#include <cuda_runtime_api.h>

#include "kernels/rnn/rnn.h"

namespace tidegate::kernels::rnn {

// ---- The entry points ----

[[nodiscard]] cudaError_t gated_rnn_forward_plan(const GatedRnnParams& params, GatedRnnPlan* plan);
[[nodiscard]] cudaError_t gated_rnn_backward_plan(const GatedRnnBackwardParams& params,
                                                  GatedRnnPlan* plan);

[[nodiscard]] cudaError_t gated_rnn_forward(const GatedRnnParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t gated_rnn_backward(const GatedRnnBackwardParams& params,
                                             cudaStream_t stream);

// ---- The kernels that keep the matrix on the chip ----
//
// One compiled unit for each triple in cuda/units.cmake.

/// The kernels for D up to kWidth: 128 (one block), 256, 512 and 1024 (2, 8 and 16 blocks). For 512
/// there are some for a matrix of 16-bit numbers, and some for blocks that exchange through memory
/// instead of being a cluster. on_chip/on_chip_family.cuh has the tile of each.
template <int kWidth, bool kIs16Bit, bool kExchangesInMemory>
struct OnChipFamily {
  /// Fills in on_chip, exchanges_in_memory, vectors and workspace_bytes; leaves on_chip false where
  /// the device cannot run this.
  static cudaError_t plan(const GatedRnnParams& params, bool backward, GatedRnnPlan* plan);
  static cudaError_t forward(const GatedRnnParams& params, cudaStream_t stream);
  static cudaError_t backward(const GatedRnnBackwardParams& params, cudaStream_t stream);
};

constexpr int64_t kMaxChipWidth = 1024;
constexpr int64_t kMaxMemoryWidth = 512;  // without clusters
constexpr int64_t kMaxBlockWidth = 128;   // by one block

/// Up to here the plain kernel's one block reads a matrix as fast as a library's product starts.
constexpr int64_t kMaxPlainWidth = 256;

}  // namespace tidegate::kernels::rnn
