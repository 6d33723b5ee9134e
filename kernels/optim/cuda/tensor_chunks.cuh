#pragma once

// Many tensors taken in chunks of one size by blocks that go over the chunks of all in turn.

#include <cstdint>

#include "kernels/common/cuda/device.h"
#include "kernels/common/integers.h"

namespace tidegate::kernels::optim {

/// Where each tensor's chunks begin, and where the last one's end.
template <int kMost>
struct TensorChunks {
  unsigned first[kMost + 1];
};

/// Counts the chunks of `count` tensors, size_of(i) numbers long, into `chunks`, and says how many
/// blocks take them: no more than fit on the chip.
template <int kMost, class SizeOf>
cudaError_t lay_out_chunks(int count, int chunk, int blocks_per_multiprocessor,
                           const SizeOf& size_of, TensorChunks<kMost>* chunks, int64_t* blocks) {
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    total += ceil_div(size_of(i), int64_t{chunk});
    // Chunks are counted in 32 bits, with room for a stride past the last.
    if (total > int64_t{1} << 30) {
      return cudaErrorInvalidValue;
    }
    chunks->first[i + 1] = static_cast<unsigned>(total);
  }
  DeviceLimits device;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&device));
  const int64_t most = int64_t{device.multiprocessors} * blocks_per_multiprocessor;
  *blocks = total < most ? total : most;
  return cudaSuccess;
}

}  // namespace tidegate::kernels::optim
