// Forgetting attention, compiled with this file's own instruction set flags.

#include "kernels/attention/cpu/attention_entries.h"

namespace tidegate::kernels::attention::generic {

const AttentionKernels kAttentionKernels = {
    attention_gate_sums, attention_key_norms,     attention_forward,
    attention_prepare,   attention_backward_keys, attention_backward_queries,
    attention_finish,    attention_step,          attention_combine_step,
};

}  // namespace tidegate::kernels::attention::generic
