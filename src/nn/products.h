// The products that projections are.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace tidegate::nn {

/// x W^T + b by one fused op: x `[..., in]`, weight `[out, in]`, bias `[out]`. While a FewRowsGuard
/// lives, on the CPU, a few rows of x by a kernel made for them, which reads the weight at the
/// memory's speed.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias);

/// While one lives on this thread, linear() is called for steps of decoding: without gradients, and
/// often for one row.
class FewRowsGuard {
 public:
  FewRowsGuard();
  ~FewRowsGuard();
  static bool is_active();
  FewRowsGuard(const FewRowsGuard&) = delete;
  FewRowsGuard& operator=(const FewRowsGuard&) = delete;
};

}  // namespace tidegate::nn
