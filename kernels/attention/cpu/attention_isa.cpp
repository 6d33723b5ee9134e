// Forgetting attention, compiled once an instruction set (kernels/CMakeLists.txt).

#include "kernels/attention/cpu/attention_entries.h"

namespace tidegate::kernels::attention::TIDEGATE_ISA {

const AttentionKernels kAttentionKernels = {
    attention_gate_sums,    attention_key_norms,      attention_forward,
    attention_prepare,      attention_backward_keys,  attention_backward_queries,
    attention_finish,       attention_first_step_key, attention_step,
    attention_combine_step,
};

}  // namespace tidegate::kernels::attention::TIDEGATE_ISA
