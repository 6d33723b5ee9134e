#include "kernels/scan/cuda/wkv4_family.cuh"

namespace tidegate::kernels {
template struct Wkv4Family<__nv_bfloat16>;
}  // namespace tidegate::kernels
