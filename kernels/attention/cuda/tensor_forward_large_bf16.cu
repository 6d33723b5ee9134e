#include "kernels/attention/cuda/tensor_forward_unit.cuh"

namespace tidegate::kernels {
template struct AttentionForwardUnit<__nv_bfloat16, HeadDims::kLarge>;
}  // namespace tidegate::kernels
