#include "kernels/scan/cuda/lru_family.cuh"

namespace tidegate::kernels {
template struct LruFamily<double>;
}  // namespace tidegate::kernels
