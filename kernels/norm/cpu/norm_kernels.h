#pragma once

// Between the drivers (norm_cpu.cpp) and the code compiled once an instruction set.

#include <cstdint>

#include "kernels/common/cpu_isa.h"
#include "kernels/norm/glu.h"
#include "kernels/norm/norm.h"

namespace tidegate::kernels::norm {

/// Rows [begin, end), counted over all three dimensions of rows.
struct RowRange {
  int64_t begin = 0, end = 0;
};

struct NormKernels {
  void (*norm)(const NormParams&, RowRange);
  /// Adds to row `partial` of the partial sums, which this clears first.
  void (*norm_backward)(const NormBackwardParams&, RowRange, int64_t partial);
  void (*glu)(const GluParams&, RowRange);
  void (*glu_backward)(const GluBackwardParams&, RowRange);
};

TIDEGATE_ISA_KERNELS(NormKernels, kNormKernels)

}  // namespace tidegate::kernels::norm
