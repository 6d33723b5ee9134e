#include "kernels/attention/cuda/tensor_forward_unit.cuh"

namespace tidegate::kernels {
template struct TensorForwardUnit<__nv_bfloat16, HeadDims::kLarge>;
}  // namespace tidegate::kernels
