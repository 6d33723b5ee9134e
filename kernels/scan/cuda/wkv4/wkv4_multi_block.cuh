#pragma once

// The carry of wkv4's multi-block scans: multi_block.cuh for Ops whose chunks share a scaling
// exponent.
//
// A channel has a shared exponent. Where its keys lie within range of that, the sums of all its
// chunks are scaled by it: decays are constant factors then, and maps are composed and states let
// through by multiply-adds alone. Elsewhere a channel moves its exponent as AffineMap does. A warp
// takes the fast path only if all its channels are at their shared exponents; the slow path
// computes the same bits for those that are, so no channel depends on its neighbours. Everything
// here counts exponents from the shared one.
//
// A block is one warp group of 15 compute warps, which are software-pipelined (chunk_loops.cuh),
// and a carry warp; barriers, records and their order are those of multi_block.cuh.

#include "kernels/scan/cuda/engine/multi_block.cuh"
#include "kernels/scan/cuda/wkv4/wkv4_state.cuh"

namespace tidegate::kernels::scan {

/// A decay exp(-w) over some number of steps, as a factor in two floats.
template <int kVec>
struct Wkv4Decay {
  float hi[kVec], lo[kVec];
  float steps;

  __device__ static Wkv4Decay of(const float (&whole)[kVec], const float (&rest)[kVec], int steps) {
    Wkv4Decay d;
    d.steps = static_cast<float>(steps);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const double factor = exp2(-steps * (double{whole[c]} + double{rest[c]}));
      d.hi[c] = static_cast<float>(factor);
      d.lo[c] = static_cast<float>(factor - d.hi[c]);
    }
    return d;
  }
};

/// The sums y and z of a thread's channels, or another pair of numbers a channel.
template <int kVec>
struct alignas(8 * kVec) Wkv4Sums {
  float y[kVec], z[kVec];
};
/// The exponents of the maps, which are whole numbers.
template <int kVec>
struct alignas(4 * kVec) Wkv4Exponents {
  float m[kVec];
};

/// A state, after a chunk with these sums that lowers exponents by whole + rest. Where the chunk is
/// at the shared exponent the state moves there too, if that is near. Elsewhere the exponent
/// follows sums that have decayed: a carry record keeps no rest of an exponent, so a slow decay
/// goes into the sums. (A call, since inlined it would take registers of those who rarely need it.)
__noinline__ __device__ inline Wkv4PackedState wkv4_state_after(Wkv4PackedState state, float whole,
                                                                float rest, Wkv4PackedState chunk) {
  Wkv4State<float> s = unpack_state(state);
  if (s.y == 0.0f && s.z == 0.0f) {
    s.m = kWkv4NoWeight;
  }
  lower_binary_exponent(s, whole, rest);
  const float distance = chunk.m - s.m;
  const auto weights = Wkv4Weights<float>::at_binary(distance, -s.rest);
  s.y = fused(weights.first, s.y, weights.second * chunk.y);
  s.z = fused(weights.first, s.z, weights.second * chunk.z);
  if (distance - s.rest > 0.0f) {
    s.m = chunk.m, s.rest = 0.0f;
  }
  s = absorb_rest(s);
  float change = 0.0f;  // of the exponent
  if (chunk.m == 0.0f && s.m <= kExponentRange) {
    change = -s.m;
  } else if (fmaxf(fabsf(s.y), fabsf(s.z)) < 0x1p-24f) {
    change = -24.0f;
  }
  const float scale = exp2_approx(-change);
  return {s.y * scale, s.z * scale, s.m + change};
}

/// What a chunk adds, or a state: sums, scaled by exponents.
template <int kVec>
struct Wkv4ScaledSums {
  Wkv4Sums<kVec> sums;
  Wkv4Exponents<kVec> exponents;

  /// Zero, but for a sign, if all channels are at their shared exponents.
  __device__ unsigned off_shared_exponent() const {
    unsigned bits = 0;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      bits |= __float_as_uint(exponents.m[c]);
    }
    return bits;
  }
  __device__ bool at_shared_exponent(int c) const { return exponents.m[c] == 0.0f; }

  /// Lets these sums through a chunk that decays like `d`. kAllShared: all are known to be at their
  /// shared exponents. `rates`: see MultiBlockShared.
  template <bool kAllShared>
  __device__ void cross(const Wkv4Decay<kVec>& d, const Wkv4ScaledSums& chunk,
                        const Wkv4Sums<kVec>& rates) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const float y = fused(d.hi[c], sums.y[c], fused(d.lo[c], sums.y[c], chunk.sums.y[c]));
      const float z = fused(d.hi[c], sums.z[c], fused(d.lo[c], sums.z[c], chunk.sums.z[c]));
      if (kAllShared || (at_shared_exponent(c) && chunk.at_shared_exponent(c))) {
        sums.y[c] = y, sums.z[c] = z;
      } else {
        const Wkv4PackedState s = wkv4_state_after(
            {sums.y[c], sums.z[c], exponents.m[c]}, d.steps * rates.y[c], d.steps * rates.z[c],
            {chunk.sums.y[c], chunk.sums.z[c], chunk.exponents.m[c]});
        sums.y[c] = s.y, sums.z[c] = s.z, exponents.m[c] = s.m;
      }
    }
  }
};

/// Whether every channel of the warp is at its shared exponent; `bits`: off_shared_exponent, or-ed.
__device__ inline bool all_at_shared_exponent(unsigned bits) {
  return !__any_sync(0xffffffffu, (bits & 0x7fffffffu) != 0);
}

template <class Op>
  requires(Op::kSharedExponent)
struct WarpGroupShape<Op> {
  static constexpr int kWarpGroups = 1;
  static constexpr int kComputeWarps = kMaxWarps - 1;
  static constexpr int kMaxCarryGroup = 4;  // measured (docs/lab/wkv4.md)
};

template <class Op>
  requires(Op::kSharedExponent)
struct alignas(16) MultiBlockShared<Op> {
  static constexpr int kVec = Op::kVec;
  static constexpr int kComputeWarps = WarpGroupShape<Op>::kComputeWarps;
  using Sums = Wkv4ScaledSums<kVec>;
  using Decay = Wkv4Decay<kVec>;

  struct Set {
    // The maps of the compute warps' chunks, later those of all chunks before each of them; and,
    // last, the state that enters the tile.
    Wkv4Sums<kVec> sums[kComputeWarps + 1][kWarpSize];
    Wkv4Exponents<kVec> exponents[kComputeWarps + 1][kWarpSize];
    uint64_t maps_ready, carry_ready;

    __device__ void store(int index, int lane, const Sums& chunk) {
      sums[index][lane] = chunk.sums;
      exponents[index][lane] = chunk.exponents;
    }
    __device__ Sums load(int index, int lane) const {
      return {sums[index][lane], exponents[index][lane]};
    }
  };
  Set sets[2];  // for iterations of either parity: the next map is published before a state comes
  // How a state decays from the tile's beginning to a chunk's, as a factor, hi in y and lo in z.
  Wkv4Sums<kVec> factors[kComputeWarps][kWarpSize];
  Wkv4Sums<kVec> rates[kWarpSize];  // of decay, binary: whole numbers in y, rests in z

  __device__ Set& set(int iteration) { return sets[iteration % 2]; }
  static __device__ int parity(int iteration) { return iteration / 2 & 1; }

  __device__ void init(const WarpPosition& at) {
    if (at.lane == 0 && at.warp == at.warps) {
      for (Set& set : sets) {
        mbarrier_init(&set.maps_ready, at.warps * kWarpSize);
        mbarrier_init(&set.carry_ready, kWarpSize);
      }
    }
  }
  __device__ void prepare(const Op& op, const WarpPosition& at) {
    Wkv4Sums<kVec> values;
    const auto d = Decay::of(op.w_whole, op.w_rest, at.warp * Op::kSteps);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      values.y[c] = at.warp < at.warps ? d.hi[c] : op.w_whole[c];
      values.z[c] = at.warp < at.warps ? d.lo[c] : op.w_rest[c];
    }
    (at.warp < at.warps ? factors[at.warp] : rates)[at.lane] = values;
  }
  __device__ Decay decay_to(const WarpPosition& at) const {
    Decay d;
    const auto values = factors[at.warp][at.lane];
    d.steps = static_cast<float>(at.warp * Op::kSteps);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      d.hi[c] = values.y[c], d.lo[c] = values.z[c];
    }
    return d;
  }
  __device__ void cross(Sums& state, const Decay& d, const Sums& chunk, int lane) const {
    if (all_at_shared_exponent(state.off_shared_exponent() | chunk.off_shared_exponent())) {
      state.template cross<true>(d, chunk, {});
    } else {
      state.template cross<false>(d, chunk, rates[lane]);
    }
  }

  /// A compute warp's part of an iteration: its map, and later the state that enters its chunk.
  __device__ void publish_map(const Op& op, const WarpPosition& at, int iteration,
                              const AffineMap<typename Op::Number, kVec>& map) {
    Sums chunk;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      chunk.sums.y[c] = map.sums[c].y, chunk.sums.z[c] = map.sums[c].z;
      chunk.exponents.m[c] = map.sums[c].m - op.shared_exponent_of_state(c);
    }
    Set& now = set(iteration);
    now.store(at.warp, at.lane, chunk);
    mbarrier_arrive(&now.maps_ready);
  }
  __device__ void receive(const Op& op, const WarpPosition& at, int iteration,
                          typename Op::Number (&s)[kVec]) {
    Set& now = set(iteration);
    mbarrier_wait(&now.carry_ready, parity(iteration));
    Sums state = now.load(kComputeWarps, at.lane);
    if (at.warp > 0) {
      cross(state, decay_to(at), now.load(at.warp, at.lane), at.lane);
    }
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      s[c] = {state.sums.y[c], state.sums.z[c],
              state.exponents.m[c] + op.shared_exponent_of_state(c)};
    }
  }
};

/// The carry warp of a warp group, for one lane; its phases are those of CarryWarp
/// (multi_block.cuh).
template <class Op>
  requires(Op::kSharedExponent)
struct CarryWarp<Op> {
  using Records = CarryRecords<Op>;
  using Number = typename Op::Number;
  using PackedMap = typename Records::PackedMap;
  using State = typename Records::State;
  using Set = typename MultiBlockShared<Op>::Set;
  static constexpr int kVec = Op::kVec;
  static constexpr int kComputeWarps = WarpGroupShape<Op>::kComputeWarps;
  static constexpr int kPollsInFlight = 3;  // more would take registers that compute warps need
  using Sums = Wkv4ScaledSums<kVec>;
  using Decay = Wkv4Decay<kVec>;

  MultiBlockShared<Op>& shared;
  Records* records;  // of all warp groups of the chain
  const WarpPosition& at;
  int carry_group;  // warp groups of one

  /// Sums as they travel in a record, which holds a state or what a tile adds.
  template <class Packed>
  static __device__ Packed pack_sums(const Sums& sums) {
    Wkv4PackedState states[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      states[c] = {sums.sums.y[c], sums.sums.z[c], sums.exponents.m[c]};
    }
    Packed packed;
    memcpy(&packed, states, sizeof(packed));
    return packed;
  }
  template <class Packed>
  static __device__ Sums unpack_sums(const Packed& packed) {
    Wkv4PackedState states[kVec];
    memcpy(states, &packed, sizeof(packed));
    Sums sums;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      sums.sums.y[c] = states[c].y, sums.sums.z[c] = states[c].z, sums.exponents.m[c] = states[c].m;
    }
    return sums;
  }
  __device__ void cross(Sums& state, const Decay& d, const Sums& chunk) const {
    shared.cross(state, d, chunk, at.lane);
  }

  /// The map of the tile; every chunk's is replaced by that of the chunks before it.
  __device__ Sums compose_tile(Set& now, const Decay& of_chunk) const {
    unsigned off = 0;
#pragma unroll
    for (int w = 0; w < kComputeWarps; ++w) {
      if (w < at.warps) {
        off |= now.load(w, at.lane).off_shared_exponent();
      }
    }
    Sums tile = now.load(0, at.lane);
    if (all_at_shared_exponent(off)) {
#pragma unroll
      for (int w = 1; w < kComputeWarps; ++w) {
        if (w < at.warps) {
          const Sums chunk = now.load(w, at.lane);
          now.sums[w][at.lane] = tile.sums;
          tile.template cross<true>(of_chunk, chunk, {});
        }
      }
    } else {
#pragma unroll 1
      for (int w = 1; w < at.warps; ++w) {
        const Sums chunk = now.load(w, at.lane);
        now.store(w, at.lane, tile);
        cross(tile, of_chunk, chunk);
      }
    }
    return tile;
  }

  /// The map of the carry group's tiles before this one, if there are any.
  __device__ Sums compose_before(int first, unsigned epoch, int buffer,
                                 const Decay& of_tile) const {
    Sums before;
    poll_in_order<PackedMap, kPollsInFlight>(
        first, at.rank, at.lane, epoch,
        [all = records, buffer](int rank) -> const PackedCarry<PackedMap>& {
          return all[rank].tile[buffer];
        },
        [&](int rank, const PackedMap& packed) {
          const Sums tile = unpack_sums(packed);
          if (rank == first) {
            before = tile;
          } else {
            cross(before, of_tile, tile);
          }
        });
    return before;
  }

  __device__ Sums initial_state(const Number (&initial)[kVec], const Op& op) const {
    Sums state;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const Wkv4State<float> s = absorb_rest(initial[c]);
      state.sums.y[c] = s.y, state.sums.z[c] = s.z;
      state.exponents.m[c] = s.m - op.shared_exponent_of_state(c);
    }
    return state;
  }

  /// Carries through all iterations of a sequence that begins with the state `initial`.
  __device__ void carry(int iterations, const Number (&initial)[kVec], const Op& op) const {
    const CarryGroup group(at, carry_group);
    const int tile_steps = Op::kSteps * at.warps;
    const auto decay_of = [&](int steps) { return Decay::of(op.w_whole, op.w_rest, steps); };
    const Decay of_chunk = decay_of(Op::kSteps);
    const Decay of_tile = decay_of(tile_steps);
    const Decay of_before = decay_of(tile_steps * (at.rank - group.first));
    const Decay of_group = decay_of(tile_steps * (at.rank - group.first + 1));
    for (int iteration = 0; iteration < iterations; ++iteration) {
      const unsigned epoch = iteration + 1;
      const int buffer = iteration % kRecordBuffers;
      const bool is_initial = iteration == 0 && group.first == 0;
      Set& now = shared.set(iteration);
      mbarrier_wait(&now.maps_ready, shared.parity(iteration));
      const Sums tile = compose_tile(now, of_chunk);
      if (!group.last) {
        records[at.rank].tile[buffer].write(at.lane, epoch, pack_sums<PackedMap>(tile));
      }
      const auto& entering = records[group.first].entering[buffer];
      PolledCarry<State> poll;
      if (!is_initial) {
        poll.poll(entering, at.lane);
      }
      const Sums before = compose_before(group.first, epoch, buffer, of_tile);
      const bool sends = group.last && (group.next > 0 || iteration + 1 < iterations);
      Sums through = tile;  // the carry group, for the last of it
      if (sends && at.rank > group.first) {
        through = before;
        cross(through, of_tile, tile);
      }
      Sums state;
      if (is_initial) {
        state = initial_state(initial, op);
      } else {
        poll.wait(entering, at.lane, epoch);
        state = unpack_sums(poll.value());
      }
      if (sends) {
        Sums leaving = state;
        cross(leaving, of_group, through);
        const int to = group.next > 0 ? iteration : iteration + 1;
        records[group.next].entering[to % kRecordBuffers].write(at.lane, to + 1,
                                                                pack_sums<State>(leaving));
      }
      if (at.rank > group.first) {
        cross(state, of_before, before);
      }
      now.store(kComputeWarps, at.lane, state);
      mbarrier_arrive(&now.carry_ready);
    }
  }
};

}  // namespace tidegate::kernels::scan
