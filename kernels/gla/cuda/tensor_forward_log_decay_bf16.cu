#include "kernels/gla/cuda/tensor_forward_unit.cuh"

namespace tidegate::kernels {
template struct TensorForwardUnit<__nv_bfloat16, GateKind::kLogDecay>;
}  // namespace tidegate::kernels
