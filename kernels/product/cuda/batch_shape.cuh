#pragma once

// How a batch's fused product is divided into clusters and blocks, and what a block has in shared
// memory. See batch_product.cu.

#include <algorithm>
#include <cstdint>

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/integers.h"
#include "kernels/product/cuda/fused_rows.cuh"

namespace tidegate::kernels::product {

constexpr int kBatchRows = 64;
constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kWarpgroups = kThreads / kGroupThreads;
constexpr int kPanelBytes = kBatchRows * kRowBytes;  // of a chunk of x
constexpr int kMostBatchStages = 8;
// A block's shared memory, small enough that a block of the next kernel has room beside it. A block
// takes more where it would otherwise ask for some of its weights late, which takes longer.
constexpr int kWantedBytes = (228 << 10) / 2 - (2 << 10);
constexpr int kMostClusterBlocks = 8;  // of a cluster

/// How a launch is divided. A tile is 16 rows of w.
struct BatchShape {
  int blocks = 0, log_blocks = 0;  // of a cluster
  int clusters = 0;
  int tiles = 0, least_tiles = 0;  // of all channels; of a cluster
  int tile_channels = 0;           // of y
  int chunks = 0;                  // of all inner channels
  int columns = 0;                 // of w's rows that a warpgroup multiplies at once
  int passes = 0;                  // that a cluster takes at most
  int own_chunks = 0;              // of a block, at most
  int stages = 0;
  int x_bytes = 0, ring_bytes = 0, part_stride = 0, parts_bytes = 0;
  int main_bytes = 0;       // of all of these
  int parts_at = 0;         // where the block's sums lie in shared memory
  bool is_aligned = false;  // four channels of y and of the residual lie as one access wants them
  // Whether a row's factor is applied to the sums: then no product waits for the factor.
  bool scales_sums = false;
  bool copies_x = false;  // x goes to shared memory as it is

  static constexpr int kOtherBytes = (2 * kMostClusterBlocks + 2) * kBatchRows * 4 + 64;
  int constant_bytes() const { return 2 * own_chunks * kRowBytes; }
  int shared_bytes() const { return 1024 + main_bytes + kOtherBytes + constant_bytes(); }
  int most_tiles() const { return static_cast<int>(ceil_div(tiles, clusters)); }
};

/// Where the parts of a block lie in shared memory, and how many of its weights are under way at
/// once, in clusters that have at most `columns` columns.
inline void lay_out(const FusedProductParams& p, int columns, const DeviceLimits& limits,
                    BatchShape* shape) {
  BatchShape& s = *shape;
  const int item = kWarpgroups * s.columns * kRowBytes;
  s.passes = static_cast<int>(ceil_div(columns, kWarpgroups * s.columns));
  s.x_bytes = s.own_chunks * kPanelBytes;
  s.part_stride = std::min(columns, kWarpgroups * s.columns) + 4;
  s.parts_bytes = kBatchRows * s.part_stride * 4;
  const int other = s.shared_bytes() + s.x_bytes + (s.passes > 1 ? s.parts_bytes : 0);
  const int items = s.passes * s.own_chunks;
  int wanted = kWantedBytes;
  if (s.passes == 1 && items <= kMostBatchStages && other + items * item > wanted &&
      other + items * item <= limits.shared_bytes) {
    wanted = limits.shared_bytes;
  }
  s.stages = std::min(std::clamp((wanted - other) / item, 2, kMostBatchStages), items);
  s.ring_bytes = s.stages * item;
  // Where x and the weights were, once the block needs them no more; with several passes, it does.
  const int loaded = s.x_bytes + s.ring_bytes;
  s.parts_at = s.passes > 1 || loaded < s.parts_bytes ? loaded : 0;
  s.main_bytes = std::max(loaded, s.parts_at + s.parts_bytes);
  s.scales_sums = p.has_norm && p.norm_kind == norm::NormKind::kRms && p.norm_bias == nullptr &&
                  !(p.gate != nullptr && p.gate_first) && p.product.dtype == DType::kBFloat16;
  s.copies_x = !p.has_norm || (s.scales_sums && p.gate == nullptr && p.norm_weight == nullptr);
}

inline BatchShape shape_of(const FusedProductParams& p, int blocks, const DeviceLimits& limits) {
  BatchShape s;
  s.blocks = blocks;
  while (1 << s.log_blocks < blocks) ++s.log_blocks;
  s.tile_channels = p.is_glu ? kTile / 2 : kTile;
  s.tiles = static_cast<int>(ceil_div(p.product.outer, int64_t{s.tile_channels}));
  s.chunks = static_cast<int>(ceil_div(p.product.inner, int64_t{kChunk}));
  const int at_once = std::max(1, limits.multiprocessors / blocks);
  const int each = static_cast<int>(ceil_div(s.tiles, at_once));
  s.clusters = static_cast<int>(ceil_div(s.tiles, each));
  s.least_tiles = s.tiles / s.clusters;
  s.own_chunks = static_cast<int>(ceil_div(s.chunks, blocks));
  s.columns = 96;
  for (const int columns : {48, 32}) {
    if (kWarpgroups * columns >= each * kTile) s.columns = columns;
  }
  lay_out(p, each * kTile, limits, &s);
  const auto in_fours = [](const void* data, int64_t stride) {
    return is_aligned(data, 8) && stride % 4 == 0;
  };
  s.is_aligned = p.product.outer % 4 == 0 && in_fours(p.product.y, p.product.stride_y) &&
                 (p.residual == nullptr || in_fours(p.residual, p.stride_residual));
  return s;
}

/// Bytes that a block moves; twice those between blocks, and those that are asked for late.
inline int64_t cost_of(const BatchShape& s) {
  const int64_t columns = int64_t{s.most_tiles()} * kTile;
  return s.own_chunks * int64_t{kRowBytes} * (columns + kBatchRows) +
         2 * kBatchRows * columns * 4 * (s.blocks - 1) / s.blocks +
         int64_t{s.passes * s.own_chunks - s.stages} * (s.ring_bytes / s.stages);
}

inline BatchShape shape_of(const FusedProductParams& p, const DeviceLimits& limits) {
  BatchShape best;
  for (const int blocks : {2, 4, 8}) {
    const BatchShape s = shape_of(p, blocks, limits);
    if (s.shared_bytes() > limits.shared_bytes) continue;
    if (best.blocks == 0 || cost_of(s) < cost_of(best)) best = s;
  }
  return best;
}

/// Launches a kernel of a chain in the shape's clusters.
template <auto* kKernel, class... Work>
cudaError_t launch_clusters(const BatchShape& s, int shared_bytes, cudaStream_t stream,
                            const Work&... work) {
  const dim3 grid(static_cast<unsigned>(s.clusters * s.blocks)), block(kThreads);
  switch (s.blocks) {
    case 2:
      return launch_in_chain<kKernel, 2>(grid, block, shared_bytes, stream, work...);
    case 4:
      return launch_in_chain<kKernel, 4>(grid, block, shared_bytes, stream, work...);
    default:
      return launch_in_chain<kKernel, kMostClusterBlocks>(grid, block, shared_bytes, stream,
                                                          work...);
  }
}

/// A block's part of the work.
struct BatchWork {
  int rank, cluster;
  int first_tile, tiles;    // of the cluster
  int first_chunk, chunks;  // of the block
  int thread, warp, lane, group;

  __device__ explicit BatchWork(const BatchShape& s) {
    rank = cluster_rank();
    cluster = static_cast<int>(blockIdx.x) >> s.log_blocks;
    // Parts are as equal as they can be: the first clusters have one tile more.
    const int more = s.tiles - s.least_tiles * s.clusters;
    first_tile = cluster * s.least_tiles + min(cluster, more);
    tiles = s.least_tiles + (cluster < more ? 1 : 0);
    first_chunk = s.chunks * rank >> s.log_blocks;
    chunks = (s.chunks * (rank + 1) >> s.log_blocks) - first_chunk;
    thread = static_cast<int>(threadIdx.x);
    warp = thread / 32;
    lane = thread % 32;
    group = thread / kGroupThreads;
  }
};

}  // namespace tidegate::kernels::product
