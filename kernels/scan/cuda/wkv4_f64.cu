#include "kernels/scan/cuda/wkv4_family.cuh"

namespace tidegate::kernels {
template struct Wkv4Family<double>;
}  // namespace tidegate::kernels
