#include "kernels/attention/cuda/tensor_backward_unit.cuh"

namespace tidegate::kernels {
template struct TensorBackwardUnit<__half, HeadDims::kSmall>;
}  // namespace tidegate::kernels
