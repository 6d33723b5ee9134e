// Cross-entropy, compiled once an instruction set (kernels/CMakeLists.txt).

#include "kernels/loss/cpu/cross_entropy_row.h"
#include "kernels/loss/cpu/loss_kernels.h"

namespace tidegate::kernels::loss::TIDEGATE_ISA {

const LossKernels kLossKernels = {cross_entropy_rows};

}  // namespace tidegate::kernels::loss::TIDEGATE_ISA
