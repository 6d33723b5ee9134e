#pragma once

// The math warpgroups of the Hopper forward kernel: see hopper_forward.cuh.

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

  const ForgettingAttentionParams& p;
  const HopperForwardShared<Shape>& shared;
  int group;  // of the math warpgroups
  int row;    // the warp's first, of the item's
  int lane;
  float scale;

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

  /// s = Q K^T of a stage, with the keys' bias unless that is an edge tile's.
  __device__ __forceinline__ void begin_scores(Softmax& softmax, bool edge, int stage) const {
    if (!edge) {
      softmax.begin_with_bias(shared.key_gates(stage) + lane % 4 * 4);
    }
  }
  __device__ __forceinline__ void issue_scores(Softmax& softmax, bool edge, int stage) const {
    const auto q = hopper::Operand::rows_inner(shared_address(shared.queries()) +
                                               group * 64 * hopper::kPanelRowBytes);
    const auto k = hopper::Operand::rows_inner(shared_address(shared.keys(stage)));
    hopper::fence_products();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int panel = step / 4, within = step % 4 * 32;
      ScoreProduct::shared(
          softmax.s[0], q.advance(panel * hopper::Panels<kRows>::kPanelBytes + within),
          k.advance(panel * hopper::Panels<kKeys>::kPanelBytes + within), step > 0 || !edge);
    }
    hopper::commit_products();
  }

  /// o += P V of a stage, under way.
  __device__ __forceinline__ void issue_outputs(Softmax& softmax,
                                                const uint32_t (&weights)[kChunks][1][4],
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
  __device__ __forceinline__ void add_bias(Softmax& softmax, bool edge, PairMask mask, int first,
                                           int tile, int stage, int slot) const {
    const float* const rows = shared.row_gates(slot) + row + lane / 4;
    if (!edge) {
      softmax.defer_row_bias(rows);
      return;
    }
    const float* const keys = shared.key_gates(stage) + lane % 4 * 2;
    softmax.add_bias_and_mask(scale, keys, rows, mask, first + row + lane / 4,
                              tile * kKeys + lane % 4 * 2);
  }

  /// Values that are not finite are added to the rows that see them, and become zeros. All math
  /// warpgroups come here; the inspectors have found such a value.
  __device__ __forceinline__ void move_non_finite(Softmax& softmax, PairMask mask, int first,
                                                  int tile, int stage) const {
    constexpr int kThreads = 128 * Shape::kGroups;
    unsigned char* const values = shared.values(stage);
    softmax.template add_non_finite<hopper::Panels<kKeys>>(values, mask, first + row + lane / 4,
                                                           tile * kKeys, lane);
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

  /// All items of the block.
  __device__ __forceinline__ void run() const;
};

template <class Shape>
__device__ __forceinline__ void ForwardMath<Shape>::run() const {
  ForwardBarriers& barriers = shared.barriers();
  const PairMask mask{static_cast<int>(p.window)};
  RingPlace slot, k, v;
  Softmax softmax;
  uint32_t weights[kChunks][1][4];
  float factor[2];
  if (group == Shape::kGroups - 1) {
    give_turn();  // the first warpgroup's
  }
  for (int q_phase = 0;; q_phase ^= 1, slot.advance()) {
    mbarrier_wait(&barriers.item_ready[slot.stage], slot.phase);
    const ForwardItem item = shared.item(slot.stage);
    if (item.rows < 0) {
      return;
    }
    const int first = item.first, last = first + item.rows - 1;
    softmax.start();
    softmax.clear_outputs();
    mbarrier_wait(&barriers.q_full, q_phase);
    int tile = item.end - 1;
    int begin = item.begin;
    bool edge = is_edge<kKeys>(tile, first, last, mask.window);
    if (tile >= begin) {
      mbarrier_wait(&barriers.k_full[k.stage], k.phase);
      begin_scores(softmax, edge, k.stage);
      wait_for_turn();
      issue_scores(softmax, edge, k.stage);
      give_turn();
      hopper::wait_for_products<0>();
      hopper::keep(softmax.s[0]);
      add_bias(softmax, edge, mask, first, tile, k.stage, slot.stage);
      hopper::arrive_from(&barriers.k_empty[k.stage], lane);
      k.advance();
      softmax.raise_row_max(factor, edge ? 1.0f : scale);
      softmax.compute_p(edge ? 1.0f : scale);
      softmax.pack_p(weights);
      begin = first_tile(shared, slot, begin, p.prune > 0);
    }
    for (; tile >= begin; --tile, v.advance()) {
      const bool more = tile > begin;
      mbarrier_wait(&barriers.v_full[v.stage], v.phase);
      if (edge && shared.not_finite(v.stage) != 0) {
        move_non_finite(softmax, mask, first, tile, v.stage);
      }
      if (!more) {
        break;
      }
      mbarrier_wait(&barriers.k_full[k.stage], k.phase);
      edge = is_edge<kKeys>(tile - 1, first, last, mask.window);
      begin_scores(softmax, edge, k.stage);
      wait_for_turn();
      issue_scores(softmax, edge, k.stage);
      issue_outputs(softmax, weights, v.stage);
      give_turn();
      hopper::wait_for_products<1>();
      hopper::keep(softmax.s[0]);
      add_bias(softmax, edge, mask, first, tile - 1, k.stage, slot.stage);
      hopper::arrive_from(&barriers.k_empty[k.stage], lane);
      k.advance();
      const bool grew = softmax.raise_row_max(factor, edge ? 1.0f : scale);
      softmax.compute_p(edge ? 1.0f : scale);
      hopper::wait_for_products<0>();
      hopper::keep(softmax.o[0]);
      hopper::arrive_from(&barriers.v_empty[v.stage], lane);
      if (grew) {
        softmax.rescale(factor);
      }
      softmax.pack_p(weights);
    }
    hopper::arrive_from(&barriers.q_empty, lane);
    if (item.end > item.begin) {
      issue_outputs(softmax, weights, v.stage);
      hopper::wait_for_products<0>();
      hopper::keep(softmax.o[0]);
      hopper::arrive_from(&barriers.v_empty[v.stage], lane);
      v.advance();
    }
    hopper::arrive_from(&barriers.item_empty[slot.stage], lane);
    softmax.normalize();
    store_lse(softmax, item);
    store_o(softmax, item);
  }
}

}  // namespace tidegate::kernels::attention
