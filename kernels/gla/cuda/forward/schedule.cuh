#pragma once

// How the forward pass on tensor cores divides its work: the tile configurations with their
// reasons, what a launch tells its kernel, and the workspace. The plan (tensor_forward.cu) and the
// kernel (tensor_forward.cuh) read everything from here.

#include <algorithm>

#include "kernels/common/cuda/time_tiles.cuh"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/dyadic.cuh"
#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

// The tiles of a block of threads, which has one head of one segment.
//
//   time    16 tokens, a sub-chunk: the depth of one mma, four dyadic levels (dyadic.cuh).
//   keys    64 where K <= 64: half of the state's registers and two thirds of a stage's bytes.
//           128 above: a consumer's state is 64 fp32 registers a lane, which is what 128 registers
//           a thread leave room for. K up to 256 takes two launches with fp32 sums between them.
//   values  V / ceil(V / 128) columns, rounded up to 16: one consumer warp per 16 columns.
//           Eight consumers leave eight warps to load and to make operands.
//   warps   up to 16 of 128 registers a thread: the consumers, one loader, and as many producers as
//           find a stage to work on.
//   stages  up to 16, as many as shared memory holds: 16 of 13.25 KB (keys 128, 16-bit logits) in
//           227 KB, 7 in the 99 KB of smaller chips.
constexpr int kNarrowKeyTile = 64, kKeyTile = 128;
constexpr int kValueTile = 128;
constexpr int kConsumerColumns = 16;
constexpr int kMaxWarps = 16;
constexpr int kMaxStages = 16;
constexpr int kMaxDim = 256;  // of K and V

/// Segments shorter than this have more of a start and an end than of a middle.
constexpr int64_t kShortestSegment = 256;
/// What a pass over the maps of segments costs beside the pass over the outputs.
constexpr double kMapCost = 0.5;

inline int64_t value_tiles(const GlaParams& p) { return ceil_div(p.value_dim, kValueTile); }

/// Columns of V a block of threads: as equal as multiples of 16 can be.
inline int value_tile(const GlaParams& p) {
  return static_cast<int>(ceil_div(p.value_dim, value_tiles(p) * kConsumerColumns) *
                          kConsumerColumns);
}

/// The ring of stages in shared memory, and the warps that fill it.
struct ForwardRing {
  int stages, producers;

  ForwardRing(int stage_bytes, int consumers, int shared_bytes) {
    constexpr int kStaticBytes = 1 << 10;  // barriers and bounds
    stages = std::min(kMaxStages, (shared_bytes - kStaticBytes) / stage_bytes);
    // Some stages are being loaded and one is consumed while every producer holds one.
    producers = std::clamp(stages - 3, 1, kMaxWarps - 1 - consumers);
  }
};

/// Tokens of a segment, or 0 where whole sequences keep the chip busy.
inline int64_t choose_forward_segment(const GlaParams& p, int multiprocessors) {
  const int64_t blocks = p.heads * value_tiles(p);  // of one segment
  const auto rounded = [](int64_t time) { return ceil_div(time, kSubChunk) * kSubChunk; };
  if (p.layout.offsets != nullptr) {
    // Lengths are not known here: enough segments of equal length, unless there are many sequences.
    const int64_t time = std::max(
        kShortestSegment, rounded(ceil_div(p.layout.time * blocks, int64_t{multiprocessors})));
    return p.layout.sequences * blocks >= 2 * multiprocessors || p.layout.time <= time ? 0 : time;
  }
  int64_t best = 1;
  double least = 0;
  for (int64_t parts = 1; parts == 1 || p.layout.time / parts >= kShortestSegment; ++parts) {
    const int64_t waves = ceil_div(p.layout.sequences * blocks * parts, multiprocessors);
    // Passes of 1 / parts of the time each, and a little for every one of them.
    const double cost = (parts == 1 ? 1.0 : 1.0 + kMapCost) * static_cast<double>(waves) /
                            static_cast<double>(parts) +
                        0.002 * static_cast<double>(parts);
    if (parts == 1 || cost < least) {
      best = parts;
      least = cost;
    }
  }
  return best == 1 ? 0 : rounded(ceil_div(p.layout.time, best));
}

/// What a launch tells its kernel.
struct TensorForward {
  GlaParams params = {};
  int first_key = 0, keys = 0;  // the key tile
  int value_tile = 0;           // columns of V a block, a multiple of 16
  int producers = 0, stages = 0;
  TimeTiles segments = {};  // a segment is a whole sequence where time is not divided
  // Where time is divided into segments: [segment index, H, K, V] and [segment index, H, K]. First
  // the map of each segment (the state it makes of zero, and the product of its decays), then in
  // the place of the former the state after it.
  float* states = nullptr;
  float* products = nullptr;
  // K above 128: the sum of o over the key tiles before this one, and up to it. [B, T, H, V].
  const float* sum_before = nullptr;
  float* sum_after = nullptr;

  bool is_partial() const { return sum_before != nullptr || sum_after != nullptr; }
};

/// The parts of the workspace, in their order, in bytes.
struct ForwardWorkspace {
  int64_t states, products, sums;

  ForwardWorkspace(const GlaParams& p, int64_t segments)
      : states(segments * p.heads * p.key_dim * p.value_dim * int64_t{sizeof(float)}),
        products(segments * p.heads * p.key_dim * int64_t{sizeof(float)}),
        sums(p.key_dim <= kKeyTile ? 0
                                   : p.layout.batch * p.layout.time * p.heads * p.value_dim *
                                         int64_t{sizeof(float)}) {}

  int64_t bytes() const { return states + products + sums; }
  float* states_in(void* workspace) const { return at(workspace, 0); }
  float* products_in(void* workspace) const { return at(workspace, states); }
  float* sums_in(void* workspace) const { return at(workspace, states + products); }

 private:
  static float* at(void* workspace, int64_t offset) {
    return reinterpret_cast<float*>(static_cast<char*>(workspace) + offset);
  }
};

/// The part of a launch's work that one block of threads has.
struct WorkTile {
  TimeTile segment;
  int64_t head;
  int first_key, keys;      // channels of K: 128 at most
  int first_value, values;  // columns of V: 128 at most
};

__device__ inline WorkTile find_work_tile(const TensorForward& w) {
  const GlaParams& p = w.params;
  const int tiles = static_cast<int>((p.value_dim + w.value_tile - 1) / w.value_tile);
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int64_t pair = blockIdx.x / tiles;
  const int first = tile * w.value_tile;
  return {find_time_tile(w.segments, static_cast<int>(pair / p.heads)),
          pair % p.heads,
          w.first_key,
          w.keys,
          first,
          min(w.value_tile, static_cast<int>(p.value_dim) - first)};
}

/// The segment index of the block of threads.
__device__ inline int64_t find_segment_index(const TensorForward& w) {
  const GlaParams& p = w.params;
  return blockIdx.x / ((p.value_dim + w.value_tile - 1) / w.value_tile) / p.heads;
}

/// Where the state of a work tile's keys and values begins in row `row` of a tensor [.., H, K, V].
__device__ inline int64_t state_offset(const GlaParams& p, const WorkTile& work, int64_t row) {
  return ((row * p.heads + work.head) * p.key_dim + work.first_key) * p.value_dim +
         work.first_value;
}

}  // namespace tidegate::kernels::gla
