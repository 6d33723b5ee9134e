#pragma once

// The launch of the Hopper forward pass, a unit a data type (units.cmake).

#include <algorithm>

#include "kernels/attention/cuda/hopper/forward.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/tensor_map.h"

namespace tidegate::kernels::attention {

/// How many heads' tiles of queries are taken side by side. With a window all tiles see as many
/// keys but the first ones of each sequence, fewer: enough heads that two of these a block are the
/// last to be taken, or some blocks would begin a whole tile when the others end. Their keys are
/// then those of two windows of 128 queries a block, which an L2 holds.
template <class Shape>
int forward_heads_side_by_side(const HopperForwardWork& work, const DeviceLimits& limits) {
  const ForgettingAttentionParams& p = work.attention.params.forward;
  const TimeTiles& tiles = work.attention.tiles;
  const int64_t short_tiles = (p.window + Shape::kRows - 1) / Shape::kRows;
  if (p.window == 0 || p.layout.offsets != nullptr || short_tiles >= tiles.per_sequence) {
    return heads_side_by_side(tiles, limits.multiprocessors);
  }
  return static_cast<int>(
      std::clamp<int64_t>(2 * limits.multiprocessors / short_tiles, 1, p.layout.batch * p.heads));
}

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
  work.attention.side_by_side = forward_heads_side_by_side<Shape>(work, limits);
  const int64_t items = work.attention.tiles.count * p.heads;
  return launch_early<kKernel>(std::min<int64_t>(items, limits.multiprocessors), Shape::kThreads,
                               Shape::kSharedBytes, stream, work);
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
