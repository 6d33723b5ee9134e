#include "kernels/attention/cuda/tensor_backward_unit.cuh"

namespace tidegate::kernels {
template struct AttentionBackwardUnit<__half, HeadDims::kLarge>;
}  // namespace tidegate::kernels
