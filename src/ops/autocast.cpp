#include "src/ops/autocast.h"

#include <ATen/autocast_mode.h>

namespace tidegate::ops {

AutocastGuard::AutocastGuard(at::Device device)
    : device_(device.type()),
      dtype_(at::autocast::get_lower_precision_fp_from_device_type(device_)),
      exclude_(c10::autocast_dispatch_keyset) {}

at::Tensor AutocastGuard::cast(const at::Tensor& tensor) const {
  return at::autocast::cached_cast(dtype_, tensor, device_);
}

at::Tensor AutocastGuard::cast_along(const at::Tensor& tensor, const at::Tensor& data) const {
  const bool goes = data.scalar_type() == dtype_ || at::autocast::is_eligible(data, device_);
  return goes ? cast(tensor) : tensor;
}

at::Tensor AutocastGuard::cast_unless_float(const at::Tensor& tensor) const {
  return tensor.scalar_type() == at::kFloat ? tensor : cast(tensor);
}

}  // namespace tidegate::ops
