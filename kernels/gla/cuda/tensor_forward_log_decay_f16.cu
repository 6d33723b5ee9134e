#include "kernels/gla/cuda/tensor_forward_unit.cuh"

namespace tidegate::kernels {
template struct TensorForwardUnit<__half, GateKind::kLogDecay>;
}  // namespace tidegate::kernels
