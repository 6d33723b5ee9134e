// Drivers of gated linear attention on the CPU: they divide sequences, heads and columns among
// threads and hand each tile to the code for this machine's instruction set.

#include <algorithm>
#include <cstdint>

#include "kernels/common/cpu_isa.h"
#include "kernels/common/cpu_scratch.h"
#include "kernels/common/cpu_sequences.h"
#include "kernels/common/integers.h"
#include "kernels/gla/cpu/gla_kernels.h"
#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {
namespace {

/// Below this many multiplications a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 16;
/// Columns of a tile: as many as make good use of what is computed for all of them (the products
/// between tokens), fewer where threads would be idle.
constexpr int64_t kMaxValueColumns = 128;
constexpr int64_t kMaxKeyColumns = 64;

const GlaKernels& active_kernels() { return TIDEGATE_ACTIVE_KERNELS(kGlaKernels); }

/// How a pass divides into tiles of `width` columns of every head of every sequence.
struct TileGrid {
  int64_t width = 1;
  int64_t tiles = 0;  // of a head
  int64_t total = 0;
};

TileGrid divide_columns(const GlaParams& params, int64_t columns, int64_t max_width,
                        int64_t threads) {
  const int64_t heads = params.layout.sequences * params.heads;
  TileGrid grid;
  grid.width = std::min(columns, max_width);
  const auto idle = [&](int64_t width) {
    const int64_t items = heads * ceil_div(columns, width);
    return ceil_div(items, threads) * threads - items;
  };
  while (grid.width > kPadding && idle(grid.width) > 0 && heads < 4 * threads) {
    grid.width = padded(ceil_div(grid.width, 2));
  }
  grid.tiles = ceil_div(columns, grid.width);
  grid.total = heads * grid.tiles;
  return grid;
}

/// Sequences change fastest: they may differ in length, and every thread then gets some of each.
GlaTile tile_at(const GlaParams& params, const TileGrid& grid, int64_t columns, int64_t index) {
  const int64_t sequences = params.layout.sequences;
  GlaTile tile;
  tile.sequence = index % sequences;
  tile.head = index / sequences / grid.tiles;
  tile.column = index / sequences % grid.tiles * grid.width;
  tile.width = std::min(grid.width, columns - tile.column);
  const SequenceBounds bounds = sequence_bounds(params.layout, tile.sequence);
  tile.batch = bounds.batch;
  tile.begin = bounds.begin;
  tile.length = bounds.length;
  return tile;
}

/// Calls kernel(tile) for all tiles; every thread has scratch memory of its own, which lives for
/// the pass.
template <class Kernel>
void run_tiles(const GlaParams& params, const TileGrid& grid, int64_t columns,
               int64_t scratch_numbers, int64_t threads, const ParallelFor& parallel,
               Kernel kernel) {
  if (grid.total == 0) return;
  const int64_t shares = std::min(threads, grid.total);
  const int64_t bytes =
      ceil_div(scratch_numbers * element_size(state_dtype(params.q.dtype)), 4096) * 4096;
  const CpuScratch scratch(shares * bytes);
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t share = begin; share < end; ++share) {
      for (int64_t i = share * grid.total / shares; i < (share + 1) * grid.total / shares; ++i) {
        GlaTile tile = tile_at(params, grid, columns, i);
        tile.scratch = scratch.get() + share * bytes;
        kernel(tile);
      }
    }
  };
  if (shares == 1) {
    work(0, 1);
  } else {
    parallel.run(shares, work);
  }
}

int64_t threads_for(const GlaParams& params, const ParallelFor& parallel) {
  const int64_t tokens = params.layout.batch * std::max<int64_t>(params.layout.time, 1);
  const int64_t work = tokens * params.channels * params.value_dim;
  return work <= kSerialWork ? 1 : std::max(parallel.threads, 1);
}

/// The columns of V, for o or dv.
template <class Kernel>
void run_value_tiles(const GlaParams& params, const ParallelFor& parallel, Kernel kernel) {
  const int64_t threads = threads_for(params, parallel);
  const TileGrid grid = divide_columns(params, params.value_dim, kMaxValueColumns, threads);
  run_tiles(params, grid, params.value_dim, value_tile_scratch(params.key_dim, grid.width), threads,
            parallel, kernel);
}

}  // namespace

GlaPlan gla_plan_cpu(const GlaParams& params) {
  GlaPlan plan;
  plan.partials = params.layout.sequences;
  return plan;
}

void gla_forward_cpu(const GlaParams& params, const ParallelFor& parallel) {
  const auto kernel = active_kernels().forward;
  run_value_tiles(params, parallel, [&](const GlaTile& tile) { kernel(params, tile); });
}

void gla_backward_cpu(const GlaBackwardParams& params, const ParallelFor& parallel) {
  const GlaParams& forward = params.forward;
  const auto values = active_kernels().backward_values;
  run_value_tiles(forward, parallel, [&](const GlaTile& tile) { values(params, tile); });
  const auto keys = active_kernels().backward_keys;
  const int64_t threads = threads_for(forward, parallel);
  // One gate a head has one gradient, the sum over all of K.
  const TileGrid grid = divide_columns(forward, forward.key_dim,
                                       forward.gate_per_head ? forward.key_dim : kMaxKeyColumns,
                                       forward.gate_per_head ? 1 : threads);
  run_tiles(forward, grid, forward.key_dim,
            key_tile_scratch(forward.value_dim, grid.width, forward.layout.time), threads, parallel,
            [&](const GlaTile& tile) { keys(params, tile); });
}

}  // namespace tidegate::kernels::gla
