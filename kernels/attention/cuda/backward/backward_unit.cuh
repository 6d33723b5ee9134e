#pragma once

// The launches of the backward pass's kernels on tensor cores, compiled as a unit a data type and
// class of head dimensions (units.cmake): key gradients, for short-range and long-range heads apart
// where keys are pruned, and then dq, from sums that are converted or by a kernel of its own.

#include <algorithm>
#include <type_traits>

#include "kernels/attention/cuda/backward/key_gradient_kernel.cuh"
#include "kernels/attention/cuda/backward/query_gradients.cuh"
#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels::attention {

template <class Shape>
cudaError_t launch_key_gradients(TensorAttention work, const DeviceLimits& limits,
                                 cudaStream_t stream) {
  constexpr auto* kKernel = &key_gradient_kernel<Shape>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::shared_bytes(limits)));
  const ForgettingAttentionParams& p = work.params.forward;
  work.tiles = time_tiles(p.key_layout, Shape::kKeys);
  work.side_by_side =
      heads_side_by_side(work.tiles, int64_t{limits.multiprocessors} * Shape::kBlocksPerSm);
  const int64_t blocks = work.tiles.count * p.key_heads;
  return launch_unless_empty(kKernel, blocks, Shape::kThreads, Shape::shared_bytes(limits), stream,
                             work);
}

/// Long-range heads, by as many blocks as there is room for.
template <class Shape>
cudaError_t launch_long_range_key_gradients(TensorAttention work, const DeviceLimits& limits,
                                            cudaStream_t stream) {
  constexpr auto* kKernel = &long_range_key_gradient_kernel<Shape>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::shared_bytes(limits)));
  const ForgettingAttentionParams& p = work.params.forward;
  work.head_range = HeadRange::kLong;
  work.tiles = time_tiles(p.key_layout, Shape::kKeys);
  const int64_t resident = int64_t{limits.multiprocessors} * Shape::kBlocksPerSm;
  work.side_by_side = heads_side_by_side(work.tiles, resident);
  const int64_t blocks = std::min(work.tiles.count * p.key_heads, resident);
  return launch_unless_empty(kKernel, blocks, Shape::kThreads, Shape::shared_bytes(limits), stream,
                             work);
}

template <class Shape>
cudaError_t launch_query_gradients(TensorAttention work, const DeviceLimits& limits,
                                   cudaStream_t stream) {
  constexpr auto* kKernel = &query_gradient_kernel<Shape>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  work.tiles = time_tiles(work.params.forward.layout, Shape::kRows);
  const int resident = std::min(2, limits.shared_bytes / Shape::kSharedBytes);
  work.side_by_side = heads_side_by_side(work.tiles, int64_t{limits.multiprocessors} * resident);
  const int64_t blocks = work.tiles.count * work.params.forward.heads;
  return launch_unless_empty(kKernel, blocks, Shape::kThreads, Shape::kSharedBytes, stream, work);
}

template <class Shape>
cudaError_t launch_convert_dq(const TensorAttention& work, const GateGradientChunks& gates,
                              cudaStream_t stream) {
  const int64_t blocks = work.query_tiles.count * work.params.forward.heads + gates.blocks();
  return launch_unless_empty(&convert_dq_kernel<Shape>, static_cast<unsigned>(blocks),
                             Shape::kThreads, Shape::kRowBytes, stream, work, gates);
}

template <class Data, HeadDims kDims>
cudaError_t AttentionBackwardUnit<Data, kDims>::launch(TensorAttention work,
                                                       const GateGradientChunks& gates,
                                                       const DeviceLimits& limits,
                                                       cudaStream_t stream) {
  const ForgettingAttentionParams& p = work.params.forward;
  return with_backward_shapes<Data, kDims>(
      p.head_dim, p.plan.tile == AttentionTile::kSmall, [&]<class Shapes>() {
        using Keys = typename Shapes::Keys;
        using ShortRange = typename Shapes::ShortRange;
        TensorAttention keys = work;
        if (work.dq_sums ==
            nullptr) {  // a deterministic pass: query_gradient_kernel writes row sums
          keys.row_sums = nullptr;
        }
        // Both kernels are launched, and the device says which of them takes a head.
        bool pruned = false;
        if constexpr (!std::is_same_v<Keys, ShortRange>) {
          pruned = p.prune > 0;
          if (pruned) {
            keys.head_range = HeadRange::kShort;
            TIDEGATE_RETURN_IF_CUDA_ERROR(launch_key_gradients<ShortRange>(keys, limits, stream));
            TIDEGATE_RETURN_IF_CUDA_ERROR(
                launch_long_range_key_gradients<Keys>(keys, limits, stream));
          }
        }
        if (!pruned) {
          TIDEGATE_RETURN_IF_CUDA_ERROR(launch_key_gradients<Keys>(keys, limits, stream));
        }
        if (work.dq_sums != nullptr) {
          return launch_convert_dq<Keys>(work, gates, stream);
        }
        TIDEGATE_RETURN_IF_CUDA_ERROR(
            launch_query_gradients<typename Shapes::Queries>(work, limits, stream));
        return launch_unless_empty(&gate_totals_kernel<GateGradientScan<float>>,
                                   int64_t{gates.blocks()}, kGateChunk, 0, stream, gates);
      });
}

}  // namespace tidegate::kernels::attention
