#pragma once

// The carry where blocks share a sequence. A block is two teams of warps, or one, if these look
// ahead (ahead.cuh). Consecutive teams own consecutive tiles of time, first all
// blocks' first teams, then all second ones; the last one of a round is linked to the first one of
// the next. All blocks are resident.
//
// A state must cross a tile faster than anyone can walk it, so it crosses by maps. Every warp that
// walks (a worker) posts the map of its run. One warp of each team, the carrier, composes them to
// the map of the tile, lets the state that enters the tile through, and tells every worker what
// enters its run.
//
// Teams write letters to each other in device memory. That takes long, so several teams make a
// group that the state crosses at once: they read each other's maps while it is on its way.
//
// Who composes what, and in which order, depends on places alone, never on who comes first.

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/common/cuda/mbarrier.cuh"
#include "kernels/scan/cuda/chain.cuh"
#include "kernels/scan/cuda/walk_op.cuh"

namespace tidegate::kernels::scan {

/// Teams of a block, and the warps of one that walk. Workers that look ahead have what to do while
/// a state is on its way; others wait, and a second team works.
template <class Op>
struct LinkSize {
  static constexpr int kTeams = looks_ahead<Op>() ? 1 : 2;
  static constexpr int kWorkers = kMaxWarps / kTeams - 1;
  static constexpr int kMostInGroup = std::numeric_limits<int>::max();
};
constexpr int kLetterRounds = 3;  // rounds whose letters lie in memory at once

/// A value of 4-byte words for each lane. Three words and the round they were written in come with
/// one access, so no fence is needed and no flag can be seen before its value. Words that are left
/// over hold the round too, and are looked at: otherwise ptxas leaves them out and makes two
/// accesses of the rest.
template <class Value>
struct Letter {
  static constexpr int kWords = sizeof(Value) / 4;
  static constexpr int kUnits = (kWords + 2) / 3;
  uint4 units[kUnits][kWarpSize];

  __device__ void write(int lane, unsigned round, const Value& value) {
    unsigned words[3 * kUnits];
    memcpy(words, &value, sizeof(value));
#pragma unroll
    for (int i = kWords; i < 3 * kUnits; ++i) {
      words[i] = round;
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      asm volatile(
          "{ .reg .b64 low, high; .reg .b128 unit;\n"
          "mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4}; mov.b128 unit, {low, high};\n"
          "st.relaxed.gpu.global.b128 [%0], unit; }" ::"l"(&units[i][lane]),
          "r"(words[3 * i]), "r"(words[3 * i + 1]), "r"(words[3 * i + 2]), "r"(round)
          : "memory");
    }
  }
};

/// A letter on its way to one lane.
template <class Value>
struct Receipt {
  static constexpr int kUnits = Letter<Value>::kUnits;
  uint4 units[kUnits];

  __device__ void look(const Letter<Value>& letter, int lane) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      asm volatile(
          "{ .reg .b64 low, high; .reg .b128 unit;\n"
          "ld.relaxed.gpu.global.b128 unit, [%4];\n"
          "mov.b128 {low, high}, unit; mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
          : "=r"(units[i].x), "=r"(units[i].y), "=r"(units[i].z), "=r"(units[i].w)
          : "l"(&letter.units[i][lane])
          : "memory");
    }
  }
  __device__ bool came(unsigned round) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      all = all && units[i].w == round;
    }
    constexpr int kLeftOver = 3 * kUnits - Letter<Value>::kWords;
    return all && (kLeftOver < 1 || units[kUnits - 1].z == round) &&
           (kLeftOver < 2 || units[kUnits - 1].y == round);
  }
  /// Two looks are under way at a time, so that one comes back soon after the letter has come.
  __device__ void wait(const Letter<Value>& letter, int lane, unsigned round) {
    if (came(round)) {
      return;
    }
    Receipt next;
    look(letter, lane);
    next.look(letter, lane);
    while (!came(round)) {
      *this = next;
      next.look(letter, lane);
    }
  }
  __device__ Value value() const {
    unsigned words[3 * kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      words[3 * i] = units[i].x;
      words[3 * i + 1] = units[i].y;
      words[3 * i + 2] = units[i].z;
    }
    Value v;
    memcpy(&v, words, sizeof(v));
    return v;
  }
};

/// Between runs.
template <class Op>
using LinkMap = std::conditional_t<Op::kPlainMaps, PlainMap<typename Op::Number, Op::kVec>,
                                   AffineMap<typename Op::Number, Op::kVec>>;
template <class Op, int kCount>
using LinkBoard =
    std::conditional_t<Op::kPlainMaps, PlainMapBoard<typename Op::Number, Op::kVec, kCount>,
                       MapBoard<typename Op::Number, Op::kVec, kCount>>;

/// Whether a state crosses all blocks at once, unless they are very many: carriers of plain maps
/// read many letters at once, and workers that look ahead post theirs a round before. (Those that
/// split their runs have no registers for so many letters: two groups are faster.)
template <class Op>
__host__ __device__ constexpr bool groups_are_large() {
  return Op::kPlainMaps && Op::kLookAhead == LookAhead::kParks;
}
/// Teams that a state crosses at once, where so many blocks share a sequence: all teams, in the
/// order of their tiles, are cut into groups of this size, the last of which may be smaller.
/// Measured (docs/kernels/scan_cuda_measured.md).
template <class Op>
constexpr int group_of(int blocks) {
  constexpr int kMostAtOnce = 16;
  const int few = Op::kPlainMaps && blocks <= 4 ? 1 : 2;
  const int groups = groups_are_large<Op>() ? (blocks + kMostAtOnce - 1) / kMostAtOnce : few;
  return std::min((blocks + groups - 1) / groups, LinkSize<Op>::kMostInGroup);
}

/// The letters of one team. Letters of three rounds are kept: a team that writes those of round r
/// has received the state of round r - 1, which went through its group's maps of round r - 2, which
/// were written after all letters of round r - 3 had been read.
template <class Op>
struct Mailbox {
  using Map = LinkMap<Op>;
  using Added = typename AffineMap<typename Op::Number, Op::kVec>::Added;
  using MapWords = std::conditional_t<Op::kDecaysAlike, Added, Map>;
  struct State {
    typename StateWordsOf<typename Op::Number>::type s[Op::kVec];
  };
  Letter<MapWords> tile[kLetterRounds];   // from this team
  Letter<State> entering[kLetterRounds];  // to its group, if it is the first of it
};

/// Shared memory of a team, besides its rings.
template <class Op>
struct alignas(16) LinkShared {
  // Where runs decay alike or workers are many, all are told the state that enters the tile, and
  // each the map of the runs before its own, in the place of its own. Else (maps are large, and a
  // state crosses them quickly) each is told the state that enters its run.
  static constexpr int kWorkers = LinkSize<Op>::kWorkers;
  static constexpr bool kMailsMaps = Op::kDecaysAlike || looks_ahead<Op>() || Op::kPlainMaps;
  static constexpr int kMails = kMailsMaps ? 1 : kWorkers;
  // Who posts the map of the next round before it takes the state of this one needs two sets.
  static constexpr int kSets = looks_ahead<Op>() ? 2 : 1;
  struct Set {
    LinkBoard<Op, kWorkers> runs;
    StateBoard<typename Op::Number, Op::kVec> mail[kMails];
    uint64_t runs_came;
    uint64_t mail_came[kMails];
  };
  Set sets[kSets];

  __device__ Set& set(int round) { return sets[kSets == 1 ? 0 : round % kSets]; }
  static __device__ int parity(int round) { return round / kSets & 1; }

  __device__ void prepare(const Op&, const Place&) const {}
  __device__ void init(const Place& at) {
    if (at.lane == 0 && at.warp == at.warps) {
      for (Set& set : sets) {
        mbarrier_init(&set.runs_came, at.warps * kWarpSize);
        for (uint64_t& came : set.mail_came) {
          mbarrier_init(&came, kWarpSize);
        }
      }
    }
    // A worker that has no room on this device has a place all the same, where nothing changes.
    for (int w = at.warp + at.warps; w < kWorkers && at.warp < at.warps; w += at.warps) {
      for (Set& set : sets) {
        set.runs.post(w, at.lane, LinkMap<Op>::identity());
      }
    }
  }

  /// A worker's part of a round: its map...
  __device__ void post(const Place& at, int round,
                       const AffineMap<typename Op::Number, Op::kVec>& map) {
    Set& now = set(round);
    if constexpr (Op::kPlainMaps) {
      now.runs.post(at.warp, at.lane, LinkMap<Op>::of(map));
    } else {
      now.runs.post(at.warp, at.lane, map);
    }
    mbarrier_arrive(&now.runs_came);
  }
  /// ... for the state that enters its run.
  __device__ void take(const Place& at, int round, typename Op::Number (&s)[Op::kVec]) {
    Set& now = set(round);
    const int box = kMailsMaps ? 0 : at.warp;
    mbarrier_wait(&now.mail_came[box], parity(round));
    now.mail[box].read(at.lane, s);
    if constexpr (kMailsMaps) {
      now.runs.read(at.warp, at.lane).advance(s);
    }
  }
};

/// The carrier of a team, for one lane.
template <class Op>
struct Carrier {
  using Box = Mailbox<Op>;
  using Number = typename Op::Number;
  using Map = typename Box::Map;
  using MapWords = typename Box::MapWords;
  using State = typename Box::State;
  static constexpr int kWorkers = LinkSize<Op>::kWorkers;
  static constexpr bool kMailsMaps = LinkShared<Op>::kMailsMaps;
  // Of many workers: maps are composed anew for them while the letters are on their way.
  static constexpr bool kMailsLater = groups_are_large<Op>();
  // Letters read at once: more would take registers that the workers need.
  static constexpr int kAtOnce = groups_are_large<Op>() ? 7 : Letter<MapWords>::kUnits <= 2 ? 3 : 1;

  LinkShared<Op>& shared;
  Box* boxes;  // of all teams of the chain
  const Place& at;
  int group;  // teams

  static __device__ MapWords words_of(const Map& map) {
    if constexpr (Op::kDecaysAlike) {
      return map.added();
    } else {
      return map;
    }
  }
  static __device__ Map map_of(const MapWords& words, [[maybe_unused]] const Map& own) {
    if constexpr (Op::kDecaysAlike) {
      return own.like(words);
    } else {
      return words;
    }
  }

  /// Of the tiles from team `first` up to this one, whose map is `own`.
  __device__ Map map_before(int first, unsigned stamp, int slot, const Map& own) const {
    Map before = Map::identity();
    for (; first < at.rank; first += kAtOnce) {
      Receipt<MapWords> receipts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < at.rank) {
          receipts[i].look(boxes[first + i].tile[slot], at.lane);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < at.rank) {
          receipts[i].wait(boxes[first + i].tile[slot], at.lane, stamp);
          map_of(receipts[i].value(), own).append_to(before);
        }
      }
    }
    return before;
  }

  /// Carries through all rounds of a sequence that begins with the state `initial`.
  __device__ void run(int rounds, const Number (&initial)[Op::kVec], const Op&) const {
    const int first = at.rank / group * group;
    const int next = first + group < at.teams ? first + group : 0;
    const bool last = at.rank + 1 == (next == 0 ? at.teams : next);
    Number state[Op::kVec];
    copy_state(state, initial);
    for (int round = 0; round < rounds; ++round) {
      const unsigned stamp = round + 1;
      const int slot = round % kLetterRounds;
      const bool is_initial = round == 0 && first == 0;
      auto& now = shared.set(round);
      mbarrier_wait(&now.runs_came, shared.parity(round));
      Map tile = Map::identity();
#pragma unroll
      for (int w = 0; w < kWorkers; ++w) {
        const Map run = now.runs.read(w, at.lane);
        if (kMailsMaps && !kMailsLater && w < at.warps) {
          now.runs.post(w, at.lane, tile);
        }
        run.append_to(tile);
      }
      if (!last) {
        boxes[at.rank].tile[slot].write(at.lane, stamp, words_of(tile));
      }
      const auto& letter = boxes[first].entering[slot];
      Receipt<State> receipt;
      if (!is_initial) {
        receipt.look(letter, at.lane);
      }
      if constexpr (kMailsLater) {
        Map earlier = Map::identity();
#pragma unroll
        for (int w = 0; w < kWorkers; ++w) {
          if (w < at.warps) {
            const Map run = now.runs.read(w, at.lane);
            now.runs.post(w, at.lane, earlier);
            run.append_to(earlier);
          }
        }
      }
      const Map before = map_before(first, stamp, slot, tile);
      Map through = before;  // the group, for the last of it
      tile.append_to(through);
      Map runs[kMailsMaps ? 1 : kWorkers];
      if constexpr (!kMailsMaps) {
#pragma unroll
        for (int w = 0; w < kWorkers; ++w) {
          runs[w] = now.runs.read(w, at.lane);
        }
      }
      if (!is_initial) {
        receipt.wait(letter, at.lane, stamp);
        const State came = receipt.value();
#pragma unroll
        for (int v = 0; v < Op::kVec; ++v) {
          state[v] = from_words(came.s[v]);
        }
      }
      if (last && (next > 0 || round + 1 < rounds)) {
        Number leaving[Op::kVec];
        copy_state(leaving, state);
        through.advance(leaving);
        State words;
#pragma unroll
        for (int v = 0; v < Op::kVec; ++v) {
          words.s[v] = to_words(leaving[v]);
        }
        const int to = next > 0 ? round : round + 1;
        boxes[next].entering[to % kLetterRounds].write(at.lane, to + 1, words);
      }
      if (at.rank > first) {
        before.advance(state);
      }
#pragma unroll
      for (int i = 0; i < LinkShared<Op>::kMails; ++i) {
        now.mail[i].post(at.lane, state);
        mbarrier_arrive(&now.mail_came[i]);
        if constexpr (!kMailsMaps) {
          runs[i].advance(state);
        }
      }
    }
  }
};

}  // namespace tidegate::kernels::scan
