#pragma once

#include "kernels/attention/cuda/forward/forward_kernel.cuh"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels::attention {

template <class Shape>
cudaError_t launch_forward(TensorAttention work, const DeviceLimits& limits, cudaStream_t stream) {
  constexpr auto* kKernel = &forgetting_attention_forward_kernel<Shape>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  work.tiles = time_tiles(work.params.forward.layout, Shape::kRows);
  work.side_by_side =
      heads_side_by_side(work.tiles, int64_t{limits.multiprocessors} * Shape::kBlocks);
  const int64_t blocks = work.tiles.count * work.params.forward.heads;
  kKernel<<<static_cast<unsigned>(blocks), Shape::kThreads, Shape::kSharedBytes, stream>>>(work);
  return cudaGetLastError();
}

/// The wide shape takes twice as many queries and more keys at a time: where there are many of
/// both, and a block may have so much shared memory.
template <class Wide, class Narrow>
cudaError_t launch_wide_or_narrow(const TensorAttention& work, const DeviceLimits& limits,
                                  cudaStream_t stream) {
  constexpr int64_t kManyKeys = 8192;
  const ForgettingAttentionParams& p = work.params.forward;
  const bool many = p.prune == 0 && (p.window == 0 || p.window >= kManyKeys) &&
                    p.key_layout.time >= kManyKeys * p.layout.sequences &&
                    p.layout.time >= Wide::kRows * p.layout.sequences;
  return many && Wide::kSharedBytes <= limits.shared_bytes
             ? launch_forward<Wide>(work, limits, stream)
             : launch_forward<Narrow>(work, limits, stream);
}

template <class Data, HeadDims kDims>
cudaError_t AttentionForwardUnit<Data, kDims>::launch(TensorAttention work, cudaStream_t stream) {
  const int64_t dim = work.params.forward.head_dim;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  if constexpr (kDims == HeadDims::kSmall) {
    if (dim <= 32) {
      return launch_forward<ForwardShape<Data, 32, 2, 4, 128, 64, 2, true>>(work, limits, stream);
    }
    if (dim <= 64) {
      return launch_wide_or_narrow<ForwardShape<Data, 64, 2, 8, 192, 64, 1, true>,
                                   ForwardShape<Data, 64, 2, 4, 128, 64, 2, true>>(work, limits,
                                                                                   stream);
    }
    return launch_forward<ForwardShape<Data, 96, 2, 4, 64, 64, 2>>(work, limits, stream);
  } else {
    if (dim <= 128) {
      return launch_wide_or_narrow<ForwardShape<Data, 128, 2, 8, 128, 64, 1>,
                                   ForwardShape<Data, 128, 2, 4, 64, 64, 2>>(work, limits, stream);
    }
    if (dim <= 192) {
      return launch_forward<ForwardShape<Data, 192, 1, 4, 32, 32, 2>>(work, limits, stream);
    }
    return launch_forward<ForwardShape<Data, 256, 1, 4, 32, 32, 2>>(work, limits, stream);
  }
}

}  // namespace tidegate::kernels::attention
