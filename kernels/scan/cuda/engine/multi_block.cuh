#pragma once

// The carry of a multi-block scan: blocks that share a sequence, all of them resident. A block is
// two warp groups, or one, if its loop is software-pipelined (chunk_loops.cuh). Consecutive warp
// groups own consecutive tiles of time, first all blocks' first groups, then all second ones (a
// warp group's number in this order is its rank); the last one of an iteration hands on to the
// first one of the next.
//
// A state must cross a tile faster than its steps can be taken, so it crosses by maps. Every
// compute warp publishes the map of its chunk in shared memory (barrier maps_ready: all compute
// warps arrive, the carry warp waits). One warp of each group, the carry warp, composes them to the
// map of the tile, lets the state that enters the tile through, and hands it to the compute warps
// (barrier carry_ready: the carry warp arrives, the compute warps wait). Each of these takes it to
// its own chunk by a prefix map, that of the tile's chunks before its own, which the carry warp has
// put in the place of the chunk's map. Without prefix maps the carry warp takes the state through
// the chunks, and hands every compute warp its own (MultiBlockShared says when).
//
// Warp groups exchange carry records in device memory. That takes long, so several of them make a
// carry group that the state crosses at once: they read each other's maps while it is on its way.
//
// Who composes what, and in which order, depends on positions alone, never on who comes first.

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/scan/cuda/engine/carry.cuh"
#include "kernels/scan/cuda/engine/op.cuh"

namespace tidegate::kernels::scan {

/// How many warp groups a block has, and how many compute warps a warp group. Compute warps of a
/// pipelined scan have work to do while a state is on its way; others wait, and a second warp group
/// works meanwhile.
template <class Op>
struct WarpGroupShape {
  static constexpr int kWarpGroups = is_pipelined<Op>() ? 1 : 2;
  static constexpr int kComputeWarps = kMaxWarps / kWarpGroups - 1;
  static constexpr int kMaxCarryGroup = std::numeric_limits<int>::max();
};

constexpr int kRecordBuffers = 3;  // iterations whose carry records lie in memory at once

/// The maps that carry warps compose, and those of all compute warps in shared memory.
template <class Op>
using ChunkMap =
    std::conditional_t<Op::kSingleFloatDecay, SingleFloatMap<typename Op::Number, Op::kVec>,
                       AffineMap<typename Op::Number, Op::kVec>>;
template <class Op, int kCount>
using SharedChunkMaps =
    std::conditional_t<Op::kSingleFloatDecay,
                       SharedSingleFloatMaps<typename Op::Number, Op::kVec, kCount>,
                       SharedMaps<typename Op::Number, Op::kVec, kCount>>;

/// Whether a state crosses all blocks at once, unless they are very many: carry warps of
/// single-float maps poll many records at once, and the compute warps of a pipelined scan publish
/// theirs an iteration before. (Those with a split ring have no registers for so many records: two
/// groups are faster.)
template <class Op>
__host__ __device__ constexpr bool carry_groups_are_large() {
  return Op::kSingleFloatDecay && Op::kPipelining == Pipelining::kStagingBuffer;
}
/// Warp groups of a carry group, where so many blocks share a sequence: all warp groups, in the
/// order of their tiles, are cut into carry groups of this size, the last of which may be smaller.
/// The size is found for one warp group a block, so where blocks have two, there are twice as many
/// carry groups as `carry_groups` says. Measured (docs/lab/scan.md).
template <class Op>
constexpr int carry_group_size(int blocks) {
  constexpr int kMaxBlocksInCarryGroup = 16;
  const int few = Op::kSingleFloatDecay && blocks <= 4 ? 1 : 2;
  const int carry_groups = carry_groups_are_large<Op>()
                               ? (blocks + kMaxBlocksInCarryGroup - 1) / kMaxBlocksInCarryGroup
                               : few;
  return std::min((blocks + carry_groups - 1) / carry_groups, WarpGroupShape<Op>::kMaxCarryGroup);
}

/// The carry records of one warp group. Those of three iterations are kept: a warp group that
/// writes the records of iteration i has received the state of iteration i - 1, which went through
/// its carry group's maps of iteration i - 2, which were written after all records of iteration i -
/// 3 had been read.
template <class Op>
struct CarryRecords {
  using Map = ChunkMap<Op>;
  using Added = typename AffineMap<typename Op::Number, Op::kVec>::Added;
  using PackedMap = std::conditional_t<Op::kEqualDecays, Added, Map>;
  struct State {
    typename PackedStateOf<typename Op::Number>::type s[Op::kVec];
  };
  PackedCarry<PackedMap> tile[kRecordBuffers];  // from this warp group
  PackedCarry<State> entering[kRecordBuffers];  // to its carry group, if it is the first of it
};

/// The workspace of a multi-block scan: the carry records of all warp groups of every chain (one
/// channel tile of one sequence). The plan takes its size from here, and the launch clears it.
template <class Op>
struct CarryWorkspace {
  int64_t chains;
  int blocks_per_sequence;

  int64_t bytes() const {
    return chains * blocks_per_sequence * WarpGroupShape<Op>::kWarpGroups *
           int64_t{sizeof(CarryRecords<Op>)};
  }
};

/// The shared-memory carry of a warp group.
template <class Op>
struct alignas(16) MultiBlockShared {
  // With prefix maps all compute warps are handed the state that enters the tile, and each the map
  // of the chunks before its own, in the place of its own. Prefix maps are used where maps are
  // small (equal decays, or single-float ones) and where compute warps are many (a pipelined scan
  // has up to 15). Otherwise (7 compute warps, two-float decays that differ) each warp is handed
  // the state that enters its chunk: maps are large, and a state crosses few of them quickly.
  static constexpr int kComputeWarps = WarpGroupShape<Op>::kComputeWarps;
  static constexpr bool kPrefixMaps =
      Op::kEqualDecays || is_pipelined<Op>() || Op::kSingleFloatDecay;
  static constexpr int kCarries = kPrefixMaps ? 1 : kComputeWarps;
  // A pipelined scan publishes the next iteration's map before it receives this one's state.
  static constexpr int kSets = is_pipelined<Op>() ? 2 : 1;
  struct Set {
    SharedChunkMaps<Op, kComputeWarps> maps;
    SharedState<typename Op::Number, Op::kVec> carry[kCarries];
    uint64_t maps_ready;
    uint64_t carry_ready[kCarries];
  };
  Set sets[kSets];

  __device__ Set& set(int iteration) { return sets[kSets == 1 ? 0 : iteration % kSets]; }
  static __device__ int parity(int iteration) { return iteration / kSets & 1; }

  /// This carry has nothing to prepare from the Op; wkv4's multi-block carry has.
  __device__ void prepare(const Op&, const WarpPosition&) const {}
  __device__ void init(const WarpPosition& at) {
    if (at.lane == 0 && at.warp == at.warps) {
      for (Set& set : sets) {
        mbarrier_init(&set.maps_ready, at.warps * kWarpSize);
        for (uint64_t& ready : set.carry_ready) {
          mbarrier_init(&ready, kWarpSize);
        }
      }
    }
    // A compute warp that has no room on this device has a map all the same, where nothing changes.
    for (int w = at.warp + at.warps; w < kComputeWarps && at.warp < at.warps; w += at.warps) {
      for (Set& set : sets) {
        set.maps.store(w, at.lane, ChunkMap<Op>::identity());
      }
    }
  }

  /// A compute warp publishes the map of its chunk...
  __device__ void publish_map(const WarpPosition& at, int iteration,
                              const AffineMap<typename Op::Number, Op::kVec>& map) {
    Set& now = set(iteration);
    if constexpr (Op::kSingleFloatDecay) {
      now.maps.store(at.warp, at.lane, ChunkMap<Op>::of(map));
    } else {
      now.maps.store(at.warp, at.lane, map);
    }
    mbarrier_arrive(&now.maps_ready);
  }
  /// ... and later receives the state that enters its chunk.
  __device__ void receive(const WarpPosition& at, int iteration,
                          typename Op::Number (&s)[Op::kVec]) {
    Set& now = set(iteration);
    const int index = kPrefixMaps ? 0 : at.warp;
    mbarrier_wait(&now.carry_ready[index], parity(iteration));
    now.carry[index].load(at.lane, s);
    if constexpr (kPrefixMaps) {
      now.maps.load(at.warp, at.lane).apply(s);
    }
  }
};

/// A carry warp's place in its carry group; `size`: warp groups of one.
struct CarryGroup {
  int first;  // rank of the group's first warp group
  int next;   // rank of the next group's first, zero after the last group
  bool last;  // whether this is the group's last warp group

  __device__ CarryGroup(const WarpPosition& at, int size)
      : first(at.rank / size * size),
        next(first + size < at.warp_groups ? first + size : 0),
        last(at.rank + 1 == (next == 0 ? at.warp_groups : next)) {}
};

/// The carry warp of a warp group, for one lane. An iteration:
///   compose_tile     waits for the chunks' maps and composes them
///   write            the tile's map to the rest of the carry group
///   compose_before   the maps of the group's earlier tiles, as their records come
///   receive_state    that enters the group; send_state: the group's last hands it on to the next
///   hand_out         the state to the compute warps
template <class Op>
struct CarryWarp {
  using Records = CarryRecords<Op>;
  using Number = typename Op::Number;
  using Map = typename Records::Map;
  using PackedMap = typename Records::PackedMap;
  using State = typename Records::State;
  using Set = typename MultiBlockShared<Op>::Set;
  static constexpr int kComputeWarps = WarpGroupShape<Op>::kComputeWarps;
  static constexpr bool kPrefixMaps = MultiBlockShared<Op>::kPrefixMaps;
  // Prefix maps are composed in a second pass, while the records are on their way, instead of
  // together with the tile's map, which leaves the earlier for it.
  static constexpr bool kPrefixesLater = carry_groups_are_large<Op>();
  // Records polled at once: more would take registers that the compute warps need.
  static constexpr int kPollsInFlight = carry_groups_are_large<Op>()          ? 7
                                        : PackedCarry<PackedMap>::kUnits <= 2 ? 3
                                                                              : 1;

  MultiBlockShared<Op>& shared;
  Records* records;  // of all warp groups of the chain
  const WarpPosition& at;
  int carry_group;  // warp groups of one

  static __device__ PackedMap pack_map(const Map& map) {
    if constexpr (Op::kEqualDecays) {
      return map.added();
    } else {
      return map;
    }
  }
  static __device__ Map unpack_map(const PackedMap& packed, [[maybe_unused]] const Map& own) {
    if constexpr (Op::kEqualDecays) {
      return own.like(packed);
    } else {
      return packed;
    }
  }

  /// The map of the tile; unless that is for later, every chunk's is replaced by its prefix.
  __device__ Map compose_tile(Set& now) const {
    Map tile = Map::identity();
#pragma unroll
    for (int w = 0; w < kComputeWarps; ++w) {
      const Map chunk = now.maps.load(w, at.lane);
      if (kPrefixMaps && !kPrefixesLater && w < at.warps) {
        now.maps.store(w, at.lane, tile);
      }
      chunk.compose_after(tile);
    }
    return tile;
  }

  /// Replaces every chunk's map by that of the chunks before it.
  __device__ void store_prefixes(Set& now) const {
    Map earlier = Map::identity();
#pragma unroll
    for (int w = 0; w < kComputeWarps; ++w) {
      if (w < at.warps) {
        const Map chunk = now.maps.load(w, at.lane);
        now.maps.store(w, at.lane, earlier);
        chunk.compose_after(earlier);
      }
    }
  }

  /// The map of the tiles from warp group `first` up to this one, whose map is `own`.
  __device__ Map compose_before(int first, unsigned epoch, int buffer, const Map& own) const {
    Map before = Map::identity();
    // Captured by value and one by one: with [&] some kernels spill.
    poll_in_order<PackedMap, kPollsInFlight>(
        first, at.rank, at.lane, epoch,
        [all = records, buffer](int rank) -> const PackedCarry<PackedMap>& {
          return all[rank].tile[buffer];
        },
        [&before, &own](int, const PackedMap& packed) {
          unpack_map(packed, own).compose_after(before);
        });
    return before;
  }

  __device__ void receive_state(PolledCarry<State>& poll, const PackedCarry<State>& record,
                                unsigned epoch, Number (&state)[Op::kVec]) const {
    poll.wait(record, at.lane, epoch);
    const State packed = poll.value();
#pragma unroll
    for (int v = 0; v < Op::kVec; ++v) {
      state[v] = unpack_state(packed.s[v]);
    }
  }

  /// Sends the state, after the carry group's map `through`, to the first warp group of the next
  /// carry group.
  __device__ void send_state(const Number (&state)[Op::kVec], const Map& through, int next,
                             int iteration) const {
    Number leaving[Op::kVec];
    copy_state(leaving, state);
    through.apply(leaving);
    State packed;
#pragma unroll
    for (int v = 0; v < Op::kVec; ++v) {
      packed.s[v] = pack_state(leaving[v]);
    }
    const int to = next > 0 ? iteration : iteration + 1;
    records[next].entering[to % kRecordBuffers].write(at.lane, to + 1, packed);
  }

  using ChunkMaps = Map[kPrefixMaps ? 1 : kComputeWarps];

  /// Hands one state to all compute warps, or to each warp the state that enters its chunk.
  __device__ void hand_out(Set& now, Number (&state)[Op::kVec], const ChunkMaps& chunks) const {
#pragma unroll
    for (int i = 0; i < MultiBlockShared<Op>::kCarries; ++i) {
      now.carry[i].store(at.lane, state);
      mbarrier_arrive(&now.carry_ready[i]);
      if constexpr (!kPrefixMaps) {
        chunks[i].apply(state);
      }
    }
  }

  /// Carries through all iterations of a sequence that begins with the state `initial`. (wkv4's
  /// carry warp, which takes the place of this one, reads the Op.)
  __device__ void carry(int iterations, const Number (&initial)[Op::kVec], const Op&) const {
    const CarryGroup group(at, carry_group);
    Number state[Op::kVec];
    copy_state(state, initial);
    for (int iteration = 0; iteration < iterations; ++iteration) {
      const unsigned epoch = iteration + 1;
      const int buffer = iteration % kRecordBuffers;
      const bool is_initial = iteration == 0 && group.first == 0;
      Set& now = shared.set(iteration);
      if constexpr (Op::kPollsForMaps) {
        mbarrier_poll(&now.maps_ready, shared.parity(iteration));
      } else {
        mbarrier_wait(&now.maps_ready, shared.parity(iteration));
      }
      const Map tile = compose_tile(now);
      if (!group.last) {
        records[at.rank].tile[buffer].write(at.lane, epoch, pack_map(tile));
      }
      const auto& entering = records[group.first].entering[buffer];
      PolledCarry<State> poll;
      if (!is_initial) {
        poll.poll(entering, at.lane);
      }
      if constexpr (kPrefixesLater) {
        store_prefixes(now);
      }
      const Map before = compose_before(group.first, epoch, buffer, tile);
      Map through = before;  // the carry group, for the last of it
      tile.compose_after(through);
      ChunkMaps chunks;
      if constexpr (!kPrefixMaps) {
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) {
          chunks[w] = now.maps.load(w, at.lane);
        }
      }
      if (!is_initial) {
        receive_state(poll, entering, epoch, state);
      }
      if (group.last && (group.next > 0 || iteration + 1 < iterations)) {
        send_state(state, through, group.next, iteration);
      }
      if (at.rank > group.first) {
        before.apply(state);
      }
      hand_out(now, state, chunks);
    }
  }
};

}  // namespace tidegate::kernels::scan
