// The gated RNN, compiled with this file's own instruction set flags.

#include "kernels/rnn/cpu/gated_rnn_block.h"
#include "kernels/rnn/cpu/rnn_kernels.h"

namespace tidegate::kernels::rnn::avx512 {

const RnnKernels kRnnKernels = {
    kBlockRows,
    pack_panels,
    gated_rnn_forward_block,
    gated_rnn_backward_block,
};

}  // namespace tidegate::kernels::rnn::avx512
