#include "src/ops/capture.h"

#include <c10/util/Exception.h>

#ifdef TIDEGATE_WITH_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace tidegate::ops {

#ifdef TIDEGATE_WITH_CUDA
bool is_capturing(at::Device device) {
  if (!device.is_cuda()) {
    return false;
  }
  const c10::DeviceGuard guard(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}
#else
bool is_capturing(at::Device) { return false; }
#endif

std::optional<at::Tensor> offsets_on(const char* op, const std::optional<at::Tensor>& cu_seqlens,
                                     at::Device device) {
  if (!cu_seqlens.has_value() || !cu_seqlens->defined() || !cu_seqlens->is_cpu() ||
      device.is_cpu()) {
    return cu_seqlens;
  }
  TORCH_CHECK(!is_capturing(device), op, ": cu_seqlens must be on ", device,
              " while a CUDA graph is captured, got it on ", cu_seqlens->device());
  return cu_seqlens->to(device);
}

}  // namespace tidegate::ops
