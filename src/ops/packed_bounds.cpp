// packed_bounds: the offsets of packed sequences, for modules that read them outside an op.

#include "src/ops/checks.h"

#include <torch/library.h>

#include <string>

#include "src/ops/capture.h"
#include "src/ops/registration.h"

namespace tidegate::ops {
namespace {

at::Tensor packed_bounds_kernel(const at::Tensor& x, const at::Tensor& cu_seqlens,
                                const std::string& owner) {
  return packed_bounds({owner.c_str(), "x", x}, cu_seqlens);
}

}  // namespace

at::Tensor packed_bounds(const Reference& data, const at::Tensor& cu_seqlens) {
  const OptionalTensor offsets = offsets_on(data.op, cu_seqlens, data.tensor.device());
  check_cu_seqlens(data, offsets);
  check_cu_seqlens_values(data, cu_seqlens);
  // An op's result is never one of its arguments.
  return offsets->to(at::kLong, /*non_blocking=*/false, /*copy=*/true);
}

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  constexpr const char* kName = "packed_bounds";
  define_op(m, "packed_bounds(Tensor x, Tensor cu_seqlens, str owner) -> Tensor");
  m.impl(kName,
         torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &packed_bounds_kernel));
  // Offsets have no gradient.
  m.impl(kName, torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
}

}  // namespace tidegate::ops
