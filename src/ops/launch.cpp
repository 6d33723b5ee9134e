#include "src/ops/launch.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include <algorithm>

#ifdef TIDEGATE_WITH_CUDA
#include <c10/cuda/CUDAStream.h>

#include "kernels/common/cuda/row_sums.h"
#include "src/ops/views.h"
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

#ifdef TIDEGATE_WITH_CUDA
namespace {

/// In one launch. A complex number is a pair of columns.
void sum_rows_on_device(const char* op, const std::vector<at::Tensor>& partials,
                        std::vector<at::Tensor>* sums) {
  kernels::RowSums work;
  const auto first =
      std::find_if(partials.begin(), partials.end(), [](const auto& t) { return t.defined(); });
  const c10::DeviceGuard guard(first->device());
  for (size_t i = 0; i < partials.size(); ++i) {
    if (const at::Tensor& partial = partials[i]; partial.defined()) {
      TORCH_INTERNAL_ASSERT(work.count < kernels::RowSums::kMost, op, ": too many partial sums");
      (*sums)[i] = at::empty({partial.size(1)}, partial.options());
      work.from[work.count] = partial.data_ptr();
      work.to[work.count++] = (*sums)[i].data_ptr();
      work.rows = partial.size(0);
      work.columns = partial.size(1) * (partial.is_complex() ? 2 : 1);
      work.dtype = kernel_dtype(c10::toRealValueType(partial.scalar_type()));
    }
  }
  check_launch(op, "sum of partial sums", kernels::sum_rows(work, current_stream(first->device())));
}

}  // namespace
#endif

std::vector<at::Tensor> sum_rows([[maybe_unused]] const char* op,
                                 const std::vector<at::Tensor>& partials) {
  std::vector<at::Tensor> sums(partials.size());
#ifdef TIDEGATE_WITH_CUDA
  const auto on_cuda = [](const at::Tensor& t) { return t.defined() && t.is_cuda(); };
  if (std::any_of(partials.begin(), partials.end(), on_cuda)) {
    sum_rows_on_device(op, partials, &sums);
    return sums;
  }
#endif
  for (size_t i = 0; i < partials.size(); ++i) {
    if (partials[i].defined()) {
      sums[i] = at::sum(partials[i], 0);
    }
  }
  return sums;
}

#ifdef TIDEGATE_WITH_CUDA

CudaStream current_stream(at::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

void check_launch(const char* op, const char* what, CudaStatus status) {
  TORCH_CHECK(status == cudaSuccess, op, ": the ", what,
              " of a CUDA kernel failed: ", cudaGetErrorString(status));
}

#else

CudaStream current_stream(at::Device) { return nullptr; }

void check_launch(const char* op, const char*, CudaStatus) {
  TORCH_CHECK(false, op, ": this tidegate was built without CUDA kernels");
}

#endif

}  // namespace tidegate::ops
