#include "kernels/attention/cuda/tensor_backward_unit.cuh"

namespace tidegate::kernels {
template struct AttentionBackwardUnit<__nv_bfloat16, HeadDims::kLarge>;
}  // namespace tidegate::kernels
