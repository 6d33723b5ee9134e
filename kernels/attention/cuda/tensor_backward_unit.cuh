#pragma once

#include "kernels/attention/cuda/backward_shapes.cuh"
#include "kernels/attention/cuda/tensor_backward.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels {

template <class Shape>
cudaError_t launch_key_gradients(TensorAttention work, cudaStream_t stream) {
  constexpr auto* kKernel = &forgetting_backward_kernel<Shape>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  const ForgettingAttentionParams& p = work.params.forward;
  work.tiles = cut_time(p.key_layout, Shape::kKeys);
  const int64_t blocks = work.tiles.slots * p.key_heads;
  return launch_unless_empty(kKernel, static_cast<unsigned>(blocks), Shape::kThreads,
                             Shape::kSharedBytes, stream, work);
}

template <class Shape>
cudaError_t launch_query_gradients(TensorAttention work, cudaStream_t stream) {
  constexpr auto* kKernel = &query_gradient_kernel<Shape>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  work.tiles = cut_time(work.params.forward.layout, Shape::kRows);
  const int64_t blocks = work.tiles.slots * work.params.forward.heads;
  return launch_unless_empty(kKernel, static_cast<unsigned>(blocks), Shape::kThreads,
                             Shape::kSharedBytes, stream, work);
}

template <class Shape>
cudaError_t launch_round_dq(const TensorAttention& work, cudaStream_t stream) {
  const int64_t blocks = work.query_tiles.slots * work.params.forward.heads;
  return launch_unless_empty(&round_dq_kernel<Shape>, static_cast<unsigned>(blocks),
                             Shape::kThreads, Shape::kRowBytes, stream, work);
}

template <class Data, HeadDims kDims>
cudaError_t AttentionBackwardUnit<Data, kDims>::launch(TensorAttention work, int shared_bytes,
                                                       cudaStream_t stream) {
  return with_backward_shapes<Data, kDims>(
      work.params.forward.head_dim, shared_bytes,
      [&]<class Shape, class NearShape, class QueryShape>() {
        TensorAttention keys = work;
        if (work.dq_sums == nullptr) {
          keys.row_sums = nullptr;
        }
        // Both kernels are launched, and the device says which of them takes a head.
        const bool near = work.params.forward.prune > 0 && !std::is_same_v<Shape, NearShape>;
        if (near) {
          keys.heads = PrunedHeads::kNear;
          TIDEGATE_RETURN_IF_CUDA_ERROR(launch_key_gradients<NearShape>(keys, stream));
          keys.heads = PrunedHeads::kFar;
        }
        TIDEGATE_RETURN_IF_CUDA_ERROR(launch_key_gradients<Shape>(keys, stream));
        return work.dq_sums != nullptr ? launch_round_dq<Shape>(work, stream)
                                       : launch_query_gradients<QueryShape>(work, stream);
      });
}

}  // namespace tidegate::kernels
