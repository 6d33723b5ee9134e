#pragma once

// The launch of the Hopper forward pass, a unit a data type (units.cmake).

#include <algorithm>

#include "kernels/attention/cuda/hopper/forward.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/tensor_map.h"

namespace tidegate::kernels::attention {

template <class Shape>
cudaError_t launch_hopper_forward(HopperForwardWork work, const DeviceLimits& limits,
                                  cudaStream_t stream) {
  constexpr auto* kKernel = &hopper_forward_kernel<Shape>;
  const ForgettingAttentionParams& p = work.attention.params.forward;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      tensor_map_of_rows(p.q, p.layout, p.heads, p.head_dim, Shape::kRows, &work.q));
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      tensor_map_of_rows(p.k, p.key_layout, p.key_heads, p.head_dim, Shape::kKeys, &work.k));
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      tensor_map_of_rows(p.v, p.key_layout, p.key_heads, p.head_dim, Shape::kKeys, &work.v));
  work.attention.tiles = time_tiles(p.layout, Shape::kRows);
  work.attention.side_by_side = heads_side_by_side(work.attention.tiles, limits.multiprocessors);
  const int64_t items = work.attention.tiles.count * p.heads;
  return launch_unless_empty(kKernel, std::min<int64_t>(items, limits.multiprocessors),
                             Shape::kThreads, Shape::kSharedBytes, stream, work);
}

template <class Data>
cudaError_t HopperForwardUnit<Data>::launch(const HopperForwardWork& work, cudaStream_t stream) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  return with_hopper_forward_shape<Data>(
      work.attention.params.forward.head_dim,
      [&]<class Shape>() { return launch_hopper_forward<Shape>(work, limits, stream); });
}

}  // namespace tidegate::kernels::attention
