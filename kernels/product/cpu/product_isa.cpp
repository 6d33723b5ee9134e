// Products of a few rows, compiled once an instruction set (kernels/CMakeLists.txt).

#include "kernels/product/cpu/few_rows.h"

namespace tidegate::kernels::product::TIDEGATE_ISA {

const ProductKernels kProductKernels = {few_rows};

}  // namespace tidegate::kernels::product::TIDEGATE_ISA
