#include "kernels/rnn/cuda/chip_family.cuh"

namespace tidegate::kernels {
template struct ChipFamily<256>;
}  // namespace tidegate::kernels
