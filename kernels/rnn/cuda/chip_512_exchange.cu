#include "kernels/rnn/cuda/chip_family.cuh"

namespace tidegate::kernels {
template struct ChipFamily<512, false, true>;
}  // namespace tidegate::kernels
