#include "kernels/attention/cuda/tensor_forward_unit.cuh"

namespace tidegate::kernels {
template struct AttentionForwardUnit<__half, HeadDims::kLarge>;
}  // namespace tidegate::kernels
