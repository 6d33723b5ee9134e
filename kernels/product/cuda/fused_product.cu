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
  // Rows begin 16 bytes further round the banks than the one before.
  shape.x_stride = shape.chunks * kRowBytes + 16;
  shape.ring_bytes = kWarps * shape.stages * kItemBytes;
  shape.x_bytes = static_cast<int>(p.product.rows) * shape.x_stride;
  // A thread has an element of a batch of tiles at most: the fewer meetings, the better.
  shape.batch =
      static_cast<int>(std::clamp<int64_t>(kThreads / (p.product.rows * kTile), 1, tiles));
  shape.sums_bytes = 2 * shape.batch * kWarps * static_cast<int>(p.product.rows) * kTile * 4;
  return shape;
}

template <class E>
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<E, __half>) {
    mma_f16(d, a, b0, b1);
  } else {
    mma_bf16(d, a, b0, b1);
  }
}

// ---- The weights ----

/// A block's part of the channels, and a warp's of the inner ones.
struct Work {
  int64_t first;  // channel
  int channels;   // of the block
  int tiles;      // of the block
  int warp, lane;
  int chunks;  // of the warp
  int items;   // of the warp: its chunks of the first tile, then of the next one

  __device__ Work(const FusedProductParams& p, const Shape& shape) {
    const int64_t outer = p.product.outer;
    first = outer * blockIdx.x / shape.blocks;
    channels = static_cast<int>(outer * (blockIdx.x + 1) / shape.blocks - first);
    tiles = (channels + shape.tile_channels - 1) / shape.tile_channels;
    warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    chunks = (shape.chunks - warp + kWarps - 1) / kWarps;
    chunks = chunks > 0 ? chunks : 0;
    items = tiles * chunks;
  }
};

/// Where a pack of an item lies: packs are permuted so that no eight rows of one meet in a bank.
__device__ inline unsigned place_in_item(int row, int pack) {
  return static_cast<unsigned>(row * kRowBytes + ((pack ^ (row & 7)) * 16));
}

/// A warp's ring of weights: 16 channels by 64 inner ones, in rows of 128 bytes.
template <class E, bool kMore>
struct WeightRing {
  const FusedProductParams& p;
  const Shape& shape;
  const Work& work;
  unsigned base;                                 // address of the warp's ring in shared memory
  int tile = 0, chunk = 0, slot = 0, asked = 0;  // of the next item to ask for

  __device__ const E* weights(int64_t channel) const {
    const void* w = p.product.w;
    int64_t stride = p.product.stride_w, first = 0;
    if constexpr (kMore) {
#pragma unroll
      for (int i = 0; i < FusedProductParams::kMore; ++i) {
        if (p.more[i].w != nullptr && channel >= p.more[i].first) {
          w = p.more[i].w;
          stride = p.more[i].stride_w;
          first = p.more[i].first;
        }
      }
    }
    return static_cast<const E*>(w) + (channel - first) * stride;
  }

  /// Asks for the next item, or for nothing past the last one: groups are counted.
  __device__ void ask() {
    if (asked < work.items) {
      const int pack = work.lane % 8;
      const int64_t inner =
          static_cast<int64_t>(chunk * kWarps + work.warp) * kChunk + pack * kPack;
      const bool exists = inner < p.product.inner;
      const int left = work.channels - tile * shape.tile_channels;
      const unsigned item = base + static_cast<unsigned>(slot * kItemBytes);
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        const int row = i * 4 + work.lane / 8;
        const int channel = p.is_glu ? row % (kTile / 2) : row;
        if (channel >= left) continue;
        const int64_t source = work.first + tile * shape.tile_channels + channel +
                               (p.is_glu && row >= kTile / 2 ? p.product.outer : 0);
        const E* const from = weights(source);
        copy_async_or_zero(item + place_in_item(row, pack), exists ? from + inner : from, exists);
      }
      ++asked;
      slot = slot + 1 == shape.stages ? 0 : slot + 1;
      if (++chunk == work.chunks) {
        chunk = 0;
        ++tile;
      }
    }
    commit_copies();
  }
};

// ---- The products ----

/// Adds up what the warps have of a batch of tiles and makes y of it: a thread an element.
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

  /// Asks for what is added, before the products of the batch from tile `first` on.
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

/// kGroups: of eight rows.
template <class E, int kGroups>
struct Products {
  // Two chains of sums, since each product waits for the one before.
  float d[2][kGroups][4];

  __device__ void clear() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[0][g][i] = d[1][g][i] = 0.0f;
    }
  }

  /// The item's weights times the rows of x, of which `x` is the address of the chunk's first
  /// element. Past the last row, the first one again: nobody asks for what comes of it.
  __device__ void add(unsigned item, unsigned x, int x_stride, int rows, int lane) {
    const int matrix = lane / 8, within = lane % 8;
    const int left_row = (matrix & 1) * 8 + within;
#pragma unroll
    for (int pair = 0; pair < kChunk / 32; ++pair) {
      uint32_t left[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        load_matrices(left[k], item + place_in_item(left_row, 4 * pair + 2 * k + matrix / 2));
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int row = g * kColumns + within;
        uint32_t right[4];
        load_matrices(right, x + static_cast<unsigned>((row < rows ? row : 0) * x_stride +
                                                       (4 * pair + matrix) * 16));
        multiply<E>(d[0][g], left[0], right[0], right[1]);
        multiply<E>(d[1][g], left[1], right[2], right[3]);
      }
    }
  }

  __device__ void leave(float* sums, int rows, const Work& work) const {
    const int channel = work.lane / 4;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = g * kColumns + work.lane % 4 * 2 + i % 2;
        if (row < rows) {
          sums[(work.warp * rows + row) * kTile + channel + i / 2 * 8] = d[0][g][i] + d[1][g][i];
        }
      }
    }
  }
};

template <class E, int kGroups, bool kMore>
__global__ void __launch_bounds__(kThreads)
    fused_product_kernel(const __grid_constant__ FusedProductParams p,
                         const __grid_constant__ Shape shape) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float row_sums[kWarps * RowStager<E>::kGroups];
  char* const x = shared + shape.ring_bytes;
  float* const sums = reinterpret_cast<float*>(x + shape.x_bytes);
  const int rows = static_cast<int>(p.product.rows);
  let_next_kernel_begin();

  const Work work(p, shape);
  const unsigned ring_base =
      shared_address(shared) + static_cast<unsigned>(work.warp * shape.stages * kItemBytes);
  WeightRing<E, kMore> ring{p, shape, work, ring_base};
  // As many groups as a ring can have, some of them empty, so that the loop below counts one
  // number.
  for (int i = 0; i < kStages; ++i) {
    if (i < shape.stages) {
      ring.ask();
    } else {
      commit_copies();
    }
  }
  RowStager<E> stager(p, shape, x, row_sums);
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
      Products<E, kGroups> products;
      products.clear();
      for (int c = 0; c < work.chunks; ++c) {
        // The ring has kStages groups under way where all its stages are in use, and where they are
        // fewer all items were among the first: the oldest has landed either way.
        wait_for_copies<kStages - 1>();
        __syncwarp();
        products.add(ring_base + static_cast<unsigned>(slot * kItemBytes),
                     x_base + static_cast<unsigned>((c * kWarps + work.warp) * kRowBytes),
                     shape.x_stride, rows, work.lane);
        __syncwarp();
        ring.ask();
        slot = slot + 1 == shape.stages ? 0 : slot + 1;
      }
      products.leave(mine + t * tile_sums, rows, work);
    }
    __syncthreads();
    output.store(mine, first);
  }
}

template <class E, int kGroups, bool kMore>
cudaError_t launch(const FusedProductParams& p, const Shape& shape, cudaStream_t stream) {
  constexpr auto* kKernel = &fused_product_kernel<E, kGroups, kMore>;
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
          is_aligned(p.norm_weight, 16) && is_aligned(p.norm_bias, 16);
  for (const FusedProductParams::More& more : p.more) {
    const bool is_apart = !p.is_glu && f.bias == nullptr && is_in_packs(more.w, more.stride_w);
    *fits = *fits && (more.w == nullptr || is_apart);
  }
  if (!*fits) return cudaSuccess;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  constexpr int64_t kStatic = 1024;  // what a block has beside it, and the driver's own
  const Shape shape = shape_of(p, limits.multiprocessors);
  *fits = f.rows * (ceil_div(f.inner, static_cast<int64_t>(kChunk)) * kRowBytes + 16) +
              shape.ring_bytes + shape.sums_bytes + kStatic <=
          limits.shared_bytes;
  return cudaSuccess;
}

cudaError_t fused_product_cuda(const FusedProductParams& p, cudaStream_t stream) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const Shape shape = shape_of(p, limits.multiprocessors);
  return dispatch_16_bit(p.product.dtype, [&]<class E>() {
    const bool is_more = p.more[0].w != nullptr;
    if (p.product.rows > kColumns) {
      return is_more ? launch<E, 2, true>(p, shape, stream) : launch<E, 2, false>(p, shape, stream);
    }
    return is_more ? launch<E, 1, true>(p, shape, stream) : launch<E, 1, false>(p, shape, stream);
  });
}

}  // namespace tidegate::kernels::product
