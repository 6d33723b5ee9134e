// rotary: schema, checks, dispatch, autograd.

#include "tidegate/ops/rotary.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>

#include "kernels/rotary/rotary.h"
#include "src/ops/checks.h"
#include "src/ops/launch.h"
#include "src/ops/registration.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/rotary/rotary_cuda.h"
#endif

namespace tidegate::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "rotary";

std::string name_of(at::ScalarType type) { return c10::getDtypeNames(type).first; }

void check_table(const Reference& data, const char* name, const at::Tensor& table) {
  check_device(data, name, table);
  const at::ScalarType wanted = state_dtype(data.tensor.scalar_type());
  TORCH_CHECK(table.scalar_type() == wanted, kOp, ": ", name, " must be ", name_of(wanted),
              " (x is ", name_of(data.tensor.scalar_type()), "), got ",
              name_of(table.scalar_type()));
  const auto sizes = data.tensor.sym_sizes();
  const bool is_shared = table.dim() == 3 && table.sym_size(0) == 1;
  check_shape(kOp, name, table, "[1 or B, T, D / 2]",
              {is_shared ? c10::SymInt(1) : sizes[0], sizes[1], sizes[3] / 2});
}

void check_arguments(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const Reference data{kOp, "x", x};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 4, "[B, T, H, D]");
  TORCH_CHECK(x.sym_size(3) % 2 == 0, kOp, ": x must have an even number of channels, got ",
              x.sym_size(3));
  check_table(data, "cos", cos);
  check_table(data, "sin", sin);
  check_shape(kOp, "sin", sin, "cos's shape", {cos.sym_size(0), cos.sym_size(1), cos.sym_size(2)});
}

// What the kernels are told of x, in rows, y, and contiguous angles.
kernels::rotary::RotaryParams params_of(const at::Tensor& x, const at::Tensor& y,
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

at::Tensor rotary_cpu(const at::Tensor& given, const at::Tensor& cos, const at::Tensor& sin,
                      bool inverse) {
  check_arguments(given, cos, sin);
  const at::Tensor x = in_rows(given.to(state_dtype(given.scalar_type())));
  const at::Tensor y = at::empty(x.sizes(), x.options());
  const at::Tensor c = cos.contiguous(), s = sin.contiguous();
  kernels::rotary::rotary_cpu(params_of(x, y, c, s, inverse), torch_threads());
  return y.to(given.scalar_type());
}

#ifdef TIDEGATE_WITH_CUDA
at::Tensor rotary_cuda(const at::Tensor& given, const at::Tensor& cos, const at::Tensor& sin,
                       bool inverse) {
  check_arguments(given, cos, sin);
  const c10::DeviceGuard guard(given.device());
  const at::Tensor x = in_rows(given);
  const at::Tensor y = at::empty(x.sizes(), x.options());
  const at::Tensor c = cos.contiguous(), s = sin.contiguous();
  check_launch(kOp, "launch",
               kernels::rotary::rotary(params_of(x, y, c, s, inverse), current_stream(x.device())));
  return y;
}
#endif

at::Tensor rotary_meta(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool) {
  check_arguments(x, cos, sin);
  return at::empty_symint(x.sym_sizes(), x.options());
}

class RotaryFunction : public torch::autograd::Function<RotaryFunction> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin, bool inverse) {
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["inverse"] = inverse;
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_op<&rotary_cpu>("tidegate::rotary", x, cos, sin, inverse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    // Linear in x: this call records its own gradient where one is asked for.
    return {call_op<&rotary_cpu>("tidegate::rotary", gradients[0], saved[0], saved[1],
                                 !ctx->saved_data["inverse"].toBool()),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor rotary_autograd(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                           bool inverse) {
  check_given(kOp, {{"x", x}, {"cos", cos}, {"sin", sin}});
  check_differentiable(kOp, {x, cos, sin});
  return RotaryFunction::apply(x, cos, sin, inverse);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m, "rotary(Tensor x, Tensor cos, Tensor sin, bool inverse=False) -> Tensor");
  m.impl("rotary", torch::dispatch(c10::DispatchKey::CPU, &rotary_cpu));
#ifdef TIDEGATE_WITH_CUDA
  m.impl("rotary", torch::dispatch(c10::DispatchKey::CUDA, &rotary_cuda));
#else
  register_no_cuda(m, "rotary");
#endif
  m.impl("rotary", torch::dispatch(c10::DispatchKey::Meta, &rotary_meta));
  register_autograd<&rotary_autograd>(m, "rotary");
}

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool inverse) {
  ops::check_given("rotary", "x", x);
  ops::check_given("rotary", "cos", cos);
  ops::check_given("rotary", "sin", sin);
  return ops::call_op<&ops::rotary_cpu>("tidegate::rotary", x, cos, sin, inverse);
}

}  // namespace tidegate
