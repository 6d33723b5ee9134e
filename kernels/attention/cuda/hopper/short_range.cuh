#pragma once

// The Hopper backward pass of short-range heads: those of which pruning leaves every tile of 64
// keys only queries of the tile at the same positions and of the next one.
//
// A block iterates over the query tiles of a sequence, one at a step, and has all that it needs at
// hand: the keys of the same positions and of the tile before. A warpgroup takes every second tile
// of keys, with dk and dv in registers for two steps, first at the diagonal and then beside it;
// both make dS of the step's queries, and half the columns of their dq. So dq, dk and dv leave
// rounded, and no fp32 sums of dq are cleared, added to or converted. Sums of dS over a query's
// keys are stored whole. Those over a key's queries come in two parts, a step each, both from one
// thread, which stores the first and adds the second. All bits are the same from run to run.
//
// A block owns tiles [begin, end), and takes a step more than it owns tiles. At step `begin` the
// queries also meet the keys before them, which another block owns, for dq alone. At step `end` the
// last keys owned meet the queries after them, for dk and dv alone; what that step's other pair
// makes is another block's, and dropped.
//
// Roles of the producer's warps: keys, values, queries and dO (load_short_range_tiles); gates and
// statistics (load_short_range_stats); sums of dS over a query's keys (store_short_range_row_sums).
// Barriers:
//   keys_full, keys_free      keys and values of a tile, in a ring of three: those of a step, those
//                             of the step before, and the next ones on their way
//   queries_full, _free       Q and what its scores need, as in backward.cuh; the third warp, too,
//                             frees a stage, of which it has read row_sums
//   d_o_full, d_o_free        as in backward.cuh
//   ds_full                   both warpgroups have written dS of a stage. Nothing frees it, as in
//                             backward.cuh: who writes a stage has waited for the one between
//   row_sums_full             row_sums of a stage are there, for the third warp
// kDqBarrier and dq_free have no part here. Gradients leave through rows of shared.staged that are
// a warp's own, so that __syncwarp is enough.
//
// Instructions bound a step. Its five products of 64 x 64 x 128 for each of two pairs of tiles
// would take a multiprocessor 1.5 us at the tensor cores' peak, and the 112 KB of its Q, K, V, dO,
// dq, dk and dv 3.5 us at its share of a copy's speed; the step takes longer than both (measured in
// docs/lab/attention.md). So whatever stands between products is written to be short.

#include "kernels/attention/cuda/hopper/backward_math.cuh"
#include "kernels/attention/cuda/hopper/short_range_tiles.cuh"

namespace tidegate::kernels::attention {

/// A math warpgroup.
template <class Shape>
struct HopperShortRangeMath {
  using T = typename Shape::T;
  using Shared = HopperShortRangeShared<Shape>;
  static constexpr int kDim = Shape::kDim;

  const TensorAttention& w;
  Shared& shared;
  const HopperShortRange& at;
  HopperKeyGradients<Shape> math;
  int group;  // the math warpgroup, 0 or 1: it takes the tiles of keys whose number has this parity
  int step = 0;
  hopper::RingPlace<2> stage = {};
  // Where the tile of keys before the step's own is; that of the step's positions, whose pair is on
  // the diagonal, is at older.next().
  hopper::RingPlace<3> older = {};

  __device__ __forceinline__ HopperShortRangeMath(const TensorAttention& work, Shared& memory,
                                                  int thread)
      : w(work),
        shared(memory),
        at(memory.short_range),
        math(work.params.forward, thread),
        group(__shfl_sync(0xffffffffu, thread / 128 - 1, 0)) {}

  /// Stores 64 columns of a warp's 16 rows, from column 8 first_piece on, by way of its rows of
  /// shared.staged. `first`: the sequence's row that the warpgroup's first one is; rows [0, end)
  /// are there.
  __device__ __forceinline__ void store(const float (*x)[4], float factor, const HeadSeries& t,
                                        const Sequence& sequence, int head, int first, int end,
                                        int first_piece) const {
    using Panel = hopper::Panels<64>;
    constexpr int kPieces = 8;
    const int lane = math.lane, own = 16 * math.warp;
    unsigned char* const staged = shared.staged[group];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPieces; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float* const pair = x[j + m / 2] + m % 2 * 2;
        pairs[m] = pack_pair<T>(pair[0] * factor, pair[1] * factor);
      }
      const int row = own + lane / 8 % 2 * 8 + lane % 8;
      hopper::store_matrices(shared_address(staged) + Panel::offset(row, j + lane / 16), pairs);
    }
    __syncwarp();
    const int pieces = static_cast<int>(w.params.forward.head_dim / 8);
    const int piece = lane % kPieces, row = first + own + lane / kPieces;
    const int stride = row_stride<2>(t);
    char* const to = row_address<2>(t, sequence, head, row) + (first_piece + piece) * 16;
#pragma unroll
    for (int i = 0; i < 16; i += 32 / kPieces) {
      const uint4 bits =
          *reinterpret_cast<const uint4*>(staged + Panel::offset(own + i + lane / kPieces, piece));
      if (row + i >= 0 && row + i < end && first_piece + piece < pieces) {
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(i) * stride) = bits;
      }
    }
  }

  /// What the warpgroup's keys are at a step: the diagonal's, or those of the tile before.
  __device__ __forceinline__ bool is_diagonal() const { return step % 2 == group; }
  __device__ __forceinline__ int tile() const { return is_diagonal() ? step : step - 1; }
  __device__ __forceinline__ int slot() const {
    return is_diagonal() ? older.next().stage() : older.stage();
  }
  __device__ __forceinline__ bool is_edge() const { return is_diagonal() || at.is_far_edge(step); }

  /// HopperKeyGradients::compute_exponents for the diagonal's tile without a window, in a third of
  /// the instructions: here every second pair of tiles is a diagonal.
  __device__ __forceinline__ void compute_diagonal_exponents(
      const HopperShortRangeStats<Shape>& stats) {
    const int least = math.key() - math.lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < Shape::kPart / 8; ++n) {
      const int column = 8 * n + math.lane % 4 * 2;
      const float2 high = read_pair(stats.rows.gate_high + column);
      const float2 low = read_pair(stats.gate_low_less_lse + column);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float gate = (math.key_high[e / 2] + (e % 2 == 0 ? high.x : high.y)) +
                           (math.key_low[e / 2] + (e % 2 == 0 ? low.x : low.y));
        const float x = fmaf(math.s[n][e], math.scale, gate);
        math.s[n][e] = 8 * n + e % 2 - e / 2 * 8 >= least ? x : -INFINITY;
      }
    }
  }

  /// A pair of tiles, the step's queries of a head and the warpgroup's keys: its share of dk, dv
  /// and of the sums of dS, and the warpgroup's columns of the queries' dq, in the place of dp.
  __device__ __forceinline__ void take_pair() {
    using hopper::Operand;
    const int i = stage.stage();
    const bool diagonal = is_diagonal();
    typename HopperKeyGradients<Shape>::ScoreOperand operand;  // P, then dS
    const HopperShortRangeStats<Shape>& stats = shared.stats[i];
    mbarrier_wait(&shared.queries_full[i], stage.phase());
    math.start(math.s, is_edge() ? shared.zeros : stats.rows.start_s);
    math.multiply_scores(math.s, shared.keys[slot()], shared.queries[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      math.key_high[half] = stats.key_high[group][math.key() + 8 * half];
      math.key_low[half] = stats.key_low[group][math.key() + 8 * half];
      math.key_sums[half] = 0;
    }
    mbarrier_wait(&shared.d_o_full[i], stage.phase());
    hopper::wait_for_products<0>();
    hopper::keep(math.s);
    math.start(math.dp, stats.rows.start_dp);
    math.multiply_scores(math.dp, shared.values[slot()], shared.d_o[i]);
    if (diagonal && at.window == 0) {
      compute_diagonal_exponents(stats);
    } else {
      math.compute_exponents(stats.rows, 0, is_edge(), PairMask{at.window},
                             diagonal ? 0 : Shape::kKeys);
    }
    math.exponentiate();
    math.pack(operand, math.s);
    math.accumulate(math.dv, operand, shared.d_o[i]);
    hopper::wait_for_products<1>();  // dP
    hopper::keep(math.dp);
    math.compute_ds();
    hopper::wait_for_products<0>();  // dv
    math.pack(operand, math.dp);
    math.store_ds(shared.ds[i][group], operand);
    hopper::fence_async_proxy();
    hopper::arrive_from(&shared.ds_full[i], math.lane);
    math.accumulate(math.dk, operand, shared.queries[i]);
    math.store_row_sums(shared.row_sums[i][4 * group + math.warp]);
    mbarrier_arrive(&shared.row_sums_full[i]);
    mbarrier_wait(&shared.ds_full[i], stage.phase());
    hopper::fence_products();
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the keys of both warpgroups
      const int keys = diagonal == (half == group) ? older.next().stage() : older.stage();
      const Operand a = Operand::rows_inner(shared_address(shared.ds[i][half]));
      const Operand b = Operand::inner_rows(
          shared_address(shared.keys[keys]) + group * Shape::KeyPanels::kPanelBytes,
          Shape::KeyPanels::kPanelBytes);
#pragma unroll
      for (int k = 0; k < Shape::kKeys / 16; ++k) {
        hopper::Product<T, 64>::template shared<true>(math.dp, a.advance(k * 32),
                                                      b.advance(k * 2048), half > 0 || k > 0);
      }
    }
    hopper::commit_products();
    hopper::wait_for_products<0>();
    hopper::keep(math.dp);
    mbarrier_arrive(&shared.queries_free[i]);
    hopper::arrive_from(&shared.d_o_free[i], math.lane);
  }

  /// The warpgroup's columns of dq, which is whole: no other block adds to it.
  __device__ __forceinline__ void store_dq(int head) const {
    if (step < at.end) {
      store(math.dp, static_cast<float>(w.params.forward.scale), w.params.dq, at.queries, head,
            step * Shape::kRows - at.shift, at.queries.length, 8 * group);
    }
  }

  /// A head's sums of dS over queries, of which a tile of keys meets two tiles, a step each.
  __device__ __forceinline__ void store_key_sums(int head) {
    const int tile = this->tile();
    if (tile < at.begin || tile >= at.end) {
      return;
    }
    float* const to =
        w.column_sums +
        (at.keys.batch * w.params.forward.heads + head) * w.params.forward.key_layout.time +
        at.keys.start;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(math.key_sums[half]);
      const int key = tile * Shape::kKeys + math.key() + 8 * half;
      if (math.lane % 4 == 0 && key < at.keys.length) {
        if (is_diagonal()) {
          to[key] = sum;
        } else {
          atomicAdd(to + key, sum);  // to what this thread stored; nothing waits for it
        }
      }
    }
  }

  /// dk and dv of a tile that has met all of its queries.
  __device__ __forceinline__ void store_gradients(int tile) {
    if (tile >= at.begin) {
      const int first = tile * Shape::kKeys;
#pragma unroll
      for (int j = 0; j < kDim / 8; j += 8) {
        store(math.dv + j, 1.0f, w.params.dv, at.keys, at.key_head, first, at.keys.length, j);
        store(math.dk + j, static_cast<float>(w.params.forward.scale), w.params.dk, at.keys,
              at.key_head, first, at.keys.length, j);
      }
    }
    math.clear();
  }

  /// Waits for the diagonal's keys.
  __device__ __forceinline__ void begin_step() {
    const hopper::RingPlace<3> newer = older.next();
    mbarrier_wait(&shared.keys_full[newer.stage()], newer.phase());
  }
  /// Behind the last pair of a step.
  __device__ __forceinline__ void end_step() {
    hopper::keep(math.dk);
    hopper::keep(math.dv);
    hopper::arrive_from(&shared.keys_free[older.stage()], math.lane);
    if (!is_diagonal()) {
      store_gradients(tile());
    }
    ++step;
    older.advance();
  }

  /// A step before all queries: keys' gradients are zero.
  __device__ void skip_step() {
    begin_step();
    math.key_sums[0] = math.key_sums[1] = 0;
    for (int head = at.first_head; head < at.end_head; ++head) {
      store_key_sums(head);
    }
    if (!is_diagonal() && tile() >= at.begin) {
      const int pieces = static_cast<int>(w.params.forward.head_dim / 8);
      for (int i = 32 * math.warp + math.lane; i < Shape::kKeys * pieces; i += 128) {
        const int key = tile() * Shape::kKeys + i / pieces;  // all are there: a tile follows
        for (const HeadSeries* const t : {&w.params.dk, &w.params.dv}) {
          reinterpret_cast<uint4*>(row_address<2>(*t, at.keys, at.key_head, key))[i % pieces] =
              uint4{};
        }
      }
    }
    hopper::arrive_from(&shared.keys_free[older.stage()], math.lane);
    ++step;
    older.advance();
  }

  __device__ __forceinline__ void run() {
    step = at.begin;
    mbarrier_wait(&shared.keys_full[0], 0);
#pragma unroll 1
    while (step <= at.last && !at.has_queries(step)) {
      skip_step();
    }
    int head = at.first_head;
#pragma unroll 1
    while (step <= at.last) {
      if (head == at.first_head) {
        begin_step();
      }
      take_pair();
      store_dq(head);
      store_key_sums(head);
      stage.advance();
      if (++head == at.end_head) {
        head = at.first_head;
        end_step();
      }
    }
    // The sequence's last keys meet no queries but their own.
    if (at.last < at.end && at.last % 2 == group) {
      store_gradients(at.last);
    }
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    hopper_short_range_kernel(const __grid_constant__ HopperBackwardWork work) {
#if TIDEGATE_HOPPER_CODE
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<HopperShortRangeShared<Shape>*>(bytes);
  const TensorAttention& w = work.attention;
  const int thread = static_cast<int>(threadIdx.x);
  const TileAndHead place(w.tiles, w.params.forward.key_heads, 1, blockIdx.x, false);
  if (place.tile.tokens == 0 || !takes_head(w, place.tile.sequence.index, place.head)) {
    return;
  }
  shared.init(w, place, thread);
  __syncthreads();
  if (thread < 128) {
    hopper::release_registers<Shape::kProducerRegisters>();
    if (thread < 32) {
      load_short_range_tiles(work, shared, thread);
    } else if (thread < 64) {
      load_short_range_stats(w, shared, thread - 32);
    } else if (thread < 96) {
      store_short_range_row_sums(w, shared, thread - 64);
    }
  } else {
    hopper::claim_registers<Shape::kMathRegisters>();
    HopperShortRangeMath<Shape>(w, shared, thread).run();
  }
#endif
}

}  // namespace tidegate::kernels::attention
