#include "kernels/scan/cuda/lru_family.cuh"

namespace tidegate::kernels {
template struct LruFamily<__nv_bfloat16>;
}  // namespace tidegate::kernels
