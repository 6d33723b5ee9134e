#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tidegate::ops {

/// What an Autocast kernel does: casts some arguments, then calls its op with autocast off.
class AutocastGuard {
 public:
  explicit AutocastGuard(at::Device device);

  /// Autocast's type.
  at::ScalarType dtype() const { return dtype_; }

  /// Casts to autocast's type; fp64, complex and integer tensors stay as they are.
  at::Tensor cast(const at::Tensor& tensor) const;

  /// Casts as cast() does where that takes `data` to autocast's type; else the tensor stays.
  at::Tensor cast_along(const at::Tensor& tensor, const at::Tensor& data) const;

  /// Casts as cast() does, but 16-bit types only: fp32 stays fp32.
  at::Tensor cast_unless_float(const at::Tensor& tensor) const;

 private:
  at::DeviceType device_;
  at::ScalarType dtype_;
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

}  // namespace tidegate::ops
