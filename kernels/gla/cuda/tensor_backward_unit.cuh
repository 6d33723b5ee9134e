#pragma once

#include "kernels/common/cuda/device.h"
#include "kernels/gla/cuda/chunk_backward.cuh"
#include "kernels/gla/cuda/chunk_factors.cuh"
#include "kernels/gla/cuda/state_pass.cuh"
#include "kernels/gla/cuda/tensor_backward.h"

namespace tidegate::kernels::gla {

template <class T>
cudaError_t TensorBackwardUnit<T>::make_factors(const ChunkBackward& work, cudaStream_t stream) {
  const GlaParams& p = work.backward.forward;
  const auto blocks = static_cast<unsigned>(work.chunks.count * p.heads);
  const auto of_kind = [&]<GateKind kKind>() {
    return 1 << work.factors.piece >= kTileBytes / 2 ? chunk_factors_kernel<T, kKind, true>
                                                     : chunk_factors_kernel<T, kKind, false>;
  };
  const auto kernel = p.gate_kind == GateKind::kLogit
                          ? of_kind.template operator()<GateKind::kLogit>()
                          : of_kind.template operator()<GateKind::kLogDecay>();
  kernel<<<blocks, kBlocks * 32, 0, stream>>>(work);
  return cudaGetLastError();
}

template <class T>
cudaError_t TensorBackwardUnit<T>::walk_states(const StatePass& pass, cudaStream_t stream) {
  const GlaParams& p = pass.params;
  const int bytes = StatePassShared(p.key_dim, p.value_dim).bytes();
  constexpr auto* kKernel = &state_pass_kernel<T>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  const auto threads = static_cast<unsigned>(p.key_dim / kBlock * 32);
  const int64_t blocks = pass.segments.count * p.heads * pass.column_tiles() * kDirections;
  kKernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

template <class T>
cudaError_t TensorBackwardUnit<T>::chunks(const ChunkBackward& work, cudaStream_t stream) {
  const GlaParams& p = work.backward.forward;
  const int bytes = ChunkShared::bytes(p.key_dim, p.value_dim);
  const auto launch = [&]<GateKind kKind>() {
    constexpr auto* kKernel = &chunk_backward_kernel<T, kKind>;
    TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
    const auto blocks = static_cast<unsigned>(work.chunks.count * p.heads);
    kKernel<<<blocks, chunk_warps(p.key_dim) * 32, bytes, stream>>>(work);
    return cudaGetLastError();
  };
  return p.gate_kind == GateKind::kLogit ? launch.template operator()<GateKind::kLogit>()
                                         : launch.template operator()<GateKind::kLogDecay>();
}

}  // namespace tidegate::kernels::gla
