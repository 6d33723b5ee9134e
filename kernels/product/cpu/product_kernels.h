#pragma once

// Between the driver (product_cpu.cpp) and the code compiled once an instruction set.

#include <cstdint>

#include "kernels/common/cpu_isa.h"
#include "kernels/product/product.h"

namespace tidegate::kernels::product {

struct ProductKernels {
  /// Channels [begin, end) of y, of all rows.
  void (*few_rows)(const FewRowsParams&, int64_t begin, int64_t end);
};

TIDEGATE_ISA_KERNELS(ProductKernels, kProductKernels)

}  // namespace tidegate::kernels::product
