// Many tensors in bfloat16 times one factor in float32, in one launch. As in adamw.cu the grid is
// as large as fits on the chip, and its blocks take chunks of all tensors in turn.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/optim/cuda/tensor_chunks.cuh"
#include "kernels/optim/scale_cuda.h"

namespace tidegate::kernels::optim {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;
constexpr int kVec = 8;    // numbers of an access
constexpr int kPacks = 2;  // accesses that a thread has under way
constexpr int kChunk = kThreads * kPacks * kVec;

using ScaleChunks = TensorChunks<ScaleParams::kMost>;

static_assert(sizeof(ScaleParams) + sizeof(ScaleChunks) <= 4096,
              "scale_kernel has more than 4096 bytes of parameters");

__device__ inline void scale_chunk(Bf16* numbers, int64_t size, int64_t begin, float factor) {
  if (begin + kChunk <= size && reinterpret_cast<uintptr_t>(numbers) % sizeof(uint4) == 0) {
    uint4* const at = reinterpret_cast<uint4*>(numbers + begin) + threadIdx.x;
    uint4 packs[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      packs[i] = at[i * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      uint32_t* const pairs = &packs[i].x;
#pragma unroll
      for (int pair = 0; pair < kVec / 2; ++pair) {
        const Pack<Bf16, 2> two{pairs[pair]};
        pairs[pair] = pack_bf16(two.get(0) * factor, two.get(1) * factor);
      }
      at[i * kThreads] = packs[i];
    }
    return;
  }
  const int64_t end = begin + kChunk < size ? begin + kChunk : size;
  for (int64_t at = begin + threadIdx.x; at < end; at += kThreads) {
    numbers[at] = narrow<Bf16>(widen(numbers[at]) * factor);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    scale_kernel(const __grid_constant__ ScaleParams p,
                 const __grid_constant__ ScaleChunks chunks) {
  const unsigned end = chunks.first[p.count];
  const float factor = *p.factor;
  int index = 0;
  for (unsigned chunk = blockIdx.x; chunk < end; chunk += gridDim.x) {
    while (chunk >= chunks.first[index + 1]) {
      ++index;
    }
    const int64_t begin = static_cast<int64_t>(chunk - chunks.first[index]) * kChunk;
    scale_chunk(static_cast<Bf16*>(p.tensors[index]), p.sizes[index], begin, factor);
  }
}

}  // namespace

cudaError_t scale(const ScaleParams& params, cudaStream_t stream) {
  ScaleChunks chunks = {};
  int64_t blocks = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(lay_out_chunks(
      params.count, kChunk, kBlocksPerMultiprocessor, [&](int i) { return params.sizes[i]; },
      &chunks, &blocks));
  return launch_unless_empty(&scale_kernel, blocks, dim3(kThreads), 0, stream, params, chunks);
}

}  // namespace tidegate::kernels::optim
