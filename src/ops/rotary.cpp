// rotary: schema, checks, how tensors become the kernels' params, and a gradient of its own.

#include "tidegate/ops/rotary.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>

#include "kernels/rotary/rotary.h"
#include "src/ops/checks.h"
#include "src/ops/launch.h"
#include "src/ops/op.h"
#include "src/ops/results.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/rotary/rotary_cuda.h"
#endif

namespace tidegate::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Rotary {
  static constexpr std::string_view kSchema =
      "rotary(Tensor x, Tensor cos, Tensor sin, bool inverse=False) -> Tensor";
  static constexpr std::string_view kData = "x";

  const at::Tensor &x, &cos, &sin;
  bool inverse;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

constexpr const char* kRotary = kOpName<Rotary>;

// ---- checks ----

void check_rotary_table(const Reference& data, const char* name, const at::Tensor& table) {
  check_device(data, name, table);
  const at::ScalarType wanted = state_dtype(data.tensor.scalar_type());
  TORCH_CHECK(table.scalar_type() == wanted, kRotary, ": ", name, " must be ", dtype_name(wanted),
              " (x is ", dtype_name(data.tensor.scalar_type()), "), got ",
              dtype_name(table.scalar_type()));
  const auto sizes = data.tensor.sym_sizes();
  const bool is_shared = table.dim() == 3 && table.sym_size(0) == 1;
  check_shape(kRotary, name, table, "[1 or B, T, D / 2]",
              {is_shared ? c10::SymInt(1) : sizes[0], sizes[1], sizes[3] / 2});
}

void check_rotary(const Rotary& op) {
  const auto& [x, cos, sin, inverse] = op;
  const Reference data{kRotary, "x", x};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 4, "[B, T, H, D]");
  TORCH_CHECK(x.sym_size(3) % 2 == 0, kRotary, ": x must have an even number of channels, got ",
              x.sym_size(3));
  check_rotary_table(data, "cos", cos);
  check_rotary_table(data, "sin", sin);
  check_shape(kRotary, "sin", sin, "cos's shape",
              {cos.sym_size(0), cos.sym_size(1), cos.sym_size(2)});
}

at::Tensor Rotary::meta() const {
  check_rotary(*this);
  return new_like(x);
}

// ---- CPU and CUDA ----

/// `y` is x turned, both in rows; the angles are contiguous.
kernels::rotary::RotaryParams rotary_params(const at::Tensor& x, const at::Tensor& y,
                                            const at::Tensor& cos, const at::Tensor& sin,
                                            bool inverse) {
  kernels::rotary::RotaryParams params;
  params.batch = x.size(0);
  params.time = x.size(1);
  params.heads = x.size(2);
  params.half = x.size(3) / 2;
  params.x = head_series(x);
  params.y = head_series(y);
  params.cos = cos.data_ptr();
  params.sin = sin.data_ptr();
  params.shared_angles = cos.size(0) == 1;
  params.inverse = inverse;
  return params;
}

at::Tensor Rotary::kernel() const {
  check_rotary(*this);
  const c10::DeviceGuard guard(x.device());
  const at::Tensor angles[] = {cos.contiguous(), sin.contiguous()};
  const at::Tensor read = in_rows(x);
  at::Tensor y = new_like(x);
  const auto params = rotary_params(read, y, angles[0], angles[1], inverse);
#ifdef TIDEGATE_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(kRotary, "launch", kernels::rotary::rotary(params, current_stream(x.device())));
    return y;
  }
#endif
  kernels::rotary::rotary_cpu(params, torch_threads());
  return y;
}

// ---- gradient ----

/// rotary is linear in x and so its own gradient, inverted; there is no op for the backward pass.
class RotaryFunction : public torch::autograd::Function<RotaryFunction> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin, bool inverse) {
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["inverse"] = inverse;
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Entry<Rotary>::call(x, cos, sin, inverse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    // This call records its own gradient where one is asked for.
    return {
        Entry<Rotary>::call(gradients[0], saved[0], saved[1], !ctx->saved_data["inverse"].toBool()),
        at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor rotary_autograd(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                           bool inverse) {
  Entry<Rotary>::check_all_given(x, cos, sin, inverse);
  const at::Tensor* const tensors[] = {&x, &cos, &sin};
  check_differentiable(kRotary, tensors);
  return RotaryFunction::apply(x, cos, sin, inverse);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<Rotary>(m);
  register_autograd<&rotary_autograd>(m, kRotary);
}

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool inverse) {
  return ops::call_public<ops::Rotary>(x, cos, sin, inverse);
}

}  // namespace tidegate
