#pragma once

// The warps of the Hopper forward kernel that bring data: see forward.cuh.

#include "kernels/attention/cuda/forward/online_softmax.cuh"
#include "kernels/attention/cuda/hopper/forward_shared.cuh"
#include "kernels/attention/cuda/pruning.cuh"

namespace tidegate::kernels::attention {

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
    const KeyTileRange tiles =
        KeyTileRange::of<kKeys>(item.first, item.first + item.rows - 1, static_cast<int>(p.window));
    item.begin = tiles.begin;
    item.end = tiles.end;
    item.key_length = keys.length;
    item.batch = static_cast<int>(queries.batch);
    item.query_token = static_cast<int>(queries.start) + place.tile.first;
    item.key_token = static_cast<int>(keys.start);
    item.gates = GateSums(w.attention, keys, place.head).data();
    return item;
  }

  /// Takes an item and tells the others of it. Its queries come at once where they have a place.
  __device__ void begin_item(unsigned& next, hopper::RingCount<> slot) const {
    ForwardBarriers& barriers = shared.barriers();
    mbarrier_wait(&barriers.item_empty[slot.stage()], slot.phase() ^ 1);
    ForwardItem& item = shared.item(slot.stage());
    item = take(next);
    mbarrier_arrive(&barriers.item_known[slot.stage()]);
    if (Shape::kQueryStages == 2 && item.rows > 0) {
      load_queries(item, {slot.count});
    }
  }

  __device__ void load_tile(const ForwardItem& item, int tile, hopper::RingCount<> slot,
                            hopper::RingCount<> stage) const {
    ForwardBarriers& barriers = shared.barriers();
    const int token = item.key_token + tile * kKeys;
    mbarrier_wait(&barriers.k_empty[stage.stage()], stage.phase() ^ 1);
    load(shared.keys(stage.stage()), &w.k, &barriers.k_full[stage.stage()], item, token);
    if (Shape::kQueryStages == 1 && tile == item.end - 1) {
      load_queries(item, {slot.count});  // must wait longest
    }
    mbarrier_wait(&barriers.v_empty[stage.stage()], stage.phase() ^ 1);
    const bool edge =
        edge_of<kKeys>(tile, item.first, item.first + item.rows - 1,
                       static_cast<int>(w.attention.params.forward.window)) != TileEdge::kNone;
    load(shared.values(stage.stage()), &w.v,
         edge ? &barriers.v_landed[stage.stage()] : &barriers.v_full[stage.stage()], item, token);
  }

  /// The next item begins while the sure tiles of one are on their way: what is to be found out of
  /// its queries takes long.
  __device__ void run() const {
    unsigned next = blockIdx.x;
    hopper::RingCount<> slot, stage;
    for (int tile = 0, begin = 0, sure = 0;; slot.advance()) {
      begin_item(next, slot);
      if (slot.count > 0) {  // what is left of the item before
        const hopper::RingCount<> before{slot.count - 1};
        const ForwardItem& item = shared.item(before.stage());
        if (sure < item.end) {
          begin = first_tile(shared, before, w.attention.params.forward.prune > 0);
          for (; tile >= begin; --tile, stage.advance()) {
            load_tile(item, tile, before, stage);
          }
        }
      }
      const ForwardItem& item = shared.item(slot.stage());
      if (item.rows < 0) {
        return;
      }
      if (Shape::kQueryStages == 1 && item.end <= item.begin) {  // no tile of keys to come with
        load_queries(item, {slot.count});
      }
      sure = first_sure_tile(item);
      for (tile = item.end - 1; tile >= sure; --tile, stage.advance()) {
        load_tile(item, tile, slot, stage);
      }
    }
  }

  __device__ void load_queries(const ForwardItem& item,
                               hopper::RingCount<Shape::kQueryStages> q) const {
    ForwardBarriers& barriers = shared.barriers();
    mbarrier_wait(&barriers.q_empty[q.stage()], q.phase() ^ 1);
    hopper::arrive_expecting(&barriers.q_full[q.stage()], Shape::kQueryBytes);
    hopper::copy_tile<kRows, Shape::kDim>(shared.queries(q.stage()), &w.q,
                                          &barriers.q_full[q.stage()], item.head, item.query_token,
                                          item.batch);
  }
  __device__ void load(unsigned char* to, const CUtensorMap* map, uint64_t* barrier,
                       const ForwardItem& item, int token) const {
    hopper::arrive_expecting(barrier, Shape::kKeyBytes);
    hopper::copy_tile<kKeys, Shape::kDim>(to, map, barrier, item.key_head, token, item.batch);
  }
};

/// c at a position of an item's keys, or at the nearest that there is.
__device__ inline double read_gate_sum(const ForwardItem& item, int position) {
  return item.key_length == 0 ? 0.0
                              : __ldg(item.gates + max(0, min(position, item.key_length - 1)));
}

/// Brings the gates of each tile of keys.
template <class Shape>
struct ForwardKeyGates {
  static constexpr int kKeys = Shape::kKeys;
  const TensorAttention& w;
  const HopperForwardShared<Shape>& shared;
  int lane;

  /// Writes the gates of keys whose sums are c, as HopperForwardShared::key_gates lays them out.
  __device__ void store_keys(const double (&c)[kKeys / 32], double reference, bool diagonal,
                             float* to) const {
    const double inverse_scale = 1 / w.params.forward.scale;
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      const int key = 32 * i + lane;
      if (diagonal) {
        const SplitGate gate = SplitGate::of(reference - c[i]);
        to[key] = gate.high;
        to[kKeys + key] = gate.low;
      } else {
        float* const pair = to + 2 * key - lane % 2;
        pair[0] = pair[2] = static_cast<float>((reference - c[i]) * inverse_scale);
      }
    }
  }

  __device__ void run() const {
    ForwardBarriers& barriers = shared.barriers();
    const ForgettingAttentionParams& p = w.params.forward;
    hopper::RingCount<> slot, stage;
    for (;; slot.advance()) {
      mbarrier_wait(&barriers.item_known[slot.stage()], slot.phase());
      const ForwardItem& item = shared.item(slot.stage());
      if (item.rows < 0) {
        return;
      }
      const int first = item.first, last = first + item.rows - 1, sure = first_sure_tile(item);
      const double reference = read_gate_sum(item, first);
      for (int tile = item.end - 1, begin = sure; tile >= begin; --tile, stage.advance()) {
        double c[kKeys / 32];
#pragma unroll
        for (int i = 0; i < kKeys / 32; ++i) {  // on its way while the stage is waited for
          c[i] = read_gate_sum(item, tile * kKeys + 32 * i + lane);
        }
        mbarrier_wait(&barriers.k_empty[stage.stage()], stage.phase() ^ 1);
        const TileEdge edge = edge_of<kKeys>(tile, first, last, static_cast<int>(p.window));
        store_keys(c, reference, edge == TileEdge::kDiagonal, shared.key_gates(stage.stage()));
        mbarrier_arrive(&barriers.k_full[stage.stage()]);
        if (tile == sure) {
          begin = first_tile(shared, slot, p.prune > 0);
        }
      }
      hopper::arrive_from(&barriers.item_empty[slot.stage()], lane);
    }
  }
};

/// Brings the gates of an item's queries, and finds where pruning ends.
template <class Shape>
struct ForwardRowGates {
  static constexpr int kKeys = Shape::kKeys, kRows = Shape::kRows;
  const TensorAttention& w;
  const HopperForwardShared<Shape>& shared;
  int lane;

  __device__ void store_rows(const ForwardItem& item, double reference, float* rows) const {
#pragma unroll
    for (int row = lane; row < kRows; row += 32) {
      const SplitGate gate = SplitGate::of(read_gate_sum(item, item.first + row) - reference);
      rows[row] = gate.high;
      rows[kRows + row] = gate.low;
    }
  }

  /// The largest squared norm of the item's queries, which have landed. NaN is the largest.
  __device__ float largest_query(int stage) const {
    constexpr int kLaneRows = kRows / 32;  // side by side, so that no sum waits for itself
    float squares[kLaneRows] = {};
#pragma unroll 2
    for (int piece = 0; piece < Shape::kDim / 8; ++piece) {
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const auto x = *reinterpret_cast<const Pack<typename Shape::T, 8>*>(
            shared.queries(stage) + hopper::Panels<kRows>::offset(32 * i + lane, piece));
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          squares[i] = fmaf(x.get(e), x.get(e), squares[i]);
        }
      }
    }
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      largest = max(largest, __float_as_uint(squares[i]) & 0x7fffffffu);
    }
    return __uint_as_float(__reduce_max_sync(0xffffffffu, largest));
  }

  /// Leaves out the tiles whose keys all may be dropped: lse_i is at least the score of the key at
  /// the query itself, and c falls, so that a tile may be dropped whose last key's c is too far up,
  /// and all before it. 32 tiles are looked at together, and what takes long is on its way before
  /// the queries have landed. Tells the others of the first tile left.
  __device__ void prune(const ForwardItem& item, double reference, int slot,
                        hopper::RingCount<Shape::kQueryStages> q) const {
    const ForgettingAttentionParams& p = w.params.forward;
    int begin = first_sure_tile(item);
    double last = read_gate_sum(
        item, (begin - lane) * kKeys - 1);  // c of the last key of tile begin - 1 - lane
    const float key = ScoreBounds::key(w, item.batch, item.head);
    const double fall = largest_fall(p, item.key_length, 0);
    mbarrier_wait(&shared.barriers().q_full[q.stage()], q.phase());
    const double bound = reference + fall + 2.0 * largest_score(p, largest_query(q.stage()), key);
    for (;;) {
      const unsigned dropped =
          __ballot_sync(0xffffffffu, begin - lane > item.begin && last > bound);
      begin = dropped != 0 ? begin - (__ffs(dropped) - 1) : max(item.begin, begin - 32);
      if (dropped != 0 || begin == item.begin) {
        break;
      }
      last = read_gate_sum(item, (begin - lane) * kKeys - 1);
    }
    if (lane == 0) {
      shared.bound(slot) = begin;
    }
    hopper::arrive_from(&shared.barriers().item_bounded[slot], lane);
  }

  __device__ void run() const {
    ForwardBarriers& barriers = shared.barriers();
    hopper::RingCount<> slot;
    hopper::RingCount<Shape::kQueryStages> q;
    for (;; slot.advance(), q.advance()) {
      mbarrier_wait(&barriers.item_known[slot.stage()], slot.phase());
      const ForwardItem& item = shared.item(slot.stage());
      if (item.rows < 0) {
        mbarrier_arrive(&barriers.item_ready[slot.stage()]);
        return;
      }
      const double reference = read_gate_sum(item, item.first);
      store_rows(item, reference, shared.row_gates(slot.stage()));
      mbarrier_arrive(&barriers.item_ready[slot.stage()]);
      if (w.params.forward.prune > 0) {
        if (item.begin < first_sure_tile(item)) {
          prune(item, reference, slot.stage(), q);
        } else {  // nobody asks, but phases are counted
          // Whoever waits for a parity may skip no phase. With two stages of queries, the next
          // item of this stage is not known before this one's queries have been used; with one
          // stage they might still be on their way then.
          if (Shape::kQueryStages == 1) {
            mbarrier_wait(&barriers.q_full[q.stage()], q.phase());
          }
          hopper::arrive_from(&barriers.item_bounded[slot.stage()], lane);
        }
      }
      hopper::arrive_from(&barriers.item_empty[slot.stage()], lane);
    }
  }
};

/// Looks at the values of an edge tile: rows behind the sequence, which no query sees and which may
/// be a neighbour's, become zeros where they are not finite; the math warps are told of others.
template <class Shape>
__device__ inline void inspect_tile(const HopperForwardShared<Shape>& shared, int stage, int rows,
                                    int lane) {
  using Tile = hopper::Panels<Shape::kKeys>;
  unsigned char* const values = shared.values(stage);
  bool reported = false;
#pragma unroll 8
  for (int at = lane * 16; at < Shape::kKeyBytes; at += 32 * 16) {
    if (non_finite_bits<typename Shape::T>(values + at) != 0) {
      if (at % Tile::kPanelBytes / hopper::kPanelRowBytes >= rows) {
        *reinterpret_cast<uint4*>(values + at) = uint4{};
      } else {
        reported = true;
      }
    }
  }
  if (reported) {
    shared.not_finite(stage) = 1;
  }
  hopper::fence_async_proxy();
  hopper::arrive_from(&shared.barriers().v_full[stage], lane);
}

template <class Shape>
__device__ inline void inspect_values(const HopperForwardShared<Shape>& shared, int window,
                                      bool pruned, int lane) {
  constexpr int kKeys = Shape::kKeys;
  ForwardBarriers& barriers = shared.barriers();
  hopper::RingCount<> slot, stage;
  int landed = 0;  // parities of v_landed, a bit a stage
  for (;; slot.advance()) {
    mbarrier_wait(&barriers.item_known[slot.stage()], slot.phase());
    const ForwardItem& item = shared.item(slot.stage());
    if (item.rows < 0) {
      return;
    }
    const int first = item.first, last = first + item.rows - 1, end = item.end;
    const int sure = first_sure_tile(item);
    for (int tile = end - 1, begin = sure; tile >= begin; --tile, stage.advance()) {
      if (edge_of<kKeys>(tile, first, last, window) != TileEdge::kNone) {
        mbarrier_wait(&barriers.v_landed[stage.stage()], landed >> stage.stage() & 1);
        landed ^= 1 << stage.stage();
        inspect_tile(shared, stage.stage(), item.key_length - tile * kKeys, lane);
      }
      if (tile == sure) {
        begin = first_tile(shared, slot, pruned);
      }
    }
    hopper::arrive_from(&barriers.item_empty[slot.stage()], lane);
  }
}

}  // namespace tidegate::kernels::attention
