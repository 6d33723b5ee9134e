#include "kernels/attention/cuda/tensor_forward_unit.cuh"

namespace tidegate::kernels {
template struct TensorForwardUnit<__half, HeadDims::kLarge>;
}  // namespace tidegate::kernels
