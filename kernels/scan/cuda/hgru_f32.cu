#include "kernels/scan/cuda/hgru_family.cuh"

namespace tidegate::kernels {
template struct HgruFamily<float>;
}  // namespace tidegate::kernels
