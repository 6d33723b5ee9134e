#include "kernels/attention/cuda/tensor_backward_unit.cuh"

namespace tidegate::kernels {
template struct TensorBackwardUnit<__nv_bfloat16, HeadDims::kLarge>;
}  // namespace tidegate::kernels
