#pragma once

// What the blocks of the short-range kernel (short_range.cuh) are made of: their tiles, their
// shared memory with its barriers, and the producer's warps.

#include "kernels/attention/cuda/hopper/backward_tiles.cuh"
#include "kernels/attention/cuda/pruning.cuh"

namespace tidegate::kernels::attention {

/// The block's part of a sequence: a step is a tile of positions.
struct HopperShortRange {
  static constexpr int kRows = KeyExtents::kKeys;
  Sequence keys, queries;
  int key_head;
  int shift;                 // from a query to its position, not negative
  int begin, end;            // tiles that the block owns
  int last;                  // step: `end`, or the sequence's last tile
  int first_head, end_head;  // query heads that share the keys
  int window;

  static __device__ HopperShortRange of(const TensorAttention& w, const TileAndHead& at) {
    const ForgettingAttentionParams& p = w.params.forward;
    const Sequence keys = at.tile.sequence, queries = find_sequence(p.layout, keys.index);
    const int end = (at.tile.end() + kRows - 1) / kRows;
    const int group = static_cast<int>(p.heads / p.key_heads);  // query heads of a key head
    return {.keys = keys,
            .queries = queries,
            .key_head = at.head,
            .shift = keys.length - queries.length,
            .begin = at.tile.first / kRows,
            .end = end,
            .last = min(end, (keys.length + kRows - 1) / kRows - 1),
            .first_head = at.head * group,
            .end_head = (at.head + 1) * group,
            .window = static_cast<int>(p.window)};
  }
  __device__ bool has_queries(int step) const { return (step + 1) * kRows > shift; }
  /// Whether a window ends before all of a step's queries have seen all keys of the tile before.
  __device__ bool is_far_edge(int step) const {
    return window > 0 && (step - 1) * kRows <= step * kRows + kRows - 1 - window;
  }
};

/// What a step's queries of a head bring beside Q and dO: c_ref - c_j, high and low parts, of the
/// two tiles of keys, by the parity of the tile; c_ref is c of the last key before the diagonal's.
template <class Shape>
struct HopperShortRangeStats {
  HopperRowStats<Shape::kRows> rows;
  float key_high[2][Shape::kKeys], key_low[2][Shape::kKeys];
  float gate_low_less_lse[Shape::kRows];
};

template <class Shape>
struct HopperShortRangeShared {
  alignas(1024) unsigned char keys[3][Shape::kKeyBytes];
  alignas(1024) unsigned char values[3][Shape::kKeyBytes];
  alignas(1024) unsigned char queries[2][Shape::kRowBytes];
  alignas(1024) unsigned char d_o[2][Shape::kRowBytes];
  alignas(1024) unsigned char ds[2][2][Shape::kScoreBytes];   // by the parity of the tile of keys
  alignas(1024) unsigned char staged[2][Shape::kScoreBytes];  // a warpgroup's, on their way out
  HopperShortRangeStats<Shape> stats[2];
  float row_sums[2][Shape::kMathWarps][Shape::kRows];  // of dS over a warp's keys
  float zeros[Shape::kRows];
  HopperShortRange short_range;  // read where it is needed: registers are short
  // See short_range.cuh for who waits for whom.
  uint64_t keys_full[3], keys_free[3];        // with values
  uint64_t queries_full[2], queries_free[2];  // with stats, and freed with row_sums
  uint64_t d_o_full[2], d_o_free[2];
  uint64_t ds_full[2];
  uint64_t row_sums_full[2];

  /// Called by all threads, before a barrier of the block.
  __device__ void init(const TensorAttention& w, const TileAndHead& place, int thread) {
    if (thread < Shape::kRows) {
      zeros[thread] = 0;
    }
    if (thread == 0) {
      short_range = HopperShortRange::of(w, place);
      for (int i = 0; i < 3; ++i) {
        mbarrier_init(&keys_full[i], 2);
        mbarrier_init(&keys_free[i], Shape::kMathWarps);
      }
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(&queries_full[i], 1 + 32);
        mbarrier_init(&queries_free[i], 32 * Shape::kMathWarps + 32);
        mbarrier_init(&d_o_full[i], 1);
        mbarrier_init(&d_o_free[i], Shape::kMathWarps);
        mbarrier_init(&ds_full[i], Shape::kMathWarps);
        mbarrier_init(&row_sums_full[i], 32 * Shape::kMathWarps);
      }
      hopper::fence_barrier_init();
    }
  }
};

/// The producer's first warp: keys and values of a tile, from the one before the block's first on,
/// then the step's tiles of Q and dO.
template <class Shape>
__device__ inline void load_short_range_tiles(const HopperBackwardWork& work,
                                              HopperShortRangeShared<Shape>& shared, int lane) {
  constexpr int kRows = Shape::kRows, kDim = Shape::kDim;
  const ForgettingAttentionParams& p = work.attention.params.forward;
  const HopperShortRange at = shared.short_range;
  const int pieces = static_cast<int>(p.head_dim / 8);
  hopper::RingPlace<3> slot;
  hopper::RingPlace<2> stage;
  for (int step = at.begin - 1; step <= at.last; ++step, slot.advance()) {
    mbarrier_wait(&shared.keys_free[slot.stage()], slot.phase() ^ 1);
    load_hopper_tile<kRows, kDim, true>(shared.keys[slot.stage()], &work.k, p.k,
                                        &shared.keys_full[slot.stage()], at.keys, at.key_head,
                                        step * kRows, pieces, lane);
    load_hopper_tile<kRows, kDim, true>(shared.values[slot.stage()], &work.v, p.v,
                                        &shared.keys_full[slot.stage()], at.keys, at.key_head,
                                        step * kRows, pieces, lane);
    if (step < at.begin || !at.has_queries(step)) {
      continue;
    }
    for (int head = at.first_head; head < at.end_head; ++head, stage.advance()) {
      const int first = step * kRows - at.shift;
      mbarrier_wait(&shared.queries_free[stage.stage()], stage.phase() ^ 1);
      load_hopper_tile<kRows, kDim, true>(shared.queries[stage.stage()], &work.q, p.q,
                                          &shared.queries_full[stage.stage()], at.queries, head,
                                          first, pieces, lane);
      mbarrier_wait(&shared.d_o_free[stage.stage()], stage.phase() ^ 1);
      load_hopper_tile<kRows, kDim, true>(
          shared.d_o[stage.stage()], &work.d_o, work.attention.params.d_o,
          &shared.d_o_full[stage.stage()], at.queries, head, first, pieces, lane);
    }
  }
}

/// The producer's second warp: gates and what the queries' scores need. See HopperRowStats.
template <class Shape>
__device__ inline void load_short_range_stats(const TensorAttention& w,
                                              HopperShortRangeShared<Shape>& shared, int lane) {
  constexpr int kRows = Shape::kRows;
  const ForgettingAttentionParams& p = w.params.forward;
  const HopperShortRange at = shared.short_range;
  const float inverse_scale = 1 / (static_cast<float>(p.scale) * kLog2E);
  hopper::RingPlace<2> stage;
  for (int step = at.begin; step <= at.last; ++step) {
    if (!at.has_queries(step)) {
      continue;
    }
    for (int head = at.first_head; head < at.end_head; ++head, stage.advance()) {
      const GateSums gates(w, at.keys, head);
      const int64_t first_row =
          (at.queries.batch * p.heads + head) * p.layout.time + at.queries.start;
      const double reference = gates.at(step * kRows - 1);
      double c[4];  // of the lane's keys before the diagonal's, and of the diagonal's
      RawRowStats rows[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        c[i] = gates.at((step - 1) * kRows + 32 * i + lane);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = step * kRows + 32 * i + lane - at.shift;
        const bool exists = row >= 0 && row < at.queries.length;
        rows[i] = {c[2 + i], exists ? static_cast<const float*>(p.lse)[first_row + row] : -INFINITY,
                   exists ? w.delta_minus_dlse[first_row + row] : 0.0f};
      }
      mbarrier_wait(&shared.queries_free[stage.stage()], stage.phase() ^ 1);
      HopperShortRangeStats<Shape>& stats = shared.stats[stage.stage()];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int parity = (step + 1 + i / 2) % 2, key = i % 2 * 32 + lane;
        const SplitGate gate = SplitGate::of(reference - c[i]);
        const bool exists = step > 0 || i >= 2;  // before the first tile there are no keys
        stats.key_high[parity][key] = exists ? gate.high : -INFINITY;
        stats.key_low[parity][key] = exists ? gate.low : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 32 * i + lane;
        float x[4];
        write_row_stats<1>(x, rows[i], reference);
        stats.rows.start_s[row] = (x[0] - x[2]) * inverse_scale;
        stats.rows.start_dp[row] = x[3];
        stats.rows.gate_high[row] = x[0];
        stats.rows.gate_low[row] = x[1];
        stats.rows.lse[row] = x[2];
        stats.gate_low_less_lse[row] = x[1] - x[2];
      }
      mbarrier_arrive(&shared.queries_full[stage.stage()]);
    }
  }
}

/// The producer's third warp: sums of dS over a query's keys.
template <class Shape>
__device__ inline void store_short_range_row_sums(const TensorAttention& w,
                                                  HopperShortRangeShared<Shape>& shared, int lane) {
  constexpr int kRows = Shape::kRows;
  const ForgettingAttentionParams& p = w.params.forward;
  const HopperShortRange at = shared.short_range;
  hopper::RingPlace<2> stage;
  for (int step = at.begin; step <= at.last; ++step) {
    if (!at.has_queries(step)) {
      continue;
    }
    for (int head = at.first_head; head < at.end_head; ++head, stage.advance()) {
      float* const to =
          w.row_sums + (at.queries.batch * p.heads + head) * p.layout.time + at.queries.start;
      mbarrier_wait(&shared.row_sums_full[stage.stage()], stage.phase());
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < Shape::kMathWarps; ++warp) {
          sum += shared.row_sums[stage.stage()][warp][32 * i + lane];
        }
        const int row = step * kRows + 32 * i + lane - at.shift;
        if (step < at.end && row >= 0 && row < at.queries.length) {
          to[row] = sum;
        }
      }
      mbarrier_arrive(&shared.queries_free[stage.stage()]);
    }
  }
}

}  // namespace tidegate::kernels::attention
