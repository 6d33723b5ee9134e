// adamw_: a step of AdamW for many parameters, in place.

#include "src/ops/adamw.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "src/ops/launch.h"
#include "src/ops/registration.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/optim/adamw_cuda.h"
#endif

namespace tidegate::ops {
namespace {

constexpr const char* kAdamwOp = "adamw_";
constexpr const char* kAdamwSchema =
    "adamw_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] means, "
    "Tensor(c!)[] squares, Tensor[] steps, Tensor(d!)[] rounded, Tensor? lr_tensor, float lr, "
    "float beta1, float beta2, "
    "float weight_decay, float eps) -> ()";

void check_like_parameter(const char* name, at::TensorList list, size_t index,
                          const at::Tensor& parameter, at::ScalarType dtype) {
  const at::Tensor& t = list[index];
  TORCH_CHECK(t.device() == parameter.device() && t.scalar_type() == dtype &&
                  t.sym_sizes() == parameter.sym_sizes(),
              kAdamwOp, ": ", name, "[", index, "] must be like parameters[", index, "], ",
              dtype_name(dtype), " ", parameter.sym_sizes(), " on ", parameter.device(), ", got ",
              dtype_name(t.scalar_type()), " ", t.sym_sizes(), " on ", t.device());
}

void check_count(const char* name, at::TensorList list, size_t count) {
  TORCH_CHECK(list.size() == count, kAdamwOp, ": ", name,
              " must have as many tensors as parameters, ", count, ", got ", list.size());
}

/// The kernel reads the rate on the device, as one float32.
void check_rate(const at::Tensor& rate, const at::Tensor& parameter) {
  TORCH_CHECK(
      rate.device() == parameter.device() && rate.scalar_type() == at::kFloat && rate.numel() == 1,
      kAdamwOp, ": lr_tensor must be one float32 number on ", parameter.device(), ", got ",
      dtype_name(rate.scalar_type()), " ", rate.sym_sizes(), " on ", rate.device());
}

void check_adamw(const AdamwArguments& a) {
  const size_t count = a.parameters.size();
  if (is_given(a.lr_tensor)) {
    check_rate(*a.lr_tensor, a.parameters[0]);
  }
  check_count("gradients", a.gradients, count);
  check_count("means", a.means, count);
  check_count("squares", a.squares, count);
  check_count("steps", a.steps, count);
  if (!a.rounded.empty()) {
    check_count("rounded", a.rounded, count);
  }
  const at::ScalarType of_gradients =
      a.gradients[0].scalar_type() == at::kBFloat16 ? at::kBFloat16 : at::kFloat;
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& parameter = a.parameters[i];
    TORCH_CHECK(
        parameter.scalar_type() == at::kFloat && parameter.device() == a.parameters[0].device(),
        kAdamwOp, ": parameters must be float32 on one device, got parameters[", i, "] in ",
        dtype_name(parameter.scalar_type()), " on ", parameter.device());
    check_like_parameter("gradients", a.gradients, i, parameter, of_gradients);
    check_like_parameter("means", a.means, i, parameter, at::kFloat);
    check_like_parameter("squares", a.squares, i, parameter, at::kFloat);
    if (!a.rounded.empty()) {
      check_like_parameter("rounded", a.rounded, i, parameter, at::kBFloat16);
    }
    TORCH_CHECK(a.steps[i].numel() == 1 && a.steps[i].scalar_type() == at::kFloat &&
                    a.steps[i].device() == parameter.device(),
                kAdamwOp, ": steps[", i, "] must be one float32 number on ", parameter.device());
  }
}

#ifdef TIDEGATE_WITH_CUDA
/// A tensor's memory where its numbers lie in the order of the parameter's.
void* data_like(const at::Tensor& t, const at::Tensor& parameter, const char* name) {
  TORCH_CHECK(t.is_non_overlapping_and_dense() && lies_like(t, parameter), kAdamwOp, ": ", name,
              " must be dense and laid out as their parameters are");
  return t.data_ptr();
}

void adamw_cuda(const AdamwArguments& a) {
  kernels::optim::AdamwParams params;
  params.gradients = kernel_dtype(a.gradients[0].scalar_type());
  params.lr = a.lr;
  params.device_lr = is_given(a.lr_tensor) ? a.lr_tensor->const_data_ptr<float>() : nullptr;
  params.beta1 = a.beta1;
  params.beta2 = a.beta2;
  params.weight_decay = a.weight_decay;
  params.eps = a.eps;
  const c10::DeviceGuard guard(a.parameters[0].device());
  const CudaStream stream = current_stream(a.parameters[0].device());
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    const at::Tensor& parameter = a.parameters[i];
    const auto wide = [&](const at::Tensor& t, const char* name) {
      return static_cast<float*>(data_like(t, parameter, name));
    };
    kernels::optim::AdamwTensor& tensor = params.tensors[params.count++];
    tensor.parameter = wide(parameter, "parameters");
    tensor.gradient = data_like(a.gradients[i], parameter, "gradients");
    tensor.rounded = a.rounded.empty() ? nullptr : data_like(a.rounded[i], parameter, "rounded");
    tensor.mean = wide(a.means[i], "means");
    tensor.square = wide(a.squares[i], "squares");
    tensor.step = a.steps[i].const_data_ptr<float>();
    tensor.size = parameter.numel();
    if (params.count == kernels::optim::AdamwParams::kMost || i + 1 == a.parameters.size()) {
      check_launch(kAdamwOp, "launch", kernels::optim::adamw(params, stream));
      params.count = 0;
    }
  }
}
#endif

/// torch's step, and what it leaves out.
void adamw_cpu(const AdamwArguments& a) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& gradient : a.gradients) {
    gradients.push_back(gradient.to(at::kFloat));
  }
  const double rate = is_given(a.lr_tensor) ? a.lr_tensor->item<double>() : a.lr;
  at::_fused_adamw_(a.parameters, gradients, a.means, a.squares, /*max_exp_avg_sqs=*/{}, a.steps,
                    rate, a.beta1, a.beta2, a.weight_decay, a.eps, /*amsgrad=*/false,
                    /*maximize=*/false);
  for (size_t i = 0; i < a.rounded.size(); ++i) {
    a.rounded[i].copy_(a.parameters[i]);
  }
}

void adamw_kernel(at::TensorList parameters, at::TensorList gradients, at::TensorList means,
                  at::TensorList squares, at::TensorList steps, at::TensorList rounded,
                  const OptionalTensor& lr_tensor, double lr, double beta1, double beta2,
                  double weight_decay, double eps) {
  const AdamwArguments a{parameters, gradients, means, squares, steps,        rounded,
                         lr_tensor,  lr,        beta1, beta2,   weight_decay, eps};
  if (parameters.empty()) {
    return;
  }
  check_adamw(a);
#ifdef TIDEGATE_WITH_CUDA
  if (parameters[0].is_cuda()) {
    adamw_cuda(a);
    return;
  }
#endif
  adamw_cpu(a);
}

void adamw_meta(at::TensorList parameters, at::TensorList gradients, at::TensorList means,
                at::TensorList squares, at::TensorList steps, at::TensorList rounded,
                const OptionalTensor& lr_tensor, double lr, double beta1, double beta2,
                double weight_decay, double eps) {
  if (!parameters.empty()) {
    check_adamw({parameters, gradients, means, squares, steps, rounded, lr_tensor, lr, beta1, beta2,
                 weight_decay, eps});
  }
}

/// Nothing is recorded, and autograd notices where a tensor that it saved has been overwritten.
void adamw_autograd(at::TensorList parameters, at::TensorList gradients, at::TensorList means,
                    at::TensorList squares, at::TensorList steps, at::TensorList rounded,
                    const OptionalTensor& lr_tensor, double lr, double beta1, double beta2,
                    double weight_decay, double eps) {
  TORCH_CHECK(!at::GradMode::is_enabled(), kAdamwOp,
              ": a step is not differentiated: call it under torch.no_grad()");
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    adamw({parameters, gradients, means, squares, steps, rounded, lr_tensor, lr, beta1, beta2,
           weight_decay, eps});
  }
  for (const at::TensorList list : {parameters, means, squares, rounded}) {
    for (const at::Tensor& t : list) {
      torch::autograd::increment_version(t);
    }
  }
}

}  // namespace

bool lies_like(const at::Tensor& t, const at::Tensor& parameter) {
  if (t.sizes() != parameter.sizes()) return false;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1 && t.stride(d) != parameter.stride(d)) return false;
  }
  return true;
}

void adamw(const AdamwArguments& a) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("tidegate::adamw_", "")
                                 .typed<decltype(adamw_kernel)>();
  handle.call(a.parameters, a.gradients, a.means, a.squares, a.steps, a.rounded, a.lr_tensor, a.lr,
              a.beta1, a.beta2, a.weight_decay, a.eps);
}

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m, kAdamwSchema);
  register_kernels<&adamw_kernel, &adamw_meta>(m, kAdamwOp);
  register_autograd<&adamw_autograd>(m, kAdamwOp);
}

}  // namespace tidegate::ops
