#include "kernels/scan/cuda/hgru_family.cuh"

namespace tidegate::kernels {
template struct HgruFamily<__nv_bfloat16>;
}  // namespace tidegate::kernels
