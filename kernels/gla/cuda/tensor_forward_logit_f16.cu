#include "kernels/gla/cuda/tensor_forward_unit.cuh"

namespace tidegate::kernels {
template struct TensorForwardUnit<__half, GateKind::kLogit>;
}  // namespace tidegate::kernels
