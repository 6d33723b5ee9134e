#pragma once

#include <algorithm>

#include "kernels/common/cuda/device.h"
#include "kernels/gla/cuda/forward/tensor_forward.cuh"
#include "kernels/gla/cuda/forward/tensor_forward.h"

namespace tidegate::kernels::gla {

template <class Data, class Gate, GateKind kKind, int kKeys, Pass kPass>
cudaError_t launch_tensor_forward(TensorForward work, int64_t blocks, cudaStream_t stream) {
  constexpr auto* kKernel = &tensor_forward_kernel<Data, Gate, kKind, kKeys, kPass>;
  constexpr int kStaticBytes = 1 << 10;
  constexpr int kStageBytes =
      sizeof(typename Loader<Data, Gate, kKind, kKeys, kPass == Pass::kMaps>::Stage);
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int consumers = work.value_tile / 16;
  work.stages = std::min(kMaxStages, (limits.shared_bytes - kStaticBytes) / kStageBytes);
  // Some slots are being loaded and one consumed while producers hold one each.
  work.producers = std::clamp(work.stages - 3, 1, kMaxWarps - 1 - consumers);
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(work.stages * kStageBytes));
  const int threads = (consumers + 1 + work.producers) * 32;
  kKernel<<<static_cast<unsigned>(blocks), threads, work.stages * kStageBytes, stream>>>(work);
  return cudaGetLastError();
}

template <class Data, GateKind kKind>
cudaError_t TensorForwardUnit<Data, kKind>::launch(const TensorForward& work, bool maps,
                                                   int64_t blocks, cudaStream_t stream) {
  const auto with_keys = [&]<class Gate, int kKeys>() {
    if (maps) {
      return launch_tensor_forward<Data, Gate, kKind, kKeys, Pass::kMaps>(work, blocks, stream);
    }
    if constexpr (kKeys == 128) {
      if (work.sum_before != nullptr || work.sum_after != nullptr) {
        return launch_tensor_forward<Data, Gate, kKind, kKeys, Pass::kOutputOfKeyTile>(work, blocks,
                                                                                       stream);
      }
    }
    return launch_tensor_forward<Data, Gate, kKind, kKeys, Pass::kOutput>(work, blocks, stream);
  };
  const bool sliced = work.sum_before != nullptr || work.sum_after != nullptr;
  const auto with_gate = [&]<class Gate>() {
    return work.keys <= 64 && !sliced ? with_keys.template operator()<Gate, 64>()
                                      : with_keys.template operator()<Gate, 128>();
  };
  return work.params.gate.dtype == DType::kFloat32 ? with_gate.template operator()<float>()
                                                   : with_gate.template operator()<Data>();
}

}  // namespace tidegate::kernels::gla
