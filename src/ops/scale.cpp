// scale_: many tensors times one number, in place.

#include "src/ops/scale.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <vector>

#include "src/ops/checks.h"
#include "src/ops/launch.h"
#include "src/ops/registration.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/optim/scale_cuda.h"
#endif

namespace tidegate::ops {
namespace {

constexpr const char* kScaleOp = "scale_";
constexpr const char* kScaleSchema = "scale_(Tensor(a!)[] tensors, Tensor factor) -> ()";

void check_scale(at::TensorList tensors, const at::Tensor& factor) {
  TORCH_CHECK(factor.scalar_type() == at::kFloat && factor.sym_numel() == 1, kScaleOp,
              ": factor must be one float32 number, got ", dtype_name(factor.scalar_type()), " ",
              factor.sym_sizes());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    TORCH_CHECK(at::isFloatingType(t.scalar_type()) && t.device() == factor.device(), kScaleOp,
                ": tensors must be floating-point and on factor's device, ", factor.device(),
                ", got tensors[", i, "] in ", dtype_name(t.scalar_type()), " on ", t.device());
  }
}

/// Multiplies by a factor that has dimensions: so torch makes the product in the wider type.
void scale_by_torch(const at::Tensor& t, const at::Tensor& factor) {
  const at::Tensor with_dimensions = factor.reshape(std::vector<int64_t>(t.dim(), 1));
  t.mul_(t.scalar_type() == at::kDouble ? with_dimensions.to(at::kDouble) : with_dimensions);
}

#ifdef TIDEGATE_WITH_CUDA
void launch_scale(kernels::optim::ScaleParams& params, const at::Tensor& factor) {
  params.factor = factor.const_data_ptr<float>();
  check_launch(kScaleOp, "launch", kernels::optim::scale(params, current_stream(factor.device())));
  params.count = 0;
}

void scale_cuda(at::TensorList tensors, const at::Tensor& factor) {
  const c10::DeviceGuard guard(factor.device());
  kernels::optim::ScaleParams params;
  for (const at::Tensor& t : tensors) {
    if (t.scalar_type() != at::kBFloat16 || !t.is_non_overlapping_and_dense()) {
      scale_by_torch(t, factor);
      continue;
    }
    params.tensors[params.count] = t.data_ptr();
    params.sizes[params.count++] = t.numel();
    if (params.count == kernels::optim::ScaleParams::kMost) launch_scale(params, factor);
  }
  if (params.count > 0) launch_scale(params, factor);
}
#endif

void scale_kernel(at::TensorList tensors, const at::Tensor& factor) {
  check_scale(tensors, factor);
#ifdef TIDEGATE_WITH_CUDA
  if (factor.is_cuda()) {
    scale_cuda(tensors, factor);
    return;
  }
#endif
  for (const at::Tensor& t : tensors) scale_by_torch(t, factor);
}

void scale_meta(at::TensorList tensors, const at::Tensor& factor) { check_scale(tensors, factor); }

/// Nothing is recorded, and autograd notices where a tensor that it saved has been overwritten.
void scale_autograd(at::TensorList tensors, const at::Tensor& factor) {
  TORCH_CHECK(!at::GradMode::is_enabled(), kScaleOp,
              ": it is not differentiated: call it under torch.no_grad()");
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    scale(tensors, factor);
  }
  for (const at::Tensor& t : tensors) torch::autograd::increment_version(t);
}

}  // namespace

void scale(at::TensorList tensors, const at::Tensor& factor) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("tidegate::scale_", "")
                                 .typed<decltype(scale_kernel)>();
  handle.call(tensors, factor);
}

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m, kScaleSchema);
  register_kernels<&scale_kernel, &scale_meta>(m, kScaleOp);
  register_autograd<&scale_autograd>(m, kScaleOp);
}

}  // namespace tidegate::ops
