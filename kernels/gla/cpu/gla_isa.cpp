// Gated linear attention, compiled once an instruction set (kernels/CMakeLists.txt).

#include "kernels/gla/cpu/gla_tile.h"

namespace tidegate::kernels::gla::TIDEGATE_ISA {

const GlaKernels kGlaKernels = {
    gla_forward_tile,
    gla_backward_values_tile,
    gla_backward_keys_tile,
};

}  // namespace tidegate::kernels::gla::TIDEGATE_ISA
