#include "kernels/scan/cuda/lru_family.cuh"

namespace tidegate::kernels {
template struct LruFamily<__half>;
}  // namespace tidegate::kernels
