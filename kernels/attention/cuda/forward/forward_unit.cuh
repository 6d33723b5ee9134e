#pragma once

#include "kernels/attention/cuda/forward/forward_kernel.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels::attention {

template <class Shape>
cudaError_t launch_forward(TensorAttention work, const DeviceLimits& limits, cudaStream_t stream) {
  constexpr auto* kKernel = &forgetting_attention_forward_kernel<Shape>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  work.tiles = time_tiles(work.params.forward.layout, Shape::kRows);
  work.side_by_side =
      heads_side_by_side(work.tiles, int64_t{limits.multiprocessors} * Shape::kBlocksPerSm);
  const int64_t blocks = work.tiles.count * work.params.forward.heads;
  return launch_unless_empty(kKernel, blocks, Shape::kThreads, Shape::kSharedBytes, stream, work);
}

template <class Data, HeadDims kDims>
cudaError_t AttentionForwardUnit<Data, kDims>::launch(TensorAttention work, cudaStream_t stream) {
  const ForgettingAttentionParams& p = work.params.forward;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  return with_forward_shape<Data, kDims>(p.head_dim, p.plan.tile == 1, [&]<class Shape>() {
    return launch_forward<Shape>(work, limits, stream);
  });
}

}  // namespace tidegate::kernels::attention
