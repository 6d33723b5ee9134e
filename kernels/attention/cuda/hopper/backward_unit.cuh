#pragma once

// The launches of the Hopper backward pass, a unit a data type (units.cmake): the kernel, and the
// one that rounds dq.

#include "kernels/attention/cuda/backward/query_gradients.cuh"
#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/hopper/backward.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/tensor_map.h"

namespace tidegate::kernels::attention {

template <class Shape>
cudaError_t launch_hopper_backward(const TensorAttention& attention,
                                   const GateGradientChunks& gates, const DeviceLimits& limits,
                                   cudaStream_t stream) {
  constexpr auto* kKernel = &hopper_backward_kernel<Shape>;
  constexpr int kSharedBytes = sizeof(HopperBackwardShared<Shape>);
  static_assert(kSharedBytes <= kHopperSharedBytes);
  const ForgettingAttentionBackwardParams& params = attention.params;
  const ForgettingAttentionParams& p = params.forward;
  HopperBackwardWork work = {attention, {}, {}, {}, {}};
  const auto describe = [&](const HeadSeries& t, const SequenceLayout& layout, int64_t heads,
                            int rows, CUtensorMap* map) {
    return tensor_map_of_rows(t, layout.batch, layout.time, heads, p.head_dim, rows, map);
  };
  TIDEGATE_RETURN_IF_CUDA_ERROR(describe(p.q, p.layout, p.heads, Shape::kRows, &work.q));
  TIDEGATE_RETURN_IF_CUDA_ERROR(describe(params.d_o, p.layout, p.heads, Shape::kRows, &work.d_o));
  TIDEGATE_RETURN_IF_CUDA_ERROR(describe(p.k, p.key_layout, p.key_heads, Shape::kKeys, &work.k));
  TIDEGATE_RETURN_IF_CUDA_ERROR(describe(p.v, p.key_layout, p.key_heads, Shape::kKeys, &work.v));

  TensorAttention& w = work.attention;
  w.tiles = time_tiles(p.key_layout, Shape::kKeys);
  w.side_by_side = heads_side_by_side(w.tiles, limits.multiprocessors);
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(kSharedBytes));
  TIDEGATE_RETURN_IF_CUDA_ERROR(launch_unless_empty(kKernel, w.tiles.count * p.key_heads,
                                                    Shape::kThreads, kSharedBytes, stream, work));
  using Sums = typename Shape::Sums;
  const int64_t blocks = w.query_tiles.count * p.heads + gates.blocks();
  return launch_unless_empty(&convert_dq_kernel<Sums>, static_cast<unsigned>(blocks),
                             Sums::kThreads, Sums::kRowBytes, stream, w, gates);
}

template <class Data>
cudaError_t HopperBackwardUnit<Data>::launch(const TensorAttention& work,
                                             const GateGradientChunks& gates,
                                             const DeviceLimits& limits, cudaStream_t stream) {
  return with_hopper_backward_tile(work.params.forward.head_dim, [&]<HopperBackwardTile kTile>() {
    return launch_hopper_backward<HopperBackwardShape<Data, kTile>>(work, gates, limits, stream);
  });
}

}  // namespace tidegate::kernels::attention
