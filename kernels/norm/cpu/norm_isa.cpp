// The norms and the gated linear unit's product, compiled once an instruction set
// (kernels/CMakeLists.txt).

#include "kernels/norm/cpu/glu_block.h"
#include "kernels/norm/cpu/norm_block.h"

namespace tidegate::kernels::norm::TIDEGATE_ISA {

const NormKernels kNormKernels = {norm, norm_backward, glu, glu_backward};

}  // namespace tidegate::kernels::norm::TIDEGATE_ISA
