#include "kernels/scan/cuda/wkv4_family.cuh"

namespace tidegate::kernels {
template struct Wkv4Family<__half>;
}  // namespace tidegate::kernels
