#pragma once

// Which queries pruning leaves to the keys, found before the backward pass: a warp for every 64
// keys and query head. Blocks of the pass then start with one load where they would search.

#include "kernels/attention/cuda/pruning.cuh"

namespace tidegate::kernels::attention {

constexpr int kExtentWarps = 8;  // of a block

/// Keys with so many queries each, on average over a sequence, have less to do in small tiles.
constexpr double kShortRangeTokens = 256;

inline int64_t extent_blocks(const KeyExtents& extents, int64_t heads) {
  return (extents.keys.count * heads + kExtentWarps - 1) / kExtentWarps;
}

__global__ void __launch_bounds__(kExtentWarps * 32)
    key_extents_kernel(const __grid_constant__ TensorAttention w) {
  const ForgettingAttentionParams& p = w.params.forward;
  const int64_t at = int64_t{blockIdx.x} * kExtentWarps + threadIdx.x / 32;
  const int64_t tile_index = at / p.heads;
  if (tile_index >= w.extents.keys.count) {
    return;
  }
  const int head = static_cast<int>(at % p.heads), lane = static_cast<int>(threadIdx.x) % 32;
  const TimeTile tile = find_time_tile(w.extents.keys, static_cast<int>(tile_index));
  if (tile.tokens == 0) {
    return;
  }
  const Sequence& keys = tile.sequence;
  const GateSums gates(w, keys, head);
  const double fall = largest_fall(p, keys.length, ScoreBounds::score(w, keys.batch, head));
  const double last = gates.at(tile.first + tile.tokens - 1);
  const int shift = keys.length - find_sequence(p.layout, keys.index).length;
  const int end = gates.first_known_not_above(last - fall, keys.length, lane) - shift;
  if (lane == 0) {
    w.extents.ends[at] = max(end, 0);
    if (tile.index == 0) {
      const double whole = gates.at(0) - gates.at(keys.length - 1);
      const bool is_short = fall * keys.length < whole * kShortRangeTokens;
      w.extents.short_range[keys.index * p.heads + head] = is_short;
      if (!is_short) {
        w.extents.long_range[0] = 1;
      }
    }
  }
}

}  // namespace tidegate::kernels::attention
