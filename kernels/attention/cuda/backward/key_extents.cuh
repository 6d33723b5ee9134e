#pragma once

// Which queries pruning leaves to the keys, found before the backward pass: a warp for every 64
// keys and query head. Blocks of the pass then start with one load where they would search.

#include "kernels/attention/cuda/pruning.cuh"

namespace tidegate::kernels::attention {

constexpr int kReachWarps = 8;  // of a block

/// Keys with so many queries each, on average over a sequence, have less to do in small tiles.
constexpr double kNearTokens = 256;

inline int64_t reach_blocks(const KeyReach& reach, int64_t heads) {
  return (reach.keys.slots * heads + kReachWarps - 1) / kReachWarps;
}

__global__ void __launch_bounds__(kReachWarps * 32)
    key_reach_kernel(const __grid_constant__ TensorAttention w) {
  const ForgettingAttentionParams& p = w.params.forward;
  const int64_t at = int64_t{blockIdx.x} * kReachWarps + threadIdx.x / 32;
  const int64_t slot = at / p.heads;
  if (slot >= w.reach.keys.slots) {
    return;
  }
  const int head = static_cast<int>(at % p.heads), lane = static_cast<int>(threadIdx.x) % 32;
  const Cut cut = find_cut(w.reach.keys, static_cast<int>(slot));
  if (cut.tokens == 0) {
    return;
  }
  const Sequence& keys = cut.sequence;
  const GateSums gates(w, keys, head);
  const double fall = largest_fall(p, keys.length, ScoreBounds::score(w, keys.batch, head));
  const double last = gates.at(cut.first + cut.tokens - 1);
  const int shift = keys.length - find_sequence(p.layout, keys.index).length;
  const int end = gates.first_known_not_above(last - fall, keys.length, lane) - shift;
  if (lane == 0) {
    w.reach.ends[at] = max(end, 0);
    if (cut.index == 0) {
      const double whole = gates.at(0) - gates.at(keys.length - 1);
      const bool near = fall * keys.length < whole * kNearTokens;
      w.reach.near[keys.index * p.heads + head] = near;
      if (!near) {
        w.reach.far[0] = 1;
      }
    }
  }
}

}  // namespace tidegate::kernels::attention
