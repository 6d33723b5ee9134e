#pragma once

// The links of wkv4: links.cuh for Ops whose runs share a gauge.
//
// A channel has a home, a gauge. Where its keys lie within reach of that, the sums of all its runs
// are kept in this one gauge: decays are constant factors then, and maps are composed and states
// let through by multiply-adds alone. Elsewhere a channel moves its gauge as AffineMap does. A warp
// takes the short way only if all its channels are at home; the long way computes the same for
// those that are, so no channel depends on its neighbours. Everything here counts gauges from home.
//
// A block is one team of 15 workers, who fold ahead (ahead.cuh), and a carrier; letters and their
// order are those of links.cuh.

#include "kernels/scan/cuda/links.cuh"
#include "kernels/scan/cuda/wkv4_maps.cuh"

namespace tidegate::kernels::scan {

/// exp(-w) for some number of steps, as a factor in two words.
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

/// Sums and their gauges, which are whole numbers, a channel each.
template <int kVec>
struct alignas(8 * kVec) Wkv4Sums {
  float y[kVec], z[kVec];
};
template <int kVec>
struct alignas(4 * kVec) Wkv4Gauges {
  float m[kVec];
};

/// A state, after a run with these sums that lowers gauges by whole + rest. Where the run is at
/// home the state comes home too, if that is near. Elsewhere the gauge follows the sums down: what
/// the words of letters round a slow decay to is nothing. (No part of those who call it, whose
/// registers it would take.)
__noinline__ __device__ inline Wkv4Words wkv4_words_after(Wkv4Words state, float whole, float rest,
                                                          Wkv4Words run) {
  Wkv4State<float> s = from_words(state);
  if (s.y == 0.0f && s.z == 0.0f) {
    s.m = kWkv4NoWeight;
  }
  lower_binary_gauge(s, whole, rest);
  const float distance = run.m - s.m;
  const auto weights = Wkv4Weights<float>::at_binary(distance, -s.rest);
  s.y = fused(weights.first, s.y, weights.second * run.y);
  s.z = fused(weights.first, s.z, weights.second * run.z);
  if (distance - s.rest > 0.0f) {
    s.m = run.m, s.rest = 0.0f;
  }
  s = in_one_word(s);
  float change = 0.0f;  // of the gauge
  if (run.m == 0.0f && s.m <= kReach) {
    change = -s.m;
  } else if (fmaxf(fabsf(s.y), fabsf(s.z)) < 0x1p-24f) {
    change = -24.0f;
  }
  const float scale = exp2_approx(-change);
  return {s.y * scale, s.z * scale, s.m + change};
}

/// What a run adds; or a state.
template <int kVec>
struct Wkv4GaugedSums {
  Wkv4Sums<kVec> sums;
  Wkv4Gauges<kVec> gauges;

  /// Zero, but for a sign, if all channels are at home.
  __device__ unsigned away() const {
    unsigned bits = 0;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      bits |= __float_as_uint(gauges.m[c]);
    }
    return bits;
  }
  __device__ bool is_home(int c) const { return gauges.m[c] == 0.0f; }

  /// Lets these sums through a run that decays like `d`. kHome: all are known to be at home.
  /// `rates`: see LinkShared.
  template <bool kHome>
  __device__ void cross(const Wkv4Decay<kVec>& d, const Wkv4GaugedSums& run,
                        const Wkv4Sums<kVec>& rates) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const float y = fused(d.hi[c], sums.y[c], fused(d.lo[c], sums.y[c], run.sums.y[c]));
      const float z = fused(d.hi[c], sums.z[c], fused(d.lo[c], sums.z[c], run.sums.z[c]));
      if (kHome || (is_home(c) && run.is_home(c))) {
        sums.y[c] = y, sums.z[c] = z;
      } else {
        const Wkv4Words s =
            wkv4_words_after({sums.y[c], sums.z[c], gauges.m[c]}, d.steps * rates.y[c],
                             d.steps * rates.z[c], {run.sums.y[c], run.sums.z[c], run.gauges.m[c]});
        sums.y[c] = s.y, sums.z[c] = s.z, gauges.m[c] = s.m;
      }
    }
  }
};

/// Whether no thread of the warp has a channel that is away; `bits`: or-ed.
__device__ inline bool none_away(unsigned bits) {
  return !__any_sync(0xffffffffu, (bits & 0x7fffffffu) != 0);
}

template <class Op>
  requires(Op::kSharesGauge)
struct LinkSize<Op> {
  static constexpr int kTeams = 1;
  static constexpr int kWorkers = kMaxWarps - 1;
  static constexpr int kMostInGroup = 4;  // measured (docs/kernels/wkv4.md)
};

template <class Op>
  requires(Op::kSharesGauge)
struct alignas(16) LinkShared<Op> {
  static constexpr int kVec = Op::kVec;
  static constexpr int kWorkers = LinkSize<Op>::kWorkers;
  using Sums = Wkv4GaugedSums<kVec>;
  using Decay = Wkv4Decay<kVec>;

  struct Set {
    // Of the workers' runs, then of the runs before those; and of the state that enters the tile.
    Wkv4Sums<kVec> sums[kWorkers + 1][kWarpSize];
    Wkv4Gauges<kVec> gauges[kWorkers + 1][kWarpSize];
    uint64_t runs_came, mail_came;

    __device__ void write(int place, int lane, const Sums& run) {
      sums[place][lane] = run.sums;
      gauges[place][lane] = run.gauges;
    }
    __device__ Sums read(int place, int lane) const {
      return {sums[place][lane], gauges[place][lane]};
    }
  };
  Set sets[2];  // for rounds of either parity: workers post the next one before they take this one
  // How a state decays from the tile's beginning to a run's, as a factor, hi in y and lo in z.
  Wkv4Sums<kVec> factors[kWorkers][kWarpSize];
  Wkv4Sums<kVec> rates[kWarpSize];  // of decay, binary: whole numbers in y, rests in z

  __device__ Set& set(int round) { return sets[round % 2]; }
  static __device__ int parity(int round) { return round / 2 & 1; }

  __device__ void init(const Place& at) {
    if (at.lane == 0 && at.warp == at.warps) {
      for (Set& set : sets) {
        mbarrier_init(&set.runs_came, at.warps * kWarpSize);
        mbarrier_init(&set.mail_came, kWarpSize);
      }
    }
  }
  __device__ void prepare(const Op& op, const Place& at) {
    Wkv4Sums<kVec> words;
    const auto d = Decay::of(op.w_whole, op.w_rest, at.warp * Op::kSteps);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      words.y[c] = at.warp < at.warps ? d.hi[c] : op.w_whole[c];
      words.z[c] = at.warp < at.warps ? d.lo[c] : op.w_rest[c];
    }
    (at.warp < at.warps ? factors[at.warp] : rates)[at.lane] = words;
  }
  __device__ Decay decay_to(const Place& at) const {
    Decay d;
    const auto words = factors[at.warp][at.lane];
    d.steps = static_cast<float>(at.warp * Op::kSteps);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      d.hi[c] = words.y[c], d.lo[c] = words.z[c];
    }
    return d;
  }
  __device__ void cross(Sums& state, const Decay& d, const Sums& run, int lane) const {
    if (none_away(state.away() | run.away())) {
      state.template cross<true>(d, run, {});
    } else {
      state.template cross<false>(d, run, rates[lane]);
    }
  }

  /// A worker's part of a round: its map, and later the state that enters its run.
  __device__ void post(const Op& op, const Place& at, int round,
                       const AffineMap<typename Op::Number, kVec>& map) {
    Sums run;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      run.sums.y[c] = map.sums[c].y, run.sums.z[c] = map.sums[c].z;
      run.gauges.m[c] = map.sums[c].m - op.home_of_state(c);
    }
    Set& now = set(round);
    now.write(at.warp, at.lane, run);
    mbarrier_arrive(&now.runs_came);
  }
  __device__ void take(const Op& op, const Place& at, int round, typename Op::Number (&s)[kVec]) {
    Set& now = set(round);
    mbarrier_wait(&now.mail_came, parity(round));
    Sums state = now.read(kWorkers, at.lane);
    if (at.warp > 0) {
      cross(state, decay_to(at), now.read(at.warp, at.lane), at.lane);
    }
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      s[c] = {state.sums.y[c], state.sums.z[c], state.gauges.m[c] + op.home_of_state(c)};
    }
  }
};

template <class Op>
  requires(Op::kSharesGauge)
struct Carrier<Op> {
  using Box = Mailbox<Op>;
  using Number = typename Op::Number;
  using MapWords = typename Box::MapWords;
  using State = typename Box::State;
  static constexpr int kVec = Op::kVec;
  static constexpr int kWorkers = LinkSize<Op>::kWorkers;
  static constexpr int kAtOnce = 3;  // letters read: more would take registers that workers need
  using Sums = Wkv4GaugedSums<kVec>;
  using Decay = Wkv4Decay<kVec>;

  LinkShared<Op>& shared;
  Box* boxes;  // of all teams of the chain
  const Place& at;
  int group;  // teams

  template <class Words>
  static __device__ Words to_letter(const Wkv4Words (&of)[kVec]) {
    Words words;
    memcpy(&words, of, sizeof(words));
    return words;
  }
  template <class Words>
  static __device__ Words to_letter(const Sums& run) {
    Wkv4Words of[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      of[c] = {run.sums.y[c], run.sums.z[c], run.gauges.m[c]};
    }
    return to_letter<Words>(of);
  }
  template <class Words>
  static __device__ Sums from_letter(const Words& words) {
    Wkv4Words of[kVec];
    memcpy(of, &words, sizeof(words));
    Sums run;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      run.sums.y[c] = of[c].y, run.sums.z[c] = of[c].z, run.gauges.m[c] = of[c].m;
    }
    return run;
  }
  __device__ void cross(Sums& state, const Decay& d, const Sums& run) const {
    shared.cross(state, d, run, at.lane);
  }

  /// The map of the tile, and to every worker that of the runs before its own.
  __device__ Sums compose(typename LinkShared<Op>::Set& now, const Decay& of_run, int slot,
                          unsigned stamp, bool writes) const {
    unsigned away = 0;
#pragma unroll
    for (int w = 0; w < kWorkers; ++w) {
      if (w < at.warps) {
        away |= now.read(w, at.lane).away();
      }
    }
    Sums tile = now.read(0, at.lane);
    if (none_away(away)) {
#pragma unroll
      for (int w = 1; w < kWorkers; ++w) {
        if (w < at.warps) {
          const Sums run = now.read(w, at.lane);
          now.sums[w][at.lane] = tile.sums;
          tile.template cross<true>(of_run, run, {});
        }
      }
    } else {
#pragma unroll 1
      for (int w = 1; w < at.warps; ++w) {
        const Sums run = now.read(w, at.lane);
        now.write(w, at.lane, tile);
        cross(tile, of_run, run);
      }
    }
    if (writes) {
      boxes[at.rank].tile[slot].write(at.lane, stamp, to_letter<MapWords>(tile));
    }
    return tile;
  }

  /// Carries through all rounds of a sequence that begins with the state `initial`.
  __device__ void run(int rounds, const Number (&initial)[kVec], const Op& op) const {
    const int first = at.rank / group * group;
    const int next = first + group < at.teams ? first + group : 0;
    const bool last = at.rank + 1 == (next == 0 ? at.teams : next);
    const int tile_steps = Op::kSteps * at.warps;
    const Decay of_run = Decay::of(op.w_whole, op.w_rest, Op::kSteps);
    const Decay of_tile = Decay::of(op.w_whole, op.w_rest, tile_steps);
    const Decay of_before = Decay::of(op.w_whole, op.w_rest, tile_steps * (at.rank - first));
    const Decay of_group = Decay::of(op.w_whole, op.w_rest, tile_steps * (at.rank - first + 1));
    for (int round = 0; round < rounds; ++round) {
      const unsigned stamp = round + 1;
      const int slot = round % kLetterRounds;
      const bool is_initial = round == 0 && first == 0;
      auto& now = shared.set(round);
      mbarrier_wait(&now.runs_came, shared.parity(round));
      const Sums tile = compose(now, of_run, slot, stamp, !last);

      const auto& letter = boxes[first].entering[slot];
      Receipt<State> receipt;
      if (!is_initial) {
        receipt.look(letter, at.lane);
      }
      Sums before, through = tile;
      for (int team = first; team < at.rank; team += kAtOnce) {
        Receipt<MapWords> receipts[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (team + i < at.rank) {
            receipts[i].look(boxes[team + i].tile[slot], at.lane);
          }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (team + i < at.rank) {
            receipts[i].wait(boxes[team + i].tile[slot], at.lane, stamp);
            const Sums came = from_letter(receipts[i].value());
            if (team + i == first) {
              before = came;
            } else {
              cross(before, of_tile, came);
            }
          }
        }
      }
      const bool passes = last && (next > 0 || round + 1 < rounds);
      if (passes && at.rank > first) {
        through = before;
        cross(through, of_tile, tile);
      }

      Sums state;
      if (is_initial) {
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          const Wkv4State<float> s = in_one_word(initial[c]);
          state.sums.y[c] = s.y, state.sums.z[c] = s.z;
          state.gauges.m[c] = s.m - op.home_of_state(c);
        }
      } else {
        receipt.wait(letter, at.lane, stamp);
        state = from_letter(receipt.value());
      }
      if (passes) {
        Sums leaving = state;
        cross(leaving, of_group, through);
        const int to = next > 0 ? round : round + 1;
        boxes[next].entering[to % kLetterRounds].write(at.lane, to + 1, to_letter<State>(leaving));
      }
      if (at.rank > first) {
        cross(state, of_before, before);
      }
      now.write(kWorkers, at.lane, state);
      mbarrier_arrive(&now.mail_came);
    }
  }
};

}  // namespace tidegate::kernels::scan
