#include "kernels/rnn/cuda/chip_family.cuh"

namespace tidegate::kernels {
template struct ChipFamily<128, false, false>;
}  // namespace tidegate::kernels
