#include "kernels/gla/cuda/tensor_backward_unit.cuh"

namespace tidegate::kernels {
template struct TensorBackwardUnit<__half>;
}  // namespace tidegate::kernels
