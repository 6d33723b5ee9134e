#pragma once

// Gated linear attention on CUDA devices. See gla.h for what is computed.
//
// Use: fill the tensors in, ask for a plan on the current device, allocate plan.workspace_bytes
// (and, backward, plan.partials rows of partial sums), launch on a stream of that device. Nothing
// here allocates, synchronises or reads device memory on the host, so a launch can be captured in a
// CUDA graph.
//
// The entry points come first. Below them is what they choose among, for cuda/ alone.

#include <cuda_runtime_api.h>

#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

// ---- The entry points ----

[[nodiscard]] cudaError_t gla_forward_plan(const GlaParams& params, GlaPlan* plan);
[[nodiscard]] cudaError_t gla_backward_plan(const GlaBackwardParams& params, GlaPlan* plan);

[[nodiscard]] cudaError_t gla_forward(const GlaParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t gla_backward(const GlaBackwardParams& params, cudaStream_t stream);

// ---- The kernels that take anything ----
//
// Any dtype, K and V up to 512, token by token.

/// At most kStepTokens tokens go by the kernel of decoding.
cudaError_t gla_plain_forward(const GlaParams& params, cudaStream_t stream);

/// Fills partials and workspace_bytes.
cudaError_t gla_plain_backward_plan(const GlaBackwardParams& params, GlaPlan* plan);
cudaError_t gla_plain_backward(const GlaBackwardParams& params, cudaStream_t stream);

/// dlog f of one gate a head from that of its channels, [B, T, H, K] in the type of the state.
cudaError_t sum_gate_channels(const GlaBackwardParams& params, void* channels, cudaStream_t stream);

// ---- Both passes in float32, in chunks ----
//
// Plans and launches of fp32_chunks/fp32_chunks.cu. What is not taken, the plain kernels take.

/// Whether its kernels take these params on the current device: float32 data, more tokens than
/// kMostUnpaddedTokens, K and V up to 256, room in shared memory, and no more blocks than a launch
/// may have.
cudaError_t fp32_forward_fits(const GlaParams& params, bool* fits);
cudaError_t fp32_backward_fits(const GlaBackwardParams& params, bool* fits);

cudaError_t fp32_forward_plan(const GlaParams& params, GlaPlan* plan);
cudaError_t fp32_backward_plan(const GlaBackwardParams& params, GlaPlan* plan);

cudaError_t fp32_forward(const GlaParams& params, cudaStream_t stream);
cudaError_t fp32_backward(const GlaBackwardParams& params, cudaStream_t stream);

// ---- The forward pass on tensor cores ----
//
// Its plan and launch (gla_cuda.cu), and what the units that hold the kernels
// (forward/tensor_forward.cuh) offer them.

struct TensorForward;

/// Whether the tensor-core kernel takes these params: 16-bit data, K and V up to 256, and rows that
/// fit a tile (forward_rows.h), in calls that are not so short that the plain kernels are as fast.
bool tensor_forward_fits(const GlaParams& params);

cudaError_t tensor_forward_plan(const GlaParams& params, GlaPlan* plan);
cudaError_t tensor_forward(const GlaParams& params, cudaStream_t stream);

/// The kernels of one data type and kind of gate, compiled as a unit (units.cmake).
template <class Data, GateKind kKind>
struct TensorForwardUnit {
  /// Launches one of them for one key tile; `maps`: for the maps of segments instead of outputs.
  static cudaError_t launch(const TensorForward& work, bool maps, cudaStream_t stream);
};

// ---- The backward pass on tensor cores ----
//
// In chunks of 64 tokens: its plan and launch (gla_cuda.cu), and what the units that hold the
// kernels (backward/tensor_backward.cuh) offer them.

/// Whether the tensor-core kernels take these params on the current device: 16-bit data, K and V
/// multiples of 16 up to 256, rows aligned to 16 bytes, and room in shared memory.
cudaError_t tensor_backward_fits(const GlaBackwardParams& params, bool* fits);

cudaError_t tensor_backward_plan(const GlaBackwardParams& params, GlaPlan* plan);
cudaError_t tensor_backward(const GlaBackwardParams& params, cudaStream_t stream);

struct StatePass;
struct ChunkBackward;

/// The kernels of one data type, compiled as a unit (units.cmake), in the order of their launches.
template <class T>
struct TensorBackwardUnit {
  static cudaError_t make_factors(const ChunkBackward& work, cudaStream_t stream);
  static cudaError_t scan_states(const StatePass& pass, cudaStream_t stream);
  static cudaError_t chunks(const ChunkBackward& work, cudaStream_t stream);
};

}  // namespace tidegate::kernels::gla
