#pragma once

// Between the driver (cross_entropy_cpu.cpp) and the code compiled once an instruction set.

#include <cstdint>

#include "kernels/common/cpu_isa.h"
#include "kernels/loss/cross_entropy.h"

namespace tidegate::kernels::loss {

struct LossKernels {
  /// Rows [begin, end).
  void (*cross_entropy_rows)(const CrossEntropyParams&, int64_t begin, int64_t end);
};

TIDEGATE_ISA_KERNELS(LossKernels, kLossKernels)

}  // namespace tidegate::kernels::loss
