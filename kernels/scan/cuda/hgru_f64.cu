#include "kernels/scan/cuda/hgru_family.cuh"

namespace tidegate::kernels {
template struct HgruFamily<double>;
}  // namespace tidegate::kernels
