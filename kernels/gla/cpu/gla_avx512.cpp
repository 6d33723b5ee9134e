// Gated linear attention, compiled with this file's own instruction set flags.

#include "kernels/gla/cpu/gla_tile.h"

namespace tidegate::kernels::gla::avx512 {

const GlaKernels kGlaKernels = {
    gla_forward_tile,
    gla_backward_values_tile,
    gla_backward_keys_tile,
};

}  // namespace tidegate::kernels::gla::avx512
