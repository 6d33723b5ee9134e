#pragma once

// The launches of the Hopper backward pass between those that forgetting_attention_cuda.cu has for
// every tensor-core pass, a unit a data type (units.cmake): the kernel and the one that rounds dq,
// or, where there are short-range heads, one for these and three for the long-range ones.

#include <algorithm>

#include "kernels/attention/cuda/backward/query_gradients.cuh"
#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/hopper/backward.cuh"
#include "kernels/attention/cuda/hopper/short_range.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/tensor_map.h"

namespace tidegate::kernels::attention {

/// Has the copy engine's descriptions made, for a kernel's tiles.
template <class Shape>
cudaError_t describe_tensors(HopperBackwardWork* of) {
  HopperBackwardWork& work = *of;
  const ForgettingAttentionBackwardParams& params = work.attention.params;
  const ForgettingAttentionParams& p = params.forward;
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      tensor_map_of_rows(p.q, p.layout, p.heads, p.head_dim, Shape::kRows, &work.q));
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      tensor_map_of_rows(params.d_o, p.layout, p.heads, p.head_dim, Shape::kRows, &work.d_o));
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      tensor_map_of_rows(p.k, p.key_layout, p.key_heads, p.head_dim, Shape::kKeys, &work.k));
  return tensor_map_of_rows(p.v, p.key_layout, p.key_heads, p.head_dim, Shape::kKeys, &work.v);
}

/// Short-range heads, whose gradients leave as they are.
template <class Data>
cudaError_t launch_hopper_short_range(const TensorAttention& attention, const DeviceLimits& limits,
                                      cudaStream_t stream) {
  using Shape = HopperBackwardShape<Data, HopperBackwardTile{128, 64, 64}>;
  static_assert(Shape::kKeys == KeyExtents::kKeys);
  constexpr auto* kKernel = &hopper_short_range_kernel<Shape>;
  constexpr int kSharedBytes = sizeof(HopperShortRangeShared<Shape>);
  static_assert(kSharedBytes <= kHopperSharedBytes);
  const ForgettingAttentionParams& p = attention.params.forward;
  HopperBackwardWork work = {attention, {}, {}, {}, {}};
  TIDEGATE_RETURN_IF_CUDA_ERROR(describe_tensors<Shape>(&work));
  TensorAttention& w = work.attention;
  w.head_range = HeadRange::kShort;
  // A block owns 32 tiles, or as few, but at least 4, as give each multiprocessor two blocks; it
  // takes one step more than it owns tiles, so the fewer, the dearer is each.
  const int64_t tiles = time_tiles(p.key_layout, Shape::kKeys).count * p.key_heads;
  const int64_t owned = std::clamp<int64_t>(
      (tiles + 2 * limits.multiprocessors - 1) / (2 * limits.multiprocessors), 4, 32);
  w.tiles = time_tiles(p.key_layout, static_cast<int>(owned) * Shape::kKeys);
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(kSharedBytes));
  return launch_unless_empty(kKernel, w.tiles.count * p.key_heads, Shape::kThreads, kSharedBytes,
                             stream, work);
}

template <class Shape>
cudaError_t launch_hopper_backward(const TensorAttention& attention,
                                   const GateGradientChunks& gates, const DeviceLimits& limits,
                                   cudaStream_t stream) {
  using Sums = typename Shape::Sums;
  constexpr int kSharedBytes = sizeof(HopperBackwardShared<Shape>);
  static_assert(kSharedBytes <= kHopperSharedBytes);
  const ForgettingAttentionParams& p = attention.params.forward;
  HopperBackwardWork work = {attention, {}, {}, {}, {}};
  TIDEGATE_RETURN_IF_CUDA_ERROR(describe_tensors<Shape>(&work));
  TensorAttention& w = work.attention;
  w.tiles = time_tiles(p.key_layout, Shape::kKeys);
  w.side_by_side = heads_side_by_side(w.tiles, limits.multiprocessors);
  const int64_t blocks = w.tiles.count * p.key_heads;
  if constexpr (Shape::kDim > 64 && Shape::kDim <= 128) {
    if (w.has_short_range) {
      constexpr auto* kKernel = &hopper_long_range_kernel<Shape>;
      const int64_t staying = int64_t{limits.multiprocessors} * 8;
      w.head_range = HeadRange::kLong;
      TIDEGATE_RETURN_IF_CUDA_ERROR(launch_unless_empty(&clear_long_range_dq_kernel<Sums>, staying,
                                                        Sums::kThreads, 0, stream, w));
      TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(kSharedBytes));
      TIDEGATE_RETURN_IF_CUDA_ERROR(
          launch_unless_empty(kKernel, std::min<int64_t>(blocks, limits.multiprocessors),
                              Shape::kThreads, kSharedBytes, stream, work));
      return launch_unless_empty(&convert_long_range_dq_kernel<Sums>,
                                 staying + int64_t{gates.blocks()}, Sums::kThreads, Sums::kRowBytes,
                                 stream, w, gates);
    }
  }
  constexpr auto* kKernel = &hopper_backward_kernel<Shape>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(kSharedBytes));
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      launch_unless_empty(kKernel, blocks, Shape::kThreads, kSharedBytes, stream, work));
  return launch_unless_empty(&convert_dq_kernel<Sums>,
                             w.query_tiles.count * p.heads + int64_t{gates.blocks()},
                             Sums::kThreads, Sums::kRowBytes, stream, w, gates);
}

template <class Data>
cudaError_t HopperBackwardUnit<Data>::launch(const TensorAttention& work,
                                             const GateGradientChunks& gates,
                                             const DeviceLimits& limits, cudaStream_t stream) {
  if (work.has_short_range) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch_hopper_short_range<Data>(work, limits, stream));
  }
  return with_hopper_backward_tile(work.params.forward.head_dim, [&]<HopperBackwardTile kTile>() {
    return launch_hopper_backward<HopperBackwardShape<Data, kTile>>(work, gates, limits, stream);
  });
}

}  // namespace tidegate::kernels::attention
