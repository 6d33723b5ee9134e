// Gated linear attention, compiled with this file's own instruction set flags.

#include "kernels/gla/cpu/gla_block.h"

namespace tidegate::kernels::gla::avx512 {

const GlaKernels kGlaKernels = {
    gla_forward_block,
    gla_backward_values_block,
    gla_backward_keys_block,
};

}  // namespace tidegate::kernels::gla::avx512
