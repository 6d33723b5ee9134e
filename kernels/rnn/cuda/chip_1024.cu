#include "kernels/rnn/cuda/chip_family.cuh"

namespace tidegate::kernels {
template struct ChipFamily<1024, false, false>;
}  // namespace tidegate::kernels
