#pragma once

// The forward pass on Hopper: the algorithm of forward/forward_kernel.cuh by warpgroups.
//
//   S = Q K^T + c_i - c_j   m' = max(m, rowmax S)   P = exp(S - m')   l, o *= exp(m - m')
//   l += rowsum P   o += P V            at the end   o /= l   lse = m + log l
//
// Blocks stay and take items (a tile of 64 queries a math warpgroup, of one head) from a counter.
// Warpgroup 0 brings data, each warp in a role of its own:
//   loader     takes items; copies Q, and K and V of tiles of kKeys keys from the diagonal leftward
//   gates      writes c_i - c_ref of the item's queries, and c_ref - c_j beside each tile of keys
//   inspectors make V of an edge tile (the diagonal, the window's far end) safe to meet weights of
//              zero: rows behind a sequence become zeros, others that are not finite are reported
// The math warpgroups take turns: while one's products run the others compute weights. Each issues
// S of the next tile and P V of the last one together, and computes weights of the one while the
// other runs.
//
// Who waits for what: barriers of ForwardBarriers, all pairs of "full" (data is there; what
// producers complete) and "empty" (all math warps are done with it).

#include "kernels/attention/cuda/forward/online_softmax.cuh"
#include "kernels/attention/cuda/hopper/tiles.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/common/cuda/hopper.cuh"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels::attention {

/// What a block is told of one item; written by the loader.
struct ForwardItem {
  int rows;         // queries, as many as there are; negative: there are no more items
  int head;
  int key_head;
  int first;        // position of the first query
  int begin, end;   // tiles of keys, from the last one down to the first
  int key_length;   // of the sequence
  int batch;
  int query_token;  // of the first query, in the tensor's time
  int key_token;    // of the sequence's first key
  const double* gates;  // c of the sequence's keys
};

/// Two stages of everything, so that the next is brought while one is in use. Queries have one.
struct ForwardBarriers {
  uint64_t item_known[2], item_ready[2], item_empty[2];  // known to the producers; with its gates
  uint64_t q_full, q_empty;
  uint64_t k_full[2], k_empty[2];  // keys with their gates
  uint64_t v_full[2], v_landed[2], v_empty[2];  // landed: values of an edge tile, to be inspected
};

/// The shared memory of a block.
template <class Shape>
struct HopperForwardShared {
  static constexpr int kKeys = Shape::kKeys, kRows = Shape::kRows;

  unsigned char* base;

  __device__ unsigned char* queries() const { return base; }
  __device__ unsigned char* keys(int stage) const {
    return base + Shape::kQueryBytes + stage * Shape::kKeyBytes;
  }
  __device__ unsigned char* values(int stage) const { return keys(2 + stage); }
  /// [2][kKeys]: c_ref - c_j, high and low parts.
  __device__ float* key_gates(int stage) const {
    return reinterpret_cast<float*>(keys(4)) + stage * 2 * kKeys;
  }
  /// [2][kRows]: c_i - c_ref, high and low parts.
  __device__ float* row_gates(int slot) const { return key_gates(2) + slot * 2 * kRows; }
  __device__ ForwardItem& item(int slot) const {
    return reinterpret_cast<ForwardItem*>(row_gates(2))[slot];
  }
  __device__ int& not_finite(int stage) const {
    return reinterpret_cast<int*>(&item(2))[stage];
  }
  __device__ ForwardBarriers& barriers() const {
    return *reinterpret_cast<ForwardBarriers*>(reinterpret_cast<int*>(&item(2)) + 2);
  }
};

/// A place in a ring of two stages: which one, and the parity of its phase.
struct RingPlace {
  int stage = 0, phase = 0;
  __device__ void advance() {
    phase ^= stage;
    stage ^= 1;
  }
};

/// Whether a tile needs masks: queries begin at position `first`, `last` is the last of them.
template <int kKeys>
__device__ inline bool is_edge(int tile, int first, int last, int window) {
  return tile * kKeys + kKeys - 1 > first || (window > 0 && tile * kKeys <= last - window);
}

// ---- The producers ----

/// Takes items from the launch's counter, and issues all copies.
template <class Shape>
struct ForwardLoader {
  static constexpr int kKeys = Shape::kKeys, kRows = Shape::kRows;
  const HopperForwardWork& w;
  const HopperForwardShared<Shape> shared;

  /// The next item with queries, or one that says that there is none.
  __device__ ForwardItem take(unsigned& next) const {
    const ForgettingAttentionParams& p = w.attention.params.forward;
    const auto items = static_cast<unsigned>(w.attention.tiles.count * p.heads);
    while (next < items) {
      const TileAndHead place(w.attention.tiles, p.heads, w.attention.side_by_side, next, true);
      next = atomicAdd(w.next_item, 1u) + gridDim.x;
      if (place.tile.tokens > 0) {
        return describe(place);
      }
    }
    ForwardItem none = {};
    none.rows = -1;
    return none;
  }

  __device__ ForwardItem describe(const TileAndHead& place) const {
    const ForgettingAttentionParams& p = w.attention.params.forward;
    const Sequence& queries = place.tile.sequence;
    const Sequence keys = find_sequence(p.key_layout, queries.index);
    ForwardItem item;
    item.rows = place.tile.tokens;
    item.head = place.head;
    item.key_head = static_cast<int>(place.head / (p.heads / p.key_heads));
    item.first = place.tile.first + keys.length - queries.length;
    const KeyTileRange tiles = KeyTileRange::of<kKeys>(item.first, item.first + item.rows - 1,
                                                       static_cast<int>(p.window));
    item.begin = tiles.begin;
    item.end = tiles.end;
    item.key_length = keys.length;
    item.batch = static_cast<int>(queries.batch);
    item.query_token = static_cast<int>(queries.start) + place.tile.first;
    item.key_token = static_cast<int>(keys.start);
    item.gates = GateSums(w.attention, keys, place.head).data();
    return item;
  }

  __device__ void run() const {
    ForwardBarriers& barriers = shared.barriers();
    unsigned next = blockIdx.x;
    RingPlace slot, stage;
    for (int q_phase = 1;; q_phase ^= 1, slot.advance()) {
      mbarrier_wait(&barriers.item_empty[slot.stage], slot.phase ^ 1);
      const ForwardItem item = take(next);
      shared.item(slot.stage) = item;
      mbarrier_arrive(&barriers.item_known[slot.stage]);
      if (item.rows < 0) {
        return;
      }
      const int window = static_cast<int>(w.attention.params.forward.window);
      const int last = item.first + item.rows - 1;
      for (int tile = item.end - 1; tile >= item.begin; --tile, stage.advance()) {
        const int token = item.key_token + tile * kKeys;
        mbarrier_wait(&barriers.k_empty[stage.stage], stage.phase ^ 1);
        load(shared.keys(stage.stage), &w.k, &barriers.k_full[stage.stage], item, token);
        if (tile == item.end - 1) {
          load_queries(item, q_phase);
        }
        mbarrier_wait(&barriers.v_empty[stage.stage], stage.phase ^ 1);
        const bool edge = is_edge<kKeys>(tile, item.first, last, window);
        load(shared.values(stage.stage), &w.v,
             edge ? &barriers.v_landed[stage.stage] : &barriers.v_full[stage.stage], item, token);
      }
      if (item.end <= item.begin) {
        load_queries(item, q_phase);
      }
    }
  }

  __device__ void load_queries(const ForwardItem& item, int phase) const {
    ForwardBarriers& barriers = shared.barriers();
    mbarrier_wait(&barriers.q_empty, phase);
    hopper::arrive_expecting(&barriers.q_full, Shape::kQueryBytes);
    hopper::copy_tile<kRows, Shape::kDim>(shared.queries(), &w.q, &barriers.q_full, item.head,
                                          item.query_token, item.batch);
  }
  __device__ void load(unsigned char* to, const CUtensorMap* map, uint64_t* barrier,
                       const ForwardItem& item, int token) const {
    hopper::arrive_expecting(barrier, Shape::kKeyBytes);
    hopper::copy_tile<kKeys, Shape::kDim>(to, map, barrier, item.key_head, token, item.batch);
  }
};

/// Brings the gates of an item's queries, and of each tile of keys.
template <class Shape>
__device__ inline void bring_gates(const HopperForwardShared<Shape>& shared, int lane) {
  constexpr int kKeys = Shape::kKeys, kRows = Shape::kRows;
  ForwardBarriers& barriers = shared.barriers();
  RingPlace slot, stage;
  for (;; slot.advance()) {
    mbarrier_wait(&barriers.item_known[slot.stage], slot.phase);
    const ForwardItem& item = shared.item(slot.stage);
    if (item.rows < 0) {
      hopper::arrive_from(&barriers.item_ready[slot.stage], lane);
      return;
    }
    const double* const gates = item.gates;
    const int last_key = item.key_length - 1, begin = item.begin;
    const auto read = [&](int position) {
      return last_key < 0 ? 0.0 : __ldg(gates + max(0, min(position, last_key)));
    };
    const double reference = read(item.first);
    float* const rows = shared.row_gates(slot.stage);
#pragma unroll
    for (int row = lane; row < kRows; row += 32) {
      const SplitGate gate = SplitGate::of(read(item.first + row) - reference);
      rows[row] = gate.high;
      rows[kRows + row] = gate.low;
    }
    hopper::arrive_from(&barriers.item_ready[slot.stage], lane);
    double c[kKeys / 32];
    const auto read_tile = [&](int tile) {
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        c[i] = read(tile * kKeys + 32 * i + lane);
      }
    };
    int tile = item.end - 1;
    if (tile >= begin) {
      read_tile(tile);
    }
    for (; tile >= begin; --tile, stage.advance()) {
      mbarrier_wait(&barriers.k_empty[stage.stage], stage.phase ^ 1);
      float* const to = shared.key_gates(stage.stage) + lane;
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        const SplitGate gate = SplitGate::of(reference - c[i]);
        to[32 * i] = gate.high;
        to[kKeys + 32 * i] = gate.low;
      }
      hopper::arrive_from(&barriers.k_full[stage.stage], lane);
      if (tile > begin) {  // one tile ahead, so that nothing waits for it
        read_tile(tile - 1);
      }
    }
    hopper::arrive_from(&barriers.item_empty[slot.stage], lane);
  }
}

/// Values of edge tiles: rows behind the sequence, which no query sees and which may be a
/// neighbour's, become zeros where they are not finite; the math warps are told of others.
template <class Shape>
__device__ inline void inspect_values(const HopperForwardShared<Shape>& shared, int window,
                                      int thread) {
  using T = typename Shape::T;
  constexpr int kKeys = Shape::kKeys, kThreads = Shape::kInspectors;
  ForwardBarriers& barriers = shared.barriers();
  RingPlace slot, stage;
  int landed = 0;  // parities of v_landed, a bit a stage
  for (;; slot.advance()) {
    mbarrier_wait(&barriers.item_known[slot.stage], slot.phase);
    const ForwardItem& item = shared.item(slot.stage);
    if (item.rows < 0) {
      return;
    }
    const int first = item.first, last = first + item.rows - 1, begin = item.begin;
    const int key_length = item.key_length;
    for (int tile = item.end - 1; tile >= begin; --tile, stage.advance()) {
      if (!is_edge<kKeys>(tile, first, last, window)) {
        continue;
      }
      mbarrier_wait(&barriers.v_landed[stage.stage], landed >> stage.stage & 1);
      landed ^= 1 << stage.stage;
      unsigned char* const values = shared.values(stage.stage);
      // Panels follow each other, so that a row's pieces of 16 bytes are kPanelBytes apart.
      bool reported = false;
      for (int at = thread * 16; at < Shape::kKeyBytes; at += kThreads * 16) {
        const int row = at % hopper::Panels<kKeys>::kPanelBytes / hopper::kPanelRowBytes;
        if (non_finite_bits<T>(values + at) != 0) {
          if (tile * kKeys + row >= key_length) {
            *reinterpret_cast<uint4*>(values + at) = uint4{};
          } else {
            reported = true;
          }
        }
      }
      if (reported) {
        shared.not_finite(stage.stage) = 1;
      }
      hopper::fence_async_proxy();
      hopper::named_barrier_sync(kInspectorBarrier, kThreads);
      if (thread == 0) {
        mbarrier_arrive(&barriers.v_full[stage.stage]);
      }
    }
    hopper::arrive_from(&barriers.item_empty[slot.stage], thread % 32);
  }
}

// ---- The math warpgroups ----

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
  int group;   // of the math warpgroups
  int row;     // the warp's first, of the item's
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

  /// s = Q K^T of a stage, under way.
  __device__ __forceinline__ void issue_scores(Softmax& softmax, int stage) const {
    const auto q = hopper::Operand::rows_inner(shared_address(shared.queries()) +
                                               group * 64 * hopper::kPanelRowBytes);
    const auto k = hopper::Operand::rows_inner(shared_address(shared.keys(stage)));
    hopper::fence_products();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int panel = step / 4, within = step % 4 * 32;
      ScoreProduct::shared(softmax.s[0],
                           q.advance(panel * hopper::Panels<kRows>::kPanelBytes + within),
                           k.advance(panel * hopper::Panels<kKeys>::kPanelBytes + within),
                           step > 0);
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
    const float* const keys = shared.key_gates(stage) + lane % 4 * 2;
    const float* const rows = shared.row_gates(slot) + row + lane / 4;
    if (edge) {
      softmax.add_bias_and_mask(scale, keys, rows, mask, first + row + lane / 4,
                                tile * kKeys + lane % 4 * 2);
    } else {
      softmax.add_bias(scale, keys, rows);
    }
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
    char* const o = static_cast<char*>(p.o.data) +
                    2 * (item.batch * p.o.stride_b + item.head * p.o.stride_h);
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
    if (tile >= item.begin) {
      mbarrier_wait(&barriers.k_full[k.stage], k.phase);
      wait_for_turn();
      issue_scores(softmax, k.stage);
      give_turn();
      hopper::wait_for_products<0>();
      hopper::keep(softmax.s[0]);
      add_bias(softmax, is_edge<kKeys>(tile, first, last, mask.window), mask, first, tile, k.stage,
               slot.stage);
      hopper::arrive_from(&barriers.k_empty[k.stage], lane);
      k.advance();
      softmax.raise_row_max(factor);
      softmax.compute_p();
      softmax.pack_p(weights);
    }
    for (; tile >= item.begin; --tile, v.advance()) {
      const bool more = tile > item.begin;
      mbarrier_wait(&barriers.v_full[v.stage], v.phase);
      if (is_edge<kKeys>(tile, first, last, mask.window) &&
          *static_cast<volatile int*>(&shared.not_finite(v.stage)) != 0) {
        move_non_finite(softmax, mask, first, tile, v.stage);
      }
      if (!more) {
        break;
      }
      mbarrier_wait(&barriers.k_full[k.stage], k.phase);
      wait_for_turn();
      issue_scores(softmax, k.stage);
      issue_outputs(softmax, weights, v.stage);
      give_turn();
      hopper::wait_for_products<1>();
      hopper::keep(softmax.s[0]);
      add_bias(softmax, is_edge<kKeys>(tile - 1, first, last, mask.window), mask, first, tile - 1,
               k.stage, slot.stage);
      hopper::arrive_from(&barriers.k_empty[k.stage], lane);
      k.advance();
      const bool grew = softmax.raise_row_max(factor);
      softmax.compute_p();
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

// ---- The kernel ----

template <class Shape>
__device__ inline void init_barriers(ForwardBarriers& barriers) {
  constexpr int kMathWarps = 4 * Shape::kGroups;
  for (int stage = 0; stage < 2; ++stage) {
    mbarrier_init(&barriers.item_known[stage], 1);
    mbarrier_init(&barriers.item_ready[stage], 1);
    mbarrier_init(&barriers.item_empty[stage], kMathWarps + 1 + Shape::kInspectors / 32);
    mbarrier_init(&barriers.k_full[stage], 2);  // the loader, the gates
    mbarrier_init(&barriers.k_empty[stage], kMathWarps);
    mbarrier_init(&barriers.v_full[stage], 1);  // the loader, or the inspectors
    mbarrier_init(&barriers.v_landed[stage], 1);
    mbarrier_init(&barriers.v_empty[stage], kMathWarps);
  }
  mbarrier_init(&barriers.q_full, 1);
  mbarrier_init(&barriers.q_empty, kMathWarps);
  hopper::fence_barrier_init();
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    hopper_forward_kernel(const __grid_constant__ HopperForwardWork w) {
#if TIDEGATE_HOPPER_CODE
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const HopperForwardShared<Shape> shared{shared_bytes};
  if (threadIdx.x == 0) {
    init_barriers<Shape>(shared.barriers());
    shared.not_finite(0) = shared.not_finite(1) = 0;
    hopper::prefetch_map(&w.q);
    hopper::prefetch_map(&w.k);
    hopper::prefetch_map(&w.v);
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const ForgettingAttentionParams& p = w.attention.params.forward;
  if (warp < 4) {
    hopper::release_registers<Shape::kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) {
        ForwardLoader<Shape>{w, shared}.run();
      }
    } else if (warp == 1) {
      bring_gates<Shape>(shared, lane);
    } else {
      inspect_values<Shape>(shared, static_cast<int>(p.window),
                            static_cast<int>(threadIdx.x) - 64);
    }
  } else {
    hopper::claim_registers<Shape::kMathRegisters>();
    const int group = warp / 4 - 1;
    ForwardMath<Shape>{p,
                       shared,
                       group,
                       group * 64 + warp % 4 * 16,
                       lane,
                       static_cast<float>(p.scale) * kLog2E}
        .run();
  }
#endif
}

// ---- The launch ----

template <class Shape>
cudaError_t launch_hopper_forward(HopperForwardWork work, const DeviceLimits& limits,
                                  cudaStream_t stream) {
  constexpr auto* kKernel = &hopper_forward_kernel<Shape>;
  const ForgettingAttentionParams& p = work.attention.params.forward;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  const auto describe = [&](const HeadSeries& tensor, const SequenceLayout& layout, int64_t heads,
                            int rows, CUtensorMap* map) {
    return tensor_map_of_rows(tensor, layout.batch, layout.time, heads, p.head_dim, rows, map);
  };
  TIDEGATE_RETURN_IF_CUDA_ERROR(describe(p.q, p.layout, p.heads, Shape::kRows, &work.q));
  TIDEGATE_RETURN_IF_CUDA_ERROR(describe(p.k, p.key_layout, p.key_heads, Shape::kKeys, &work.k));
  TIDEGATE_RETURN_IF_CUDA_ERROR(describe(p.v, p.key_layout, p.key_heads, Shape::kKeys, &work.v));
  work.attention.tiles = time_tiles(p.layout, Shape::kRows);
  work.attention.side_by_side = heads_side_by_side(work.attention.tiles, limits.multiprocessors);
  const int64_t items = work.attention.tiles.count * p.heads;
  return launch_unless_empty(kKernel, std::min<int64_t>(items, limits.multiprocessors),
                             Shape::kThreads, Shape::kSharedBytes, stream, work);
}

template <class Data, HeadDims kDims>
cudaError_t HopperForwardUnit<Data, kDims>::takes(int64_t head_dim, const DeviceLimits& limits,
                                                  bool* takes) {
  return with_hopper_forward_shape<Data, kDims>(head_dim, [&]<class Shape>() {
    constexpr auto* kKernel = &hopper_forward_kernel<Shape>;
    int version = 0;
    TIDEGATE_RETURN_IF_CUDA_ERROR(compiled_for<kKernel>(&version));
    *takes = version >= 90 && Shape::kSharedBytes <= limits.shared_bytes;
    return cudaSuccess;
  });
}

template <class Data, HeadDims kDims>
cudaError_t HopperForwardUnit<Data, kDims>::launch(const HopperForwardWork& work,
                                                   cudaStream_t stream) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  return with_hopper_forward_shape<Data, kDims>(
      work.attention.params.forward.head_dim,
      [&]<class Shape>() { return launch_hopper_forward<Shape>(work, limits, stream); });
}

}  // namespace tidegate::kernels::attention
