#pragma once

// The launches of the backward pass's three kernels, compiled as a unit a data type (units.cmake).

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/gla/cuda/backward/chunk_backward.cuh"
#include "kernels/gla/cuda/backward/chunk_factors.cuh"
#include "kernels/gla/cuda/backward/state_pass.cuh"
#include "kernels/gla/cuda/backward/tensor_backward.h"

namespace tidegate::kernels::gla {

template <class T>
cudaError_t TensorBackwardUnit<T>::make_factors(const ChunkBackward& work, cudaStream_t stream) {
  const GlaParams& p = work.backward.forward;
  const bool wide = 1 << work.factors.piece >= kTileBytes / 2;
  const auto launch = [&]<GateKind kKind>() {
    const auto kernel =
        wide ? &chunk_factors_kernel<T, kKind, true> : &chunk_factors_kernel<T, kKind, false>;
    return launch_unless_empty(kernel, work.chunks.count * p.heads, dim3(kSubChunks * 32), 0,
                               stream, work);
  };
  return p.gate_kind == GateKind::kLogit ? launch.template operator()<GateKind::kLogit>()
                                         : launch.template operator()<GateKind::kLogDecay>();
}

template <class T>
cudaError_t TensorBackwardUnit<T>::scan_states(const StatePass& pass, cudaStream_t stream) {
  const GlaParams& p = pass.params;
  const int bytes = StatePassShared(p.key_dim, p.value_dim).bytes();
  constexpr auto* kKernel = &state_pass_kernel<T>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  const auto threads = static_cast<unsigned>(p.key_dim / kSlice * 32);
  const int64_t blocks = pass.segments.count * p.heads * pass.column_tiles() * kDirections;
  return launch_unless_empty(kKernel, blocks, dim3(threads), bytes, stream, pass);
}

template <class T>
cudaError_t TensorBackwardUnit<T>::chunks(const ChunkBackward& work, cudaStream_t stream) {
  const GlaParams& p = work.backward.forward;
  const int bytes = ChunkShared::bytes(p.key_dim, p.value_dim);
  const auto threads = static_cast<unsigned>(chunk_warps(p.key_dim) * 32);
  const auto launch = [&]<GateKind kKind>() {
    constexpr auto* kKernel = &chunk_backward_kernel<T, kKind>;
    TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
    return launch_unless_empty(kKernel, work.chunks.count * p.heads, dim3(threads), bytes, stream,
                               work);
  };
  return p.gate_kind == GateKind::kLogit ? launch.template operator()<GateKind::kLogit>()
                                         : launch.template operator()<GateKind::kLogDecay>();
}

}  // namespace tidegate::kernels::gla
