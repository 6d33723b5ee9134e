#pragma once

#include "kernels/common/cuda/device.h"
#include "kernels/gla/cuda/chunk_backward.cuh"
#include "kernels/gla/cuda/state_pass.cuh"
#include "kernels/gla/cuda/tensor_backward.h"

namespace tidegate::kernels {

/// More shared memory than 48 KB must be asked for.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, int bytes) {
  return bytes <= 48 * 1024
             ? cudaSuccess
             : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <class T, GateKind kKind, bool kTiled>
cudaError_t launch_state_pass(const StatePass& pass, cudaStream_t stream) {
  const GlaParams& p = pass.params;
  const int bytes = StatePassShared(p.key_dim, p.value_dim, true, kTiled).bytes();
  const auto kernel = state_pass_kernel<T, kKind, kTiled>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_memory(kernel, bytes));
  const auto threads = static_cast<unsigned>(p.key_dim / kBlock * 32);
  const int64_t blocks = pass.segments.slots * p.heads * pass.column_tiles() * pass.directions;
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

template <class T>
cudaError_t TensorBackwardUnit<T>::walk_states(const StatePass& pass, cudaStream_t stream) {
  const bool tiled = gates_in_tiles(pass.params);
  if (pass.params.gate_kind == GateKind::kLogit) {
    return tiled ? launch_state_pass<T, GateKind::kLogit, true>(pass, stream)
                 : launch_state_pass<T, GateKind::kLogit, false>(pass, stream);
  }
  return tiled ? launch_state_pass<T, GateKind::kLogDecay, true>(pass, stream)
               : launch_state_pass<T, GateKind::kLogDecay, false>(pass, stream);
}

template <class T, GateKind kKind>
cudaError_t launch_chunk_backward(const ChunkBackward& work, cudaStream_t stream) {
  const GlaParams& p = work.backward.forward;
  const int warps = chunk_warps(p.key_dim);
  const int bytes = ChunkShared::bytes(p.key_dim, p.value_dim, warps);
  const auto kernel = chunk_backward_kernel<T, kKind>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_memory(kernel, bytes));
  const auto blocks = static_cast<unsigned>(work.chunks.slots * p.heads);
  kernel<<<blocks, warps * 32, bytes, stream>>>(work);
  return cudaGetLastError();
}

template <class T>
cudaError_t TensorBackwardUnit<T>::chunks(const ChunkBackward& work, cudaStream_t stream) {
  return work.backward.forward.gate_kind == GateKind::kLogit
             ? launch_chunk_backward<T, GateKind::kLogit>(work, stream)
             : launch_chunk_backward<T, GateKind::kLogDecay>(work, stream);
}

}  // namespace tidegate::kernels
