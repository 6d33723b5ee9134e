#pragma once

// The walk: how a block of threads takes a recurrence  s <- A_k s + X_k  along a sequence in one
// pass over memory.
//
//   A warp owns 32 * kVec adjacent channels (a row of its inputs is one contiguous access) and
//   kSteps consecutive steps, its run. The warps of a block own consecutive runs; together they are
//   a tile. Where blocks share a sequence, consecutive blocks own consecutive tiles.
//
//   Inputs travel through a warp's ring in shared memory, kStages runs deep, so that loads are
//   always in flight. Rings are private to their warps and need no barrier.
//
//   One round, for every warp:
//     decode   its run, from the ring
//     carry    take the state that enters its run from the warp before
//     advance  the state through the run; pass on what leaves it
//     emit     the outputs of the run's steps
//     fetch    the run kStages rounds ahead into the place that has become free
//              (before the carry already, where decode leaves nothing in the ring)
//
// The carry is a chain: only taking, advancing and passing on are serial, a few instructions a
// step, while decoding and emitting overlap freely among the warps. No barrier stops a whole block,
// and every state is computed from the one before by the same operations as a step of decoding.
//
// Where time is split among blocks, that chain would take too long, and so it would for an Op whose
// steps are dear (kCrossByMap). There every warp first folds its run into an affine map, by which a
// state crosses it at once (links.cuh). Either way the operations and their order do not depend on
// timing: results are bitwise reproducible.
//
// The mathematics is an Op's (walk_op.cuh).

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/scan/cuda/ahead.cuh"
#include "kernels/scan/cuda/chain.cuh"
#include "kernels/scan/cuda/links.cuh"
#include "kernels/scan/cuda/run.cuh"
#include "kernels/scan/cuda/walk_op.cuh"
#include "kernels/scan/scan.h"

namespace tidegate::kernels::scan {

/// Whether a block walks whole sequences (TimeSplit::kWhole), or is linked to others that share
/// one.
enum class WalkMode { kWhole, kLinked };

template <class Op, WalkMode kMode>
using WalkShared = std::conditional_t<kMode == WalkMode::kLinked, LinkShared<Op>, ChainShared<Op>>;

struct WalkLaunch {
  int64_t channel_tiles = 0;
  int linked_blocks = 1;      // that share a sequence
  int group = 1;              // teams that a state crosses at once
  bool wide_rows = false;     // all rows of a channel tile are whole and aligned to 16 bytes
  void* mailboxes = nullptr;  // of all teams
};

/// Teams and threads of a block, at most.
template <class Op, WalkMode kMode>
struct WalkBounds {
  static constexpr bool kLinked = kMode == WalkMode::kLinked;
  static constexpr int kTeams = kLinked ? LinkSize<Op>::kTeams : 1;
  static constexpr int kThreads =
      (kLinked ? kTeams * (LinkSize<Op>::kWorkers + 1) : kMaxWarps) * kWarpSize;
};

/// The walk of those who do not look ahead (ahead.cuh has the others): a run after the other.
template <WalkMode kMode, class Op>
__device__ inline void walk_in_turn(Op& op, const Ring<Op>& ring, WalkShared<Op, kMode>& shared,
                                    const Place& at, int k, int end, int stride,
                                    typename Op::Number (&s)[Op::kVec]) {
  constexpr bool kLinked = kMode == WalkMode::kLinked;
  using Map = AffineMap<typename Op::Number, Op::kVec>;
  int stage = 0;
  int round = 0;
  for (int base = 0; base < end; base += stride, k += stride, ++round) {
    ring.wait();
    Run<Op> run;
    run.decode(op, ring, stage, k, end);
    const auto refill = [&] {
      if (end - base > Op::kStages * stride) {
        ring.fetch(op, stage, k + Op::kStages * stride, end);
      }
      commit_copies();
    };
    if constexpr (Op::kTakesRuns) {
      refill();
    }
    if constexpr (kLinked) {
      Map map = Map::identity();
      run.fold(op, ring, stage, map);
      shared.post(at, round, map);
      shared.take(at, round, s);
    } else if constexpr (Op::kCrossByMap) {
      const Chain<Op> mail{shared, at};
      Map map = Map::identity();
      run.fold(op, ring, stage, map);
      mail.take(round, s);
      typename Op::Number leaving[Op::kVec];
      copy_state(leaving, s);
      if constexpr (requires { Op::cross(map, leaving); }) {
        Op::cross(map, leaving);
      } else {
        map.advance(leaving);
      }
      mail.pass(leaving);
    } else {
      const Chain<Op> mail{shared, at};
      mail.take(round, s);
      run.advance(op, ring, stage, k, end, s);
      mail.pass(s);
    }
    if constexpr (Op::kEmitsAtOnce) {
      run.advance_and_emit(op, ring, stage, k, end, s);
    } else {
      if constexpr (kLinked || Op::kCrossByMap) {
        run.advance(op, ring, stage, k, end, s);
      }
      run.emit(op, ring, stage, k, end);
    }

    if constexpr (!Op::kTakesRuns) {
      refill();
    }
    stage = stage + 1 == Op::kStages ? 0 : stage + 1;
  }
}

template <class Op, WalkMode kMode>
__global__ __launch_bounds__(WalkBounds<Op, kMode>::kThreads,
                             1) void walk_kernel(const __grid_constant__ typename Op::Params params,
                                                 const __grid_constant__ WalkLaunch launch) {
  constexpr bool kLinked = kMode == WalkMode::kLinked;
  extern __shared__ __align__(16) char shared_memory[];

  // The teams of a block lie far apart in time, so that one waits while the other works.
  constexpr int kTeams = WalkBounds<Op, kMode>::kTeams;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int team_warps = static_cast<int>(blockDim.x) / (kWarpSize * kTeams);
  const int team = kTeams > 1 ? warp / team_warps : 0;
  const int blocks = kLinked ? launch.linked_blocks : 1;
  const int64_t chain = blockIdx.x / blocks;  // one sequence's one channel tile
  Place at = {.warp = warp - team * team_warps,
              .warps = team_warps - (kLinked ? 1 : 0),
              .lane = static_cast<int>(threadIdx.x) % kWarpSize,
              .rank = team * blocks + static_cast<int>(blockIdx.x) % blocks,
              .teams = blocks * kTeams};
  if constexpr (kLinked) {
    at.keep_in_registers();
  }
  auto& shared = reinterpret_cast<WalkShared<Op, kMode>*>(shared_memory)[team];
  const int64_t tile = chain % launch.channel_tiles;
  const int64_t n = chain / launch.channel_tiles;

  const Sequence seq = find_sequence(Op::layout(params), n);
  const Lane lane = find_lane<Op::kVec>(tile * kWarpSize + at.lane, Op::channels(params));
  const int end = seq.length;
  Op op(params, seq, lane);

  // First of all the first runs start on their way, then all that takes a while. Of warps that
  // prepare together only their first ones do, and the others afterwards: what is asked for comes
  // in that order, and behind three runs of 16 warps the parameters would come late.
  const int stride = at.teams * at.warps * Op::kSteps;  // steps a round
  const bool walks = !kLinked || at.warp < at.warps;
  int k = (at.rank * at.warps + at.warp) * Op::kSteps;
  char* const after_boards = shared_memory + kTeams * sizeof(shared);
  const RingOf<Op> ring(after_boards + kTeams * Op::kPreparedBytes, team * at.warps + at.warp,
                        at.lane, launch.wide_rows);
  const auto fetch_stages = [&](int from, int to) {
    for (int stage = from; walks && stage < to; ++stage) {
      if constexpr (Op::kLookAhead == LookAhead::kSplits) {
        ring.fetch(op, stage, k + stage * stride, end, stride);
      } else if (stage * stride < end) {
        ring.fetch(op, stage, k + stage * stride, end);
      }
      commit_copies();
    }
  };
  if constexpr (Op::kPreparedBytes > 0) {
    const auto given = op.given(at);
    fetch_stages(0, 1);
    shared.init(at);
    __syncthreads();  // nobody's second run before anybody's first, for which the chain would wait
    op.prepare(after_boards + team * Op::kPreparedBytes, at, given);
    fetch_stages(1, Op::kStages);
  } else {
    fetch_stages(0, Op::kStages);
    shared.init(at);
  }
  shared.prepare(op, at);
  __syncthreads();
  if constexpr (Op::kPreparedBytes > 0) {
    if (walks) {
      op.take_prepared(after_boards + team * Op::kPreparedBytes, at.lane);
    }
  } else if constexpr (requires { op.prepare(); }) {
    op.prepare();
  }
  typename Op::Number s[Op::kVec];
  op.initial(s);

  // Workers finish an empty sequence themselves: for carriers, too, the initial state would be kept
  // in registers that the linked walks need.
  if (!walks) {
    if constexpr (kLinked) {
      auto* boxes = static_cast<Mailbox<Op>*>(launch.mailboxes) + chain * at.teams;
      const Carrier<Op> carrier{shared, boxes, at, launch.group};
      const int rounds = (end - 1) / stride + (end > 0 ? 1 : 0);
      carrier.run(rounds, s, op);
    }
  } else {
    if constexpr (kLinked && Op::kLookAhead == LookAhead::kParks) {
      char* const parks =
          after_boards + kTeams * (Op::kPreparedBytes + at.warps * RingOf<Op>::kBytes);
      const Park<Op> park(parks + (team * at.warps + at.warp) * park_bytes<Op>(), at.lane);
      walk_parking(op, ring, park, shared, at, k, end, stride);
    } else if constexpr (kLinked && Op::kLookAhead == LookAhead::kSplits) {
      walk_splitting(op, ring, shared, at, k, end, stride);
    } else if constexpr (kLinked && Op::kLookAhead == LookAhead::kOwnRuns) {
      walk_own_runs(op, ring, shared, at, k, end, stride, s);
    } else {
      walk_in_turn<kMode>(op, ring, shared, at, k, end, stride, s);
    }
    if (end == 0 && at.rank == 0 && at.warp == 0) {
      op.finish(s);
    }
  }

  __syncthreads();  // the boards become scratch
  // A carrier takes part, with sums of zero.
  op.reduce(n * at.teams + at.rank, &shared, at.warp, at.warps + (kLinked ? 1 : 0), at.lane);
}

/// The plain walk: one thread a channel, one step at a time, in any type. It takes what the walk
/// above does not: double precision, and sequences of a step or two, where there is nothing to
/// divide. Reads its state before writing any, so that a step may update it in place.
template <class Op>
__global__ void plain_walk_kernel(const __grid_constant__ typename Op::Params params,
                                  const __grid_constant__ WalkLaunch launch) {
  const int64_t tile = blockIdx.x % launch.channel_tiles;
  const int64_t n = blockIdx.x / launch.channel_tiles;
  const Sequence seq = find_sequence(Op::layout(params), n);
  const int64_t channel = tile * blockDim.x + threadIdx.x;
  if (channel >= Op::channels(params)) {
    return;
  }
  const Lane lane = {channel, Op::channels(params)};
  Op op(params, seq, lane);
  typename Op::Number s[Op::kVec];
  op.initial(s);
  if (seq.length > 0) {
    const int last = seq.length - 1;
    typename Op::Raw raw = op.gather(DirectSource{}, 0, last);
    if constexpr (requires { op.prepare(); }) {
      op.prepare();
    }
    for (int k = 0; k <= last; ++k) {
      const typename Op::Raw next = op.gather(DirectSource{}, min(k + 1, last), last);
      const typename Op::Decoded decoded = op.decode(raw);
      typename Op::Number kept[Op::kVec];
      if constexpr (requires { op.advance_alone(raw, s, kept); }) {
        op.advance_alone(raw, s, kept);
      } else {
        op.advance(raw, decoded, s, kept);
      }
      op.template emit<true>(k, 0, raw, decoded, kept);
      raw = next;
    }
  }
  op.finish(s);
  op.reduce_alone(n);
}

}  // namespace tidegate::kernels::scan
