#pragma once

#include "kernels/attention/cuda/tensor_forward.cuh"
#include "kernels/attention/cuda/tensor_forward.h"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels {

template <class Shape>
cudaError_t launch_forward(TensorAttention work, cudaStream_t stream) {
  constexpr auto* kKernel = &forgetting_forward_kernel<Shape>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  work.tiles = cut_time(work.params.forward.layout, Shape::kRows);
  const int64_t blocks = work.tiles.slots * work.params.forward.heads;
  kKernel<<<static_cast<unsigned>(blocks), Shape::kThreads, Shape::kSharedBytes, stream>>>(work);
  return cudaGetLastError();
}

template <class Data, HeadDims kDims>
cudaError_t TensorForwardUnit<Data, kDims>::launch(TensorAttention work, cudaStream_t stream) {
  const int64_t dim = work.params.forward.head_dim;
  if constexpr (kDims == HeadDims::kSmall) {
    if (dim <= 32) {
      return launch_forward<ForwardShape<Data, 32, 2, 4, 64>>(work, stream);
    }
    if (dim <= 64) {
      return launch_forward<ForwardShape<Data, 64, 2, 4, 64>>(work, stream);
    }
    return launch_forward<ForwardShape<Data, 96, 2, 4, 64>>(work, stream);
  } else {
    if (dim <= 128) {
      return launch_forward<ForwardShape<Data, 128, 2, 4, 64>>(work, stream);
    }
    if (dim <= 192) {
      return launch_forward<ForwardShape<Data, 192, 1, 4, 32>>(work, stream);
    }
    return launch_forward<ForwardShape<Data, 256, 1, 4, 32>>(work, stream);
  }
}

}  // namespace tidegate::kernels
