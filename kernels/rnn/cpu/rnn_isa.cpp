// The gated RNN, compiled once an instruction set (kernels/CMakeLists.txt).

#include "kernels/rnn/cpu/gated_rnn_block.h"
#include "kernels/rnn/cpu/rnn_kernels.h"

namespace tidegate::kernels::rnn::TIDEGATE_ISA {

const RnnKernels kRnnKernels = {
    kBlockRows,
    pack_panels,
    gated_rnn_forward_block,
    gated_rnn_backward_block,
};

}  // namespace tidegate::kernels::rnn::TIDEGATE_ISA
