// Shapes in error messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tidegate::nn {

/// A shape as Python prints a tuple, so that both languages say the same.
std::string shape_text(at::IntArrayRef sizes);
inline std::string shape_text(const at::Tensor& tensor) { return shape_text(tensor.sizes()); }

}  // namespace tidegate::nn
