#pragma once

// How long sums over time are kept, on the CPU.

#include <cstdint>

namespace tidegate::kernels {

/// Tokens of a short sum. Short sums are added to a long one when they are full: at most 64 + T /
/// 64 roundings lie on the way of a term instead of T, and a constant gradient over 10^5 steps
/// keeps its digits.
constexpr int64_t kShortSumTokens = 64;

}  // namespace tidegate::kernels
