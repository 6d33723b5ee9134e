#include "src/nn/products.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include <vector>

#include "kernels/product/product.h"
#include "src/ops/launch.h"
#include "src/ops/recipes.h"
#include "src/ops/views.h"
#include "tidegate/ops/linear.h"

namespace tidegate::nn {
namespace {

thread_local int few_rows_guards = 0;

kernels::product::FewRowsParams few_rows_params(const at::Tensor& x, const at::Tensor& weight,
                                                const std::optional<at::Tensor>& bias) {
  kernels::product::FewRowsParams params;
  params.rows = x.size(0);
  params.inner = weight.size(1);
  params.outer = weight.size(0);
  params.dtype = ops::kernel_dtype(x.scalar_type());
  params.x = x.const_data_ptr();
  params.stride_x = x.stride(0);
  params.w = weight.const_data_ptr();
  params.stride_w = weight.stride(0);
  params.bias = bias ? bias->const_data_ptr() : nullptr;
  params.stride_y = weight.size(0);
  return params;
}

/// The rows of x by the kernel; undefined where it is not made for them.
at::Tensor few_rows(const at::Tensor& given, const at::Tensor& weight,
                    const std::optional<at::Tensor>& bias) {
  const int64_t inner = weight.size(1);
  if (given.dim() < 2 || given.size(-1) != inner || inner == 0 || given.numel() == 0 ||
      given.numel() > kernels::product::kFewRows * inner || !given.is_cpu() ||
      at::autocast::is_autocast_enabled(at::kCPU)) {
    return {};
  }
  const bool is_one_type = given.scalar_type() == weight.scalar_type() &&
                           (!bias || bias->scalar_type() == given.scalar_type());
  const bool is_flat = given.dim() == 2 || given.is_contiguous();
  if (!is_one_type || !is_flat || !ops::has_unit_rows(given) || !ops::has_unit_rows(weight))
    return {};
  if (bias && !bias->is_contiguous()) return {};
  auto params = few_rows_params(given.dim() == 2 ? given : given.view({-1, inner}), weight, bias);
  std::vector<int64_t> shape = given.sizes().vec();
  shape.back() = weight.size(0);
  at::Tensor y = at::empty(shape, given.options());
  params.y = y.data_ptr();
  kernels::product::few_rows_cpu(params, ops::torch_threads());
  return y;
}

}  // namespace

FewRowsGuard::FewRowsGuard() { ++few_rows_guards; }
FewRowsGuard::~FewRowsGuard() { --few_rows_guards; }
bool FewRowsGuard::is_active() { return few_rows_guards > 0; }

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  if (FewRowsGuard::is_active()) {
    if (const at::Tensor y = few_rows(x, weight, bias); y.defined()) return y;
  }
  // What autocast does, but for the gradient of an fp32 weight, which stays fp32.
  if (x.is_cuda() && weight.scalar_type() == at::kFloat && at::GradMode::is_enabled() &&
      at::autocast::is_autocast_enabled(at::kCUDA)) {
    return tidegate::linear(x, weight, bias);
  }
  at::Tensor y = at::linear(x, weight, bias);
  if (ops::is_recomputing()) ops::keep_recipe_of_product(y, x);
  return y;
}

}  // namespace tidegate::nn
