// Products of a few rows with what a layer does around them: a step of decoding is a chain of
// these, each of which reads weights that nothing in it writes. So a block asks for its first
// weights, 96 KB at most, before it waits for the kernel before; memory is at work all the time,
// and what a kernel adds to the step is the way of a row through it: load, norm, product, store.
//
// A block has a contiguous part of the channels of y, and takes them in tiles of 16 (8 pairs of a
// GLU's). A warp has every eighth chunk of 64 inner channels of each tile: it copies the weights of
// its chunks to a ring of its own and multiplies them with all rows of x by tensor cores, of which
// the weights are the left operand. The eight warps' sums are added up in shared memory. A sum's
// order depends on the number of inner channels alone.

#include <algorithm>

#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/product/cuda/fused_rows.cuh"
#include "kernels/product/cuda/fused_tiles.cuh"
#include "kernels/product/product_cuda.h"

namespace tidegate::kernels::product {
namespace {

Shape shape_of(const FusedProductParams& p, int multiprocessors) {
  Shape shape;
  const int64_t outer = p.product.outer;
  shape.blocks = static_cast<int>(std::min<int64_t>(multiprocessors, outer));
  shape.chunks = static_cast<int>(ceil_div(p.product.inner, kChunk));
  shape.tile_channels = p.is_glu ? kTile / 2 : kTile;
  const int64_t most = ceil_div(outer, static_cast<int64_t>(shape.blocks));
  const int64_t tiles = ceil_div(most, shape.tile_channels);
  const int64_t items = tiles * ceil_div(shape.chunks, kWarps);
  shape.stages = static_cast<int>(std::min<int64_t>(items, kStages));
  // Each row begins 16 bytes further round the banks than the row before it.
  shape.x_stride = shape.chunks * kRowBytes + 16;
  shape.ring_bytes = kWarps * shape.stages * kItemBytes;
  shape.x_bytes = static_cast<int>(p.product.rows) * shape.x_stride;
  // A batch has as many tiles as give each thread at most one element: the fewer barriers, the
  // better.
  shape.batch =
      static_cast<int>(std::clamp<int64_t>(kThreads / (p.product.rows * kTile), 1, tiles));
  shape.sums_bytes = 2 * shape.batch * kWarps * static_cast<int>(p.product.rows) * kTile * 4;
  return shape;
}

/// A block's part of the channels.
struct Work {
  int64_t first;  // channel
  int channels;
  int tiles;

  __device__ Work(const FusedProductParams& p, const Shape& shape) {
    const int64_t outer = p.product.outer;
    first = outer * blockIdx.x / shape.blocks;
    channels = static_cast<int>(outer * (blockIdx.x + 1) / shape.blocks - first);
    tiles = (channels + shape.tile_channels - 1) / shape.tile_channels;
  }
};

/// Adds up the warps' sums of a batch of tiles and makes y of them, one element a thread.
template <class E>
struct Output {
  const FusedProductParams& p;
  const Shape& shape;
  const Work& work;
  int tile, row, channel;  // of the batch; of x; of the tile
  float bias[2], residual;

  __device__ Output(const FusedProductParams& p, const Shape& shape, const Work& work)
      : p(p), shape(shape), work(work) {
    channel = static_cast<int>(threadIdx.x) % shape.tile_channels;
    const int rows = static_cast<int>(threadIdx.x) / shape.tile_channels;
    tile = rows / static_cast<int>(p.product.rows);
    row = rows - tile * static_cast<int>(p.product.rows);
  }

  __device__ bool exists(int first) const {
    return tile < shape.batch && (first + tile) * shape.tile_channels + channel < work.channels;
  }
  __device__ int64_t column(int first) const {
    return work.first + (first + tile) * shape.tile_channels + channel;
  }

  /// Asks for the bias and the residual, before the products of the batch from tile `first` on.
  __device__ void fetch(int first) {
    bias[0] = bias[1] = residual = 0.0f;
    if (!exists(first)) return;
    const int64_t at = column(first);
    if (p.product.bias != nullptr) {
      const E* const all = static_cast<const E*>(p.product.bias);
      bias[0] = widen(all[at]);
      if (p.is_glu) bias[1] = widen(all[at + p.product.outer]);
    }
    if (p.residual != nullptr) {
      residual = widen(static_cast<const E*>(p.residual)[row * p.stride_residual + at]);
    }
  }

  /// sums: [tile of the batch][warp][row][channel of the tile].
  __device__ float sum(const float* sums, int at, float start) const {
    const int rows = static_cast<int>(p.product.rows);
    float parts[kWarps], total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      parts[w] = w < shape.chunks ? sums[((tile * kWarps + w) * rows + row) * kTile + at] : 0.0f;
    }
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += parts[w];
    return widen(narrow<E>(total + start));
  }

  __device__ void store(const float* sums, int first) const {
    if (!exists(first)) return;
    float y = sum(sums, channel, bias[0]);
    if (p.is_glu) {
      using Math = GateMath<float, true>;
      y = norm::activated<Math>(p.activation, y) * sum(sums, channel + kTile / 2, bias[1]);
    }
    if (p.residual != nullptr) y = residual + widen(narrow<E>(y));
    static_cast<E*>(p.product.y)[row * p.product.stride_y + column(first)] = narrow<E>(y);
  }
};

template <class E, int kGroups, With kWith>
__global__ void __launch_bounds__(kThreads)
    fused_product_kernel(const __grid_constant__ FusedProductParams p,
                         const __grid_constant__ Shape shape) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float row_sums[kWarps * RowStager<E, false>::kGroups];
  char* const x = shared + shape.ring_bytes;
  float* const sums = reinterpret_cast<float*>(x + shape.x_bytes);
  const int rows = static_cast<int>(p.product.rows);
  let_next_kernel_begin();

  const Work work(p, shape);
  const WarpItems items(shape, work.tiles);
  const unsigned ring_base =
      shared_address(shared) + static_cast<unsigned>(items.warp * shape.stages * kItemBytes);
  const auto weights = [&](int tile, int row) -> const E* {
    const int channel = p.is_glu ? row % (kTile / 2) : row;
    if (channel >= work.channels - tile * shape.tile_channels) return nullptr;
    return weight_row<E, kWith == With::kMore>(
        p, work.first + tile * shape.tile_channels + channel +
               (p.is_glu && row >= kTile / 2 ? p.product.outer : 0));
  };
  WeightRing<E, decltype(weights)> ring{p, shape, items, weights, ring_base};
  ring.fill();
  RowStager<E, kWith == With::kGate> stager(p, shape, x, row_sums);
  stager.load_constants();
  wait_for_kernels_before();

  Output<E> output(p, shape, work);
  output.fetch(0);
  stager.run();

  const unsigned x_base = shared_address(x);
  const int tile_sums = kWarps * rows * kTile;
  int slot = 0, turn = 0;
  for (int first = 0; first < work.tiles; first += shape.batch) {
    if (first > 0) output.fetch(first);
    // Two buffers, so that one barrier a batch is enough.
    float* const mine = sums + turn * shape.batch * tile_sums;
    turn ^= 1;
    const int tiles = min(shape.batch, work.tiles - first);
    for (int t = 0; t < tiles; ++t) {
      multiply_tile<kGroups>(ring, items, x_base, rows, slot)
          .leave(mine + t * tile_sums, rows, items);
    }
    __syncthreads();
    output.store(mine, first);
  }
}

template <class E, int kGroups, With kWith>
cudaError_t launch(const FusedProductParams& p, const Shape& shape, cudaStream_t stream) {
  constexpr auto* kKernel = &fused_product_kernel<E, kGroups, kWith>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(shape.shared_bytes()));
  return launch_in_chain<kKernel>(dim3(static_cast<unsigned>(shape.blocks)), dim3(kThreads),
                                  shape.shared_bytes(), stream, p, shape);
}

bool is_in_packs(const void* data, int64_t stride) {
  return is_aligned(data, 16) && stride % kPack == 0;
}

}  // namespace

cudaError_t fused_product_fits(const FusedProductParams& p, bool* fits) {
  const FewRowsParams& f = p.product;
  *fits = is_16_bit(f.dtype) && f.rows >= 1 && f.rows <= kMostFusedRows && f.inner >= 1 &&
          f.inner % kPack == 0 && f.inner <= INT32_MAX / 2 && f.outer >= 1 &&
          f.outer <= INT32_MAX && is_in_packs(f.x, f.stride_x) && is_in_packs(f.w, f.stride_w) &&
          (p.gate == nullptr || is_in_packs(p.gate, p.stride_gate)) &&
          is_aligned(p.norm_weight, 16) && is_aligned(p.norm_bias, 16) &&
          (p.squares == nullptr || f.rows > kFewFusedRows);
  for (const FusedProductParams::More& more : p.more) {
    const bool is_apart =
        !p.is_glu && f.bias == nullptr && p.gate == nullptr && is_in_packs(more.w, more.stride_w);
    *fits = *fits && (more.w == nullptr || is_apart);
  }
  if (!*fits) return cudaSuccess;
  if (f.rows > kFewFusedRows) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(batch_product_fits(p, fits));
    if (*fits || f.rows > kPortableFusedRows || p.squares != nullptr) return cudaSuccess;
  }
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  constexpr int64_t kStatic = 1024;  // what a block has beside it, and the driver's own
  const Shape shape = shape_of(p, limits.multiprocessors);
  *fits = f.rows * (ceil_div(f.inner, static_cast<int64_t>(kChunk)) * kRowBytes + 16) +
              shape.ring_bytes + shape.sums_bytes + kStatic <=
          limits.shared_bytes;
  return cudaSuccess;
}

cudaError_t most_fused_rows(int64_t* rows) {
  bool runs = false;
  TIDEGATE_RETURN_IF_CUDA_ERROR(batch_product_runs(&runs));
  *rows = runs ? kMostFusedRows : kPortableFusedRows;
  return cudaSuccess;
}

cudaError_t fused_product_cuda(const FusedProductParams& p, cudaStream_t stream) {
  if (p.product.rows > kFewFusedRows) {
    bool fits = false;
    TIDEGATE_RETURN_IF_CUDA_ERROR(batch_product_fits(p, &fits));
    if (fits) return batch_product_cuda(p, stream);
  }
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const Shape shape = shape_of(p, limits.multiprocessors);
  return dispatch_16_bit(p.product.dtype, [&]<class E>() {
    const auto with = [&]<With kWith>() {
      return p.product.rows > kRowsOfMma ? launch<E, 2, kWith>(p, shape, stream)
                                         : launch<E, 1, kWith>(p, shape, stream);
    };
    return p.gate != nullptr        ? with.template operator()<With::kGate>()
           : p.more[0].w != nullptr ? with.template operator()<With::kMore>()
                                    : with.template operator()<With::kNothing>();
  });
}

}  // namespace tidegate::kernels::product
