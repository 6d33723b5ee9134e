#include "kernels/scan/cuda/linear_scan_family.cuh"

namespace tidegate::kernels {
template struct LinearScanFamily<__half>;
}  // namespace tidegate::kernels
