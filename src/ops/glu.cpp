// glu: schema, checks, how tensors become the kernels' params.

#include "tidegate/ops/glu.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <tuple>

#include "kernels/norm/glu.h"
#include "src/ops/autograd.h"
#include "src/ops/launch.h"
#include "src/ops/norms.h"
#include "src/ops/op.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/norm/glu_cuda.h"
#endif

namespace tidegate::ops {
namespace {

struct Glu {
  static constexpr std::string_view kSchema = "glu(Tensor x, str activation=\"silu\") -> Tensor";
  static constexpr std::string_view kResults[] = {"y"};
  static constexpr std::string_view kData = "x";

  const at::Tensor& x;
  std::string_view activation;

  std::tuple<at::Tensor> kernel() const;
  std::tuple<at::Tensor> meta() const;
};

/// The gradient of x.
struct GluBackward {
  static constexpr std::string_view kSchema =
      "glu_backward(Tensor dy, Tensor x, str activation) -> Tensor";
  static constexpr std::string_view kGradientLike = "x";

  const at::Tensor &dy, &x;
  std::string_view activation;

  std::tuple<at::Tensor> kernel() const;
  std::tuple<at::Tensor> meta() const;
};

// ---- checks ----

/// The sizes of y.
c10::SymDimVector check_glu(const char* op, const at::Tensor& x, std::string_view activation) {
  check_data_dtype({op, "x", x}, ComplexData::kRefused);
  TORCH_CHECK(x.dim() > 0, op, ": x must have shape [..., 2F], got []");
  TORCH_CHECK(x.sym_size(-1) % 2 == 0, op,
              ": x must have an even number of channels, gates and values, got ", x.sym_size(-1));
  parse_row_activation(op, "activation", activation, /*can_be_none=*/true);
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = sizes.back() / 2;
  return sizes;
}

std::tuple<at::Tensor> Glu::meta() const {
  return {at::empty_symint(check_glu(kOpName<Glu>, x, activation), x.options())};
}

std::tuple<at::Tensor> GluBackward::meta() const {
  constexpr const char* kOp = kOpName<GluBackward>;
  const c10::SymDimVector sizes = check_glu(kOp, x, activation);
  check_same_type({kOp, "x", x}, "dy", dy);
  check_shape(kOp, "dy", dy, "[..., F]", sizes);
  return {new_like(x)};
}

// ---- CPU and CUDA ----

kernels::norm::GluParams glu_params(const char* op, KernelInputs* inputs, const at::Tensor& x,
                                    std::string_view activation) {
  kernels::norm::GluParams params;
  params.channels = x.size(-1) / 2;
  params.heads = x.dim() > 1 ? x.size(-2) : 1;
  params.time = x.dim() > 2 ? x.size(-3) : 1;
  params.batch = 1;
  for (int64_t d = 0; d + 3 < x.dim(); ++d) {
    params.batch *= x.size(d);
  }
  params.activation = parse_row_activation(op, "activation", activation, true);
  params.x = row_series(inputs, x);
  return params;
}

std::tuple<at::Tensor> Glu::kernel() const {
  const auto result = meta();
  const c10::DeviceGuard guard(x.device());
  KernelInputs inputs(x);
  auto params = glu_params(kOpName<Glu>, &inputs, x, activation);
  params.y = row_series(&inputs, std::get<0>(result));
#ifdef TIDEGATE_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(kOpName<Glu>, "launch",
                 kernels::norm::glu_forward(params, current_stream(x.device())));
    return result;
  }
#endif
  kernels::norm::glu_cpu(params, torch_threads());
  return result;
}

std::tuple<at::Tensor> GluBackward::kernel() const {
  const auto result = meta();
  const c10::DeviceGuard guard(x.device());
  KernelInputs inputs(x);
  kernels::norm::GluBackwardParams params;
  params.forward = glu_params(kOpName<GluBackward>, &inputs, x, activation);
  params.dy = row_series(&inputs, dy);
  params.dx = row_series(&inputs, std::get<0>(result));
#ifdef TIDEGATE_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(kOpName<GluBackward>, "launch",
                 kernels::norm::glu_backward(params, current_stream(x.device())));
    return result;
  }
#endif
  kernels::norm::glu_backward_cpu(params, torch_threads());
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<Glu>(m);
  register_backward<GluBackward>(m);
  register_gradient<Glu, GluBackward>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor glu(const at::Tensor& x, std::string_view activation) {
  return std::get<0>(ops::call_public<ops::Glu>(x, activation));
}

}  // namespace tidegate
