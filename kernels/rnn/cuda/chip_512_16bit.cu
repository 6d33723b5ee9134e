#include "kernels/rnn/cuda/chip_family.cuh"

namespace tidegate::kernels {
template struct ChipFamily<512, true, false>;
}  // namespace tidegate::kernels
