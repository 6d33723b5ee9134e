#pragma once

// The math warpgroups of the Hopper forward kernel: see forward.cuh.

#include "kernels/attention/cuda/forward/online_softmax.cuh"
#include "kernels/attention/cuda/hopper/forward_shared.cuh"

namespace tidegate::kernels::attention {

/// A warpgroup's 64 rows of an item. Its phases, in the order of a tile, and who may be waited for.
template <class Shape>
struct ForwardMath {
  using T = typename Shape::T;
  using Softmax = OnlineSoftmax<Shape>;
  using ScoreProduct = hopper::Product<T, Shape::kKeys>;
  using OutputProduct = hopper::Product<T, Shape::kDim>;
  static constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kRows = Shape::kRows;
  static constexpr int kChunks = kKeys / 16;
  using Weights = uint32_t[kChunks][1][4];  // P of a tile, as operands

  const ForgettingAttentionParams& p;
  const HopperForwardShared<Shape>& shared;
  ForwardBarriers& barriers;
  PairMask mask;
  int group;  // which of the math warpgroups
  int row;    // the warp's first, of the item's
  int lane;
  float scale;
  hopper::RingCount<> slot = {}, tiles = {};  // of items, and of tiles of keys and of values
  int first = 0, last = 0;                    // positions of the item's queries
  int tile = 0;                               // of the item's keys, at hand
  int begin = 0, sure = 0;          // the first one, as far as it is known; see first_sure_tile
  TileEdge edge = TileEdge::kNone;  // of the tile at hand

  __device__ __forceinline__ hopper::RingCount<Shape::kQueryStages> query_place() const {
    return {slot.count};
  }
  __device__ __forceinline__ TileEdge edge_of_tile() const {
    const ForwardItem& item = shared.item(slot.stage());  // read anew: registers are short
    return edge_of<kKeys>(tile, item.first, item.first + item.rows - 1, mask.window);
  }
  __device__ __forceinline__ bool on_diagonal() const { return edge == TileEdge::kDiagonal; }
  __device__ __forceinline__ void wait_for_turn() const {
    if constexpr (Shape::kGroups > 1) {
      hopper::named_barrier_sync(kTurnBarrier + group, 256);
    }
  }
  __device__ __forceinline__ void give_turn() const {
    if constexpr (Shape::kGroups > 1) {
      hopper::named_barrier_arrive(kTurnBarrier + (group + 1) % Shape::kGroups, 256);
    }
  }

  /// s = Q K^T of a stage, with the keys' bias unless the tile is on the diagonal.
  __device__ __forceinline__ void begin_scores(Softmax& softmax, int stage) const {
    if (!on_diagonal()) {
      softmax.begin_with_bias(shared.key_gates(stage) + lane % 4 * 4);
    }
  }
  __device__ __forceinline__ void issue_scores(Softmax& softmax, int stage) const {
    const auto queries =
        hopper::Operand::rows_inner(shared_address(shared.queries(query_place().stage())) +
                                    group * 64 * hopper::kPanelRowBytes);
    const auto keys = hopper::Operand::rows_inner(shared_address(shared.keys(stage)));
    hopper::fence_products();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int panel = step / 4, within = step % 4 * 32;
      ScoreProduct::shared(softmax.s[0],
                           queries.advance(panel * hopper::Panels<kRows>::kPanelBytes + within),
                           keys.advance(panel * hopper::Panels<kKeys>::kPanelBytes + within),
                           step > 0 || !on_diagonal());
    }
    hopper::commit_products();
  }

  /// o += P V of a stage, under way.
  __device__ __forceinline__ void issue_outputs(Softmax& softmax, const Weights& weights,
                                                int stage) const {
    const auto v = hopper::Operand::inner_rows(shared_address(shared.values(stage)),
                                               hopper::Panels<kKeys>::kPanelBytes);
    hopper::fence_products();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      OutputProduct::template registers<true>(softmax.o[0], weights[chunk][0],
                                              v.advance(chunk * 16 * hopper::kPanelRowBytes));
    }
    hopper::commit_products();
  }

  /// The bias, and on edge tiles the mask.
  __device__ __forceinline__ void add_bias(Softmax& softmax, int stage) const {
    const float* const rows = shared.row_gates(slot.stage()) + row + lane / 4;
    if (!on_diagonal()) {
      softmax.defer_row_bias(rows);
      if (edge == TileEdge::kFarEnd) {
        softmax.mask_far_end(first_position(), mask.window, first_key());
      }
      return;
    }
    const float* const keys = shared.key_gates(stage) + lane % 4 * 2;
    softmax.add_bias_and_mask(scale, keys, rows, mask, first_position(), first_key());
  }
  /// The lane's first row, and its first key of the tile at hand, as positions.
  __device__ __forceinline__ int first_position() const {
    return shared.item(slot.stage()).first + row + lane / 4;
  }
  __device__ __forceinline__ int first_key() const { return tile * kKeys + lane % 4 * 2; }

  /// Values that are not finite are added to the rows that see them, and become zeros. All math
  /// warpgroups come here; the inspectors have found such a value.
  __device__ __forceinline__ void move_non_finite(Softmax& softmax, int tile, int stage) const {
    constexpr int kThreads = 128 * Shape::kGroups;
    unsigned char* const values = shared.values(stage);
    softmax.template add_non_finite<hopper::Panels<kKeys>>(
        values, mask, shared.item(slot.stage()).first + row + lane / 4, tile * kKeys, lane);
    hopper::named_barrier_sync(kMathBarrier, kThreads);
    const int thread = group * 128 + static_cast<int>(threadIdx.x) % 128;
    zero_non_finite<T, kThreads>(values, Shape::kKeyBytes, thread);
    if (thread == 0) {
      shared.not_finite(stage) = 0;
    }
    hopper::fence_async_proxy();
    hopper::named_barrier_sync(kMathBarrier, kThreads);
  }

  __device__ __forceinline__ void store_lse(const Softmax& softmax, const ForwardItem& item) const {
    if (p.lse != nullptr && lane % 4 == 0) {
      float* const lse = static_cast<float*>(p.lse) +
                         (int64_t{item.batch} * p.heads + item.head) * p.layout.time +
                         item.query_token;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of_item = row + 8 * i + lane / 4;
        if (of_item < item.rows) {
          lse[of_item] = softmax.sum[i] * kLn2;
        }
      }
    }
  }

  /// The outputs, from registers: the four lanes of a row exchange pairs of columns, until each has
  /// eight neighbouring ones.
  __device__ __forceinline__ void store_o(const Softmax& softmax, const ForwardItem& item) const {
    char* const o =
        static_cast<char*>(p.o.data) + 2 * (item.batch * p.o.stride_b + item.head * p.o.stride_h);
    const int pieces = static_cast<int>(p.head_dim / 8), part = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_item = row + 8 * i + lane / 4;
      char* const to = o + 2 * ((int64_t{item.query_token} + of_item) * p.o.stride_t);
#pragma unroll
      for (int j = 0; j < kDim / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[e] = pack_pair<T>(softmax.o[0][j + e][2 * i], softmax.o[0][j + e][2 * i + 1]);
        }
        hopper::transpose_quad(x, part);
        if (of_item < item.rows && j + part < pieces) {
          *reinterpret_cast<uint4*>(to + (j + part) * 16) = uint4{x[0], x[1], x[2], x[3]};
        }
      }
    }
  }

  __device__ __forceinline__ void compute_first_weights(Softmax& softmax, Weights& weights);
  __device__ __forceinline__ bool wait_for_values(Softmax& softmax);
  __device__ __forceinline__ void accumulate_tile(Softmax& softmax, const Weights& weights,
                                                  Weights& next);
  __device__ __forceinline__ void accumulate_last_tile(Softmax& softmax, const Weights& weights);
  __device__ __forceinline__ void accumulate_tiles(Softmax& softmax);
  __device__ __forceinline__ void run();
};

/// Weights of an item's last tile, with which it begins.
template <class Shape>
__device__ __forceinline__ void ForwardMath<Shape>::compute_first_weights(Softmax& softmax,
                                                                          Weights& weights) {
  edge = edge_of_tile();
  mbarrier_wait(&barriers.k_full[tiles.stage()], tiles.phase());
  begin_scores(softmax, tiles.stage());
  wait_for_turn();
  issue_scores(softmax, tiles.stage());
  give_turn();
  hopper::wait_for_products<0>();
  hopper::keep(softmax.s[0]);
  add_bias(softmax, tiles.stage());
  mbarrier_arrive(&barriers.k_empty[tiles.stage()]);
  float factor[2];
  softmax.raise_row_max(factor, on_diagonal() ? 1.0f : scale);
  softmax.compute_p(on_diagonal() ? 1.0f : scale);
  softmax.pack_p(weights);
}

/// Whether there is a tile after this one, once its values are there.
template <class Shape>
__device__ __forceinline__ bool ForwardMath<Shape>::wait_for_values(Softmax& softmax) {
  if (tile == sure) {
    begin = first_tile(shared, slot, p.prune > 0);
  }
  mbarrier_wait(&barriers.v_full[tiles.stage()], tiles.phase());
  if (edge != TileEdge::kNone && shared.not_finite(tiles.stage()) != 0) {
    move_non_finite(softmax, tile, tiles.stage());
  }
  return tile > begin;
}

/// o += P V of a tile, while the weights of the next one are computed.
template <class Shape>
__device__ __forceinline__ void ForwardMath<Shape>::accumulate_tile(Softmax& softmax,
                                                                    const Weights& weights,
                                                                    Weights& next) {
  --tile;
  const hopper::RingCount<> k = tiles.next();
  edge = edge_of_tile();
  mbarrier_wait(&barriers.k_full[k.stage()], k.phase());
  begin_scores(softmax, k.stage());
  wait_for_turn();
  issue_scores(softmax, k.stage());
  issue_outputs(softmax, weights, tiles.stage());
  give_turn();
  hopper::wait_for_products<1>();
  hopper::keep(softmax.s[0]);
  add_bias(softmax, k.stage());
  mbarrier_arrive(&barriers.k_empty[k.stage()]);
  float factor[2];
  const bool grew = softmax.raise_row_max(factor, on_diagonal() ? 1.0f : scale);
  softmax.compute_p(on_diagonal() ? 1.0f : scale);
  if constexpr (Shape::kPackEarly) {
    softmax.pack_p(next);
  }
  hopper::wait_for_products<0>();
  hopper::keep(softmax.o[0]);
  hopper::arrive_from(&barriers.v_empty[tiles.stage()], lane);
  tiles.advance();
  if (grew) {
    softmax.rescale(factor);
  }
  if constexpr (!Shape::kPackEarly) {
    softmax.pack_p(next);
  }
}

template <class Shape>
__device__ __forceinline__ void ForwardMath<Shape>::accumulate_last_tile(Softmax& softmax,
                                                                         const Weights& weights) {
  hopper::arrive_from(&barriers.q_empty[query_place().stage()], lane);
  issue_outputs(softmax, weights, tiles.stage());
  hopper::wait_for_products<0>();
  hopper::keep(softmax.o[0]);
  hopper::arrive_from(&barriers.v_empty[tiles.stage()], lane);
  tiles.advance();
}

/// All tiles of an item. Weights that are packed early have two places.
template <class Shape>
__device__ __forceinline__ void ForwardMath<Shape>::accumulate_tiles(Softmax& softmax) {
  if constexpr (Shape::kPackEarly) {
    Weights weights[2];
    compute_first_weights(softmax, weights[0]);
    for (;;) {
      if (!wait_for_values(softmax)) {
        return accumulate_last_tile(softmax, weights[0]);
      }
      accumulate_tile(softmax, weights[0], weights[1]);
      if (!wait_for_values(softmax)) {
        return accumulate_last_tile(softmax, weights[1]);
      }
      accumulate_tile(softmax, weights[1], weights[0]);
    }
  } else {
    Weights weights;
    compute_first_weights(softmax, weights);
    while (wait_for_values(softmax)) {
      accumulate_tile(softmax, weights, weights);
    }
    accumulate_last_tile(softmax, weights);
  }
}

/// All items of the block.
template <class Shape>
__device__ __forceinline__ void ForwardMath<Shape>::run() {
  if (group == Shape::kGroups - 1) {
    give_turn();  // the first warpgroup's
  }
  Softmax softmax;
  for (;; slot.advance()) {
    mbarrier_wait(&barriers.item_ready[slot.stage()], slot.phase());
    const ForwardItem& known = shared.item(slot.stage());
    if (known.rows < 0) {
      return;
    }
    tile = known.end - 1;
    begin = known.begin;
    sure = first_sure_tile(known);
    softmax.start();
    softmax.clear_outputs();
    mbarrier_wait(&barriers.q_full[query_place().stage()], query_place().phase());
    if (tile >= begin) {
      accumulate_tiles(softmax);
    } else {
      hopper::arrive_from(&barriers.q_empty[query_place().stage()], lane);
    }
    const ForwardItem item = known;
    mbarrier_arrive(&barriers.item_empty[slot.stage()]);
    softmax.normalize();
    store_lse(softmax, item);
    store_o(softmax, item);
  }
}

}  // namespace tidegate::kernels::attention
