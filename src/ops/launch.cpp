#include "src/ops/launch.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#ifdef TIDEGATE_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace tidegate::ops {

kernels::ParallelFor torch_threads() {
  kernels::ParallelFor parallel;
  parallel.threads = at::get_num_threads();
  parallel.run = [](int64_t n, const std::function<void(int64_t, int64_t)>& body) {
    at::parallel_for(0, n, /*grain_size=*/1, body);
  };
  return parallel;
}

at::Tensor workspace(int64_t bytes, const at::Tensor& like) {
  return bytes == 0 ? at::Tensor() : at::empty({bytes}, like.options().dtype(at::kByte));
}

at::Tensor matrix(int64_t rows, int64_t columns, at::ScalarType dtype, const at::Tensor& like) {
  return at::empty({rows, columns}, like.options().dtype(dtype));
}

OptionalTensor offsets_on(const char* op, const OptionalTensor& cu_seqlens, at::Device device) {
  if (!is_given(cu_seqlens) || !cu_seqlens->is_cpu() || device.is_cpu()) {
    return cu_seqlens;
  }
  TORCH_CHECK(!is_capturing(device), op, ": cu_seqlens must be on ", device,
              " while a CUDA graph is captured, got it on ", cu_seqlens->device());
  return cu_seqlens->to(device);
}

#ifdef TIDEGATE_WITH_CUDA

bool is_capturing(at::Device device) {
  if (!device.is_cuda()) {
    return false;
  }
  const c10::DeviceGuard guard(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

CudaStream current_stream(at::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

void check_launch(const char* op, const char* what, CudaStatus status) {
  TORCH_CHECK(status == cudaSuccess, op, ": the ", what,
              " of a CUDA kernel failed: ", cudaGetErrorString(status));
}

#else

bool is_capturing(at::Device) { return false; }

CudaStream current_stream(at::Device) { return nullptr; }

void check_launch(const char* op, const char*, CudaStatus) {
  TORCH_CHECK(false, op, ": this tidegate was built without CUDA kernels");
}

#endif

}  // namespace tidegate::ops
