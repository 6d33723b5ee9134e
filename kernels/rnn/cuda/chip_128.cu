#include "kernels/rnn/cuda/chip_family.cuh"

namespace tidegate::kernels {
template struct ChipFamily<128>;
}  // namespace tidegate::kernels
