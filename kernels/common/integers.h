#pragma once

#include <cstdint>

namespace tidegate::kernels {

/// a / b, rounded up; both positive, or a zero.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace tidegate::kernels
