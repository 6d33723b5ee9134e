#include "kernels/rnn/cuda/chip_family.cuh"

namespace tidegate::kernels {
template struct ChipFamily<256, false, false>;
}  // namespace tidegate::kernels
