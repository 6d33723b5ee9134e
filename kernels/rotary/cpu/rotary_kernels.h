#pragma once

// Between the driver (rotary_cpu.cpp) and the code compiled once an instruction set.

#include <cstdint>

#include "kernels/common/cpu_isa.h"
#include "kernels/rotary/rotary.h"

namespace tidegate::kernels::rotary {

/// Tokens [begin, end), counted over the whole batch.
struct TokenRange {
  int64_t begin = 0, end = 0;
};

struct RotaryKernels {
  void (*turn)(const RotaryParams&, TokenRange);
};

TIDEGATE_ISA_KERNELS(RotaryKernels, kRotaryKernels)

}  // namespace tidegate::kernels::rotary
