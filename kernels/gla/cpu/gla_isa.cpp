// Gated linear attention, compiled once an instruction set (kernels/CMakeLists.txt).

#include "kernels/gla/cpu/gla_block.h"

namespace tidegate::kernels::gla::TIDEGATE_ISA {

const GlaKernels kGlaKernels = {
    gla_forward_block,
    gla_backward_values_block,
    gla_backward_keys_block,
};

}  // namespace tidegate::kernels::gla::TIDEGATE_ISA
