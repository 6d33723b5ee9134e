// Shapes in error messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tidegate::nn {

/// The tensor's shape as Python prints a tuple, so that both languages say the same.
std::string shape_text(const at::Tensor& tensor);

}  // namespace tidegate::nn
