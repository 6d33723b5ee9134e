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
#include "kernels/norm/cuda/row_tile.cuh"
#include "kernels/product/product_cuda.h"

namespace tidegate::kernels::product {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 16;   // channels: the rows of an mma's left operand
constexpr int kChunk = 64;  // inner channels of a warp at a time: whole lines of 128 bytes
constexpr int kPack = 8;    // elements of 16 bytes
constexpr int kRowBytes = kChunk * 2;
constexpr int kItemBytes = kTile * kRowBytes;
// 12 KB a warp, 96 KB a block: three times what covers the memory's latency at its full speed, and
// two kernels of the chain have room on a multiprocessor.
constexpr int kStages = 6;
constexpr int kColumns = 8;  // rows of x: columns of an mma's right operand

/// How a launch is cut.
struct Shape {
  int blocks = 0;
  int chunks = 0;         // of the inner channels
  int tile_channels = 0;  // of y
  int stages = 0;         // of a warp's ring that are used
  int batch = 0;          // tiles whose sums the warps leave before they meet
  int x_stride = 0;       // bytes from a row of x to the next one in shared memory
  int ring_bytes = 0, x_bytes = 0, sums_bytes = 0;

  int shared_bytes() const { return ring_bytes + x_bytes + sums_bytes; }
};

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

// ---- The rows of x ----

/// The rows of x, normed, into shared memory. Eight warps share a row, or fewer each, so that up to
/// eight rows are on their way at once.
template <class E>
struct RowStager {
  using Math = GateMath<float, true>;
  using Row = Pack<E, kPack>;

  const FusedProductParams& p;
  const Shape& shape;
  char* x;      // in shared memory
  float* sums;  // of kWarps warps

  int warps, side_by_side, team, thread;  // of a row; rows; which of them; in the team

  __device__ RowStager(const FusedProductParams& p, const Shape& shape, char* x, float* sums)
      : p(p), shape(shape), x(x), sums(sums) {
    side_by_side = 1;
    while (side_by_side < p.product.rows && side_by_side < kWarps) side_by_side *= 2;
    warps = kWarps / side_by_side;
    team = static_cast<int>(threadIdx.x) / (32 * warps);
    thread = static_cast<int>(threadIdx.x) % (32 * warps);
  }

  __device__ int packs() const { return static_cast<int>(p.product.inner) / kPack; }

  // No __ldg: the kernel before may write them while this one runs.
  __device__ Row load(const void* from, int64_t stride, int row, int pack) const {
    const E* const at = static_cast<const E*>(from) + row * stride;
    return {*(reinterpret_cast<const typename Row::Bits*>(at) + pack)};
  }
  /// So many packs of a row a thread keeps in registers; longer rows are read once more.
  static constexpr int kKept = 2;
  Row weights[kKept], biases[kKept];

  __device__ bool is_kept() const { return packs() <= kKept * 32 * warps; }

  /// Reads what no kernel writes.
  __device__ void load_constants() {
    if (!p.has_norm || !is_kept()) return;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int pack = thread + i * 32 * warps;
      const bool exists = pack < packs();
      weights[i] = constant(p.norm_weight, exists ? pack : 0);
      biases[i] = constant(p.norm_bias, exists ? pack : 0);
    }
  }
  __device__ Row constant(const void* from, int pack) const {
    if (from == nullptr) return {};
    return {__ldg(static_cast<const typename Row::Bits*>(from) + pack)};
  }

  __device__ uint4* place(int row, int pack) const {
    return reinterpret_cast<uint4*>(x + row * shape.x_stride) + pack;
  }

  /// What is normed.
  __device__ void values(int row, int pack, float (&u)[kPack]) const {
    const Row raw = load(p.product.x, p.product.stride_x, row, pack);
#pragma unroll
    for (int v = 0; v < kPack; ++v) u[v] = raw.get(v);
    if (p.gate != nullptr && p.gate_first) gate(row, pack, u);
  }
  __device__ void gate(int row, int pack, float (&u)[kPack]) const {
    const Row logits = load(p.gate, p.stride_gate, row, pack);
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      u[v] *= norm::activated<Math>(p.gate_activation, logits.get(v));
    }
  }

  /// The sum over a row's threads. All threads of the block come here.
  __device__ float row_sum(float mine) const {
    mine = warp_sum(mine);
    if (warps == 1) return mine;
    __syncthreads();  // for those who still read the sums before
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) sum += sums[team * warps + w];
    return sum;
  }

  /// u - mean becomes y, which goes to its place.
  __device__ void finish(int row, int pack, float (&u)[kPack], float factor, Row weight,
                         Row bias) const {
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      u[v] = fmaf(u[v] * factor, p.norm_weight != nullptr ? weight.get(v) : 1.0f,
                  p.norm_bias != nullptr ? bias.get(v) : 0.0f);
    }
    if (p.gate != nullptr && !p.gate_first) gate(row, pack, u);
    norm::store_eight(reinterpret_cast<E*>(place(row, pack)), u);
  }

  /// A row that its threads keep in registers.
  __device__ void stage_kept(int row, bool exists) const {
    const float channels = static_cast<float>(p.product.inner);
    const int count = exists ? packs() : 0;
    float u[kKept][kPack] = {}, sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (const int pack = thread + i * 32 * warps; pack < count) values(row, pack, u[i]);
    }
    if (p.norm_kind == norm::NormKind::kLayer) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
#pragma unroll
        for (int v = 0; v < kPack; ++v) sum += u[i][v];
      }
      const float mean = row_sum(sum) / channels;
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const bool is_there = thread + i * 32 * warps < count;
#pragma unroll
        for (int v = 0; v < kPack; ++v) u[i][v] = is_there ? u[i][v] - mean : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
#pragma unroll
      for (int v = 0; v < kPack; ++v) square = fmaf(u[i][v], u[i][v], square);
    }
    const float factor = rsqrtf(row_sum(square) / channels + static_cast<float>(p.eps));
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (const int pack = thread + i * 32 * warps; pack < count) {
        finish(row, pack, u[i], factor, weights[i], biases[i]);
      }
    }
  }

  __device__ void stage_raw(int row) const {
#pragma unroll 8
    for (int pack = thread; pack < packs(); pack += 32 * warps) {
      *place(row, pack) = load(p.product.x, p.product.stride_x, row, pack).bits;
    }
  }

  __device__ void stage_long(int row, bool exists) const {
    const float channels = static_cast<float>(p.product.inner);
    const int count = exists ? packs() : 0;
    float mean = 0.0f, square = 0.0f;
    if (p.norm_kind == norm::NormKind::kLayer) {
      float sum = 0.0f;
      for (int pack = thread; pack < count; pack += 32 * warps) {
        float u[kPack];
        values(row, pack, u);
#pragma unroll
        for (int v = 0; v < kPack; ++v) sum += u[v];
      }
      mean = row_sum(sum) / channels;
    }
#pragma unroll 4
    for (int pack = thread; pack < count; pack += 32 * warps) {
      float u[kPack];
      values(row, pack, u);
#pragma unroll
      for (int v = 0; v < kPack; ++v) square = fmaf(u[v] - mean, u[v] - mean, square);
    }
    const float factor = rsqrtf(row_sum(square) / channels + static_cast<float>(p.eps));
    // Read again, from the first-level cache.
    for (int pack = thread; pack < count; pack += 32 * warps) {
      float u[kPack];
      values(row, pack, u);
#pragma unroll
      for (int v = 0; v < kPack; ++v) u[v] -= mean;
      finish(row, pack, u, factor, constant(p.norm_weight, pack), constant(p.norm_bias, pack));
    }
  }

  /// The last chunk's rest is zero.
  __device__ void run() const {
    const int rows = static_cast<int>(p.product.rows);
    for (int first = 0; first < rows; first += side_by_side) {
      const int row = first + team;
      const bool exists = row < rows;
      if (p.has_norm) {
        is_kept() ? stage_kept(row, exists) : stage_long(row, exists);
      } else if (exists) {
        stage_raw(row);
      }
      const int padded = shape.chunks * kChunk / kPack;
      for (int pack = packs() + thread; exists && pack < padded; pack += 32 * warps) {
        *place(row, pack) = uint4{};
      }
    }
    __syncthreads();
  }
};

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

/// A warp's ring of weights: 16 channels by 64 inner ones, in rows of 128 bytes whose packs are
/// permuted so that no eight rows of one pack meet in a bank.
template <class E>
struct WeightRing {
  const FusedProductParams& p;
  const Shape& shape;
  const Work& work;
  unsigned base;                                 // address of the warp's ring in shared memory
  int tile = 0, chunk = 0, slot = 0, asked = 0;  // of the next item to ask for

  __device__ static unsigned place(int row, int pack) {
    return static_cast<unsigned>(row * kRowBytes + ((pack ^ (row & 7)) * 16));
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
        const E* const from = static_cast<const E*>(p.product.w) + source * p.product.stride_w;
        copy_async_or_zero(item + place(row, pack), exists ? from + inner : from, exists);
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
        load_matrices(left[k],
                      item + WeightRing<E>::place(left_row, 4 * pair + 2 * k + matrix / 2));
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

template <class E, int kGroups>
__global__ void __launch_bounds__(kThreads)
    fused_product_kernel(const __grid_constant__ FusedProductParams p,
                         const __grid_constant__ Shape shape) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float row_sums[kWarps];
  char* const x = shared + shape.ring_bytes;
  float* const sums = reinterpret_cast<float*>(x + shape.x_bytes);
  const int rows = static_cast<int>(p.product.rows);
  let_next_kernel_begin();

  const Work work(p, shape);
  const unsigned ring_base =
      shared_address(shared) + static_cast<unsigned>(work.warp * shape.stages * kItemBytes);
  WeightRing<E> ring{p, shape, work, ring_base};
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

template <class E, int kGroups>
cudaError_t launch(const FusedProductParams& p, const Shape& shape, cudaStream_t stream) {
  constexpr auto* kKernel = &fused_product_kernel<E, kGroups>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(shape.shared_bytes()));
  return launch_early<kKernel>(dim3(static_cast<unsigned>(shape.blocks)), dim3(kThreads),
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
    return p.product.rows <= kColumns ? launch<E, 1>(p, shape, stream)
                                      : launch<E, 2>(p, shape, stream);
  });
}

}  // namespace tidegate::kernels::product
