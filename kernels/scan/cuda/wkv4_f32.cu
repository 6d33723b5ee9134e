#include "kernels/scan/cuda/wkv4_family.cuh"

namespace tidegate::kernels {
template struct Wkv4Family<float>;
}  // namespace tidegate::kernels
