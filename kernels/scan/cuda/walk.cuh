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
// state crosses it at once (links.cuh). Either way the
// operations and their order do not depend on timing: results are bitwise reproducible.
//
// An Op supplies the mathematics (see hgru.cuh). It is a class over one thread's channels:
//   kVec; kSteps, kStages          channels a thread; WalkShape
//   kCrossByMap                    whether a state crosses a run by its map or step by step
//   kDecaysAlike                   whether all runs let a state decay alike: their maps then differ
//                                  in AffineMap::Added alone
//   kPlainMaps                     if so, maps of runs of linked blocks have decays of one word
//   kLooksAhead                    whether linked workers post the map of their next run before the
//                                  state of the present one comes (ahead.cuh)
//   kFoldsAhead                    if so, they do that too, and take each run from the ring twice:
//                                  to fold it, and to advance through it (wkv4_links.cuh)
//   Number, Real                   state of one channel, real or complex; the real type under it
//   kPackBytes                     bytes of a thread's elements of one input row; 0: they differ
//   Raw, Decoded                   one step's inputs in memory / prepared
//   Params, layout(p), channels(p) the kernel's params, and where they say N, T and D
//   Op(params, seq, lane)
//   kBringsNeighbours              if there is one: whether copies of rows bring the lines beside
//   prepare()                      what takes a while to compute before the first step, while its
//                                  inputs are on their way, if there is anything
//   prepare(shared, at, given),    the same by all warps of a team together, in kPreparedBytes of
//   take_prepared(shared, lane)    shared memory, if that is not zero (never in the plain walk)
//   given(at)                      what a warp of a team prepares from, read before all runs
//   initial(s)                     the state before the first step
//   gather(source, k, last)        step k's inputs from a source (rows.cuh), always in one order,
//                                  since it fills and reads a slot of the ring; last: the last step
//   decode(raw) -> Decoded
//   kTakesRuns                     if so, a run's inputs are kept in registers from decode on, and
//                                  their place in the ring is filled again before the carry
//   advance(raw, decoded, s, kept) the state s through one step; kept[kVec]: what emit needs of it
//   advance_alone(raw, s, kept)    if there is one: the same in the plain walk
//   kEmitsAtOnce                   crossing by a map, a state has been passed on before it is
//                                  advanced: emit then need not wait, and nothing is kept
//   emit<kLast>(k, i, raw, decoded, kept)   write step k + i's outputs; kLast: it may be the last
//   finish(s)                      the state after the last step
//   fold(raw, decoded, map)        map <- step o map, but for what seal does
//   seal(map)                      after kSteps folds: what fold left out
//   cross(map, s)                  if there is one: what map.advance(s) does, for whole sequences
//   RunInputs, fetch_run(...)      if there are any: inputs of a run besides those of its steps,
//                                  and what starts their copies into its place in the ring
//   reduce(row, scratch, ...)      partial sums over the steps seen by a block, if the op has any
//   reduce_alone(row)              the same where one thread has seen them all (plain walk)

#include "kernels/scan/cuda/ahead.cuh"
#include "kernels/scan/cuda/chain.cuh"
#include "kernels/scan/cuda/links.cuh"
#include "kernels/scan/cuda/rows.cuh"
#include "kernels/scan/scan.h"

namespace tidegate::kernels {

/// How a walk is cut: steps a run, and runs in flight a warp.
template <int kSteps_, int kStages_>
struct WalkShape {
  static constexpr int kSteps = kSteps_;
  static constexpr int kStages = kStages_;
};

/// What a shape is for. Whole sequences take kLong where plan.long_runs, else kShort.
enum class WalkUse {
  kShort,   // whole sequences, several blocks a multiprocessor
  kLong,    // whole sequences, one block a multiprocessor: longer runs make its chain shorter
  kLinked,  // parts of sequences: long runs pay for the longer way of the carry
};

/// Whether a block walks whole sequences (TimeSplit::kNone), or is linked to others that share one.
enum class WalkMode { kWhole, kLinked };

template <class Op, WalkMode kMode>
using WalkShared = std::conditional_t<kMode == WalkMode::kLinked, LinkShared<Op>, ChainShared<Op>>;

/// Bytes of a thread in a run's place in the ring, besides its steps' inputs.
template <class Op>
__host__ __device__ constexpr int bytes_of_run() {
  if constexpr (requires { typename Op::RunInputs; }) {
    return sizeof(typename Op::RunInputs);
  } else {
    return 0;
  }
}

template <class Op>
__host__ __device__ constexpr bool brings_neighbours() {
  if constexpr (requires { Op::kBringsNeighbours; }) {
    return Op::kBringsNeighbours;
  } else {
    return false;
  }
}

/// Shared memory of a team for what its warps prepare together.
template <class Op>
__host__ __device__ constexpr int bytes_to_prepare() {
  if constexpr (requires { Op::kPreparedBytes; }) {
    return Op::kPreparedBytes;
  } else {
    return 0;
  }
}

/// Whether a run's inputs stay in registers, so that its place in the ring is free at once.
template <class Op>
__host__ __device__ constexpr bool takes_runs() {
  if constexpr (requires { Op::kTakesRuns; }) {
    return Op::kTakesRuns;
  } else {
    return false;
  }
}

/// Whether linked workers take each run from the ring twice.
template <class Op>
__host__ __device__ constexpr bool folds_ahead() {
  if constexpr (requires { Op::kFoldsAhead; }) {
    return Op::kFoldsAhead;
  } else {
    return false;
  }
}

/// A warp's ring of runs in shared memory.
template <class Op>
class Ring {
 public:
  static constexpr int kSlotBytes = sizeof(typename Op::Raw) * kWarpSize;
  static constexpr int kRunBytes = bytes_of_run<Op>() * kWarpSize;
  static constexpr int kStageBytes = kSlotBytes * Op::kSteps + kRunBytes;
  static constexpr int kBytes = kStageBytes * Op::kStages;

  // All inputs must be packs of four bytes, a row of which is 128 bytes, for wide copies.
  using Wide = WideFetchSource<4, brings_neighbours<Op>()>;
  static constexpr bool kCanBeWide = Op::kPackBytes == 4 && Op::kSteps % Wide::kStepsAtOnce == 0;

  __device__ Ring(char* shared, int warp, int lane, bool wide)
      : base_(shared + warp * kBytes), lane_(lane), wide_(wide) {}

  /// Starts copying the run from step k into a stage. Steps past the end repeat the last one: that
  /// is memory which exists, and nothing that comes of it is used.
  __device__ void fetch(const Op& op, int stage, int k, int end) const {
    if constexpr (kRunBytes > 0) {
      op.fetch_run(run_inputs(stage), lane_, k, end);
    }
    if constexpr (kCanBeWide) {
      if (wide_) {
        __syncwarp();  // the place is free only when all threads have taken what they need from it
#pragma unroll
        for (int first = 0; first < Op::kSteps; first += Wide::kStepsAtOnce) {
          const int i = first + lane_ / Wide::kThreadsARow;
          op.gather(Wide{slot(stage, i), lane_}, min(k + i, end - 1), end - 1);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      op.gather(FetchSource{slot(stage, i), lane_}, min(k + i, end - 1), end - 1);
    }
  }

  /// Waits until the oldest run under way has come, or the kRuns oldest. Every fetch, or its
  /// absence, is followed by commit_copies, so that groups count runs.
  template <int kRuns = 1>
  __device__ void wait() const {
    wait_for_copies<Op::kStages - kRuns>();
    __syncwarp();
  }

  __device__ typename Op::Raw take(const Op& op, int stage, int i) const {
    return op.gather(SlotSource{slot(stage, i), lane_}, 0, 0);
  }
  /// What Op::fetch_run was given to fill.
  __device__ char* run_inputs(int stage) const { return slot(stage, Op::kSteps); }
  __device__ int lane() const { return lane_; }

  // Outputs may leave by way of the ring (wkv4.cuh), in the places of inputs that have been taken:
  // rows are then stored like they are fetched, several at once.

  /// Step i's output in the place of its input number `input`; or one of its channels.
  template <class T, int kVec>
  __device__ void put(int stage, int i, int input, const Pack<T, kVec>& p) const {
    *reinterpret_cast<Pack<T, kVec>*>(place(stage, i, input) + lane_ * Op::kPackBytes) = p;
  }
  template <class T>
  __device__ void put_channel(int stage, int i, int input, int c, T x) const {
    reinterpret_cast<T*>(place(stage, i, input) + lane_ * Op::kPackBytes)[c] = x;
  }
  /// Stores what was put in the places of that input, from step k of the walk on.
  template <class T, int kVec>
  __device__ void store(int stage, int input, const Rows<T, kVec>& rows, int k, int end) const {
    if constexpr (kCanBeWide) {
      if (wide_ && k + Op::kSteps <= end) {
        __syncwarp();
#pragma unroll
        for (int first = 0; first < Op::kSteps; first += Wide::kStepsAtOnce) {
          const int i = first + lane_ / Wide::kThreadsARow;
          const int offset = lane_ % Wide::kThreadsARow * 16;
          *reinterpret_cast<uint4*>(rows.at(k + i) + (offset - lane_ * Op::kPackBytes)) =
              *reinterpret_cast<const uint4*>(place(stage, i, input) + offset);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      if (k + i < end) {
        const char* from = place(stage, i, input) + lane_ * Op::kPackBytes;
        rows.store(k, i, *reinterpret_cast<const Pack<T, kVec>*>(from));
      }
    }
  }

 private:
  __device__ char* slot(int stage, int i) const {
    return base_ + stage * kStageBytes + i * kSlotBytes;
  }
  __device__ char* place(int stage, int i, int input) const {
    return slot(stage, i) + input * Op::kPackBytes * kWarpSize;
  }

  char* base_;
  int lane_;
  bool wide_;
};

/// A run between the ring and the outputs. An op may bring one of its own (wkv4.cuh).
template <class Op>
struct Run {
  using Number = typename Op::Number;
  using Raw = typename Op::Raw;
  struct Nothing {};
  std::conditional_t<takes_runs<Op>(), Raw, Nothing> taken[Op::kSteps];
  typename Op::Decoded decoded[Op::kSteps];
  Number kept[Op::kSteps][Op::kVec];

  __device__ void decode(const Op& op, const Ring<Op>& ring, int stage, int, int) {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      if constexpr (takes_runs<Op>()) {
        taken[i] = ring.take(op, stage, i);
      }
      decoded[i] = op.decode(raw(op, ring, stage, i));
    }
  }

  __device__ Raw raw(const Op& op, const Ring<Op>& ring, int stage, int i) const {
    if constexpr (takes_runs<Op>()) {
      return taken[i];
    } else {
      return ring.take(op, stage, i);
    }
  }

  __device__ void fold(const Op& op, const Ring<Op>& ring, int stage,
                       AffineMap<Number, Op::kVec>& map) const {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      op.fold(raw(op, ring, stage, i), decoded[i], map);
    }
    op.seal(map);
  }

  /// Takes s through the run that begins at step k; where it holds the sequence's last step, writes
  /// the final state.
  __device__ void advance(const Op& op, const Ring<Op>& ring, int stage, int k, int end,
                          Number (&s)[Op::kVec]) {
    if (k + Op::kSteps <= end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        op.advance(raw(op, ring, stage, i), decoded[i], s, kept[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          op.advance(raw(op, ring, stage, i), decoded[i], s, kept[i]);
        }
      }
    }
    if (k < end && end <= k + Op::kSteps) {
      op.finish(s);
    }
  }

  /// The same where outputs need not wait until s has been passed on.
  __device__ void advance_and_emit(Op& op, const Ring<Op>& ring, int stage, int k, int end,
                                   Number (&s)[Op::kVec]) const {
    Number now[Op::kVec];
    if (k + Op::kSteps < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        const Raw inputs = raw(op, ring, stage, i);
        op.advance(inputs, decoded[i], s, now);
        op.template emit<false>(k, i, inputs, decoded[i], now);
      }
    } else if (k < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          const Raw inputs = raw(op, ring, stage, i);
          op.advance(inputs, decoded[i], s, now);
          op.template emit<true>(k, i, inputs, decoded[i], now);
        }
      }
      op.finish(s);
    }
  }

  __device__ void emit(Op& op, const Ring<Op>& ring, int stage, int k, int end) const {
    if (k + Op::kSteps < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        op.template emit<false>(k, i, raw(op, ring, stage, i), decoded[i], kept[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          op.template emit<true>(k, i, raw(op, ring, stage, i), decoded[i], kept[i]);
        }
      }
    }
  }
};

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

template <class Op, WalkMode kMode>
__global__ __launch_bounds__(WalkBounds<Op, kMode>::kThreads,
                             1) void walk_kernel(const __grid_constant__ typename Op::Params params,
                                                 const __grid_constant__ WalkLaunch launch) {
  constexpr bool kLinked = kMode == WalkMode::kLinked;
  using Map = AffineMap<typename Op::Number, Op::kVec>;
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
  const Ring<Op> ring(after_boards + kTeams * bytes_to_prepare<Op>(), team * at.warps + at.warp,
                      at.lane, launch.wide_rows);
  const auto fetch_stages = [&](int from, int to) {
    for (int stage = from; walks && stage < to; ++stage) {
      if (stage * stride < end) {
        ring.fetch(op, stage, k + stage * stride, end);
      }
      commit_copies();
    }
  };
  if constexpr (bytes_to_prepare<Op>() > 0) {
    const auto given = op.given(at);
    fetch_stages(0, 1);
    shared.init(at);
    __syncthreads();  // nobody's second run before anybody's first, for which the chain would wait
    op.prepare(after_boards + team * bytes_to_prepare<Op>(), at, given);
    fetch_stages(1, Op::kStages);
  } else {
    fetch_stages(0, Op::kStages);
    shared.init(at);
  }
  if constexpr (requires { shared.prepare(op, at); }) {
    shared.prepare(op, at);
  }
  __syncthreads();
  if constexpr (bytes_to_prepare<Op>() > 0) {
    if (walks) {
      op.take_prepared(after_boards + team * bytes_to_prepare<Op>(), at.lane);
    }
  } else if constexpr (requires { op.prepare(); }) {
    op.prepare();
  }
  typename Op::Number s[Op::kVec];
  op.initial(s);

  if (!walks) {
    if constexpr (kLinked) {
      auto* boxes = static_cast<Mailbox<Op>*>(launch.mailboxes) + chain * at.teams;
      const Carrier<Op> carrier{shared, boxes, at, launch.group};
      const int rounds = (end - 1) / stride + (end > 0 ? 1 : 0);
      if constexpr (requires { carrier.run(rounds, s, op); }) {
        carrier.run(rounds, s, op);
      } else {
        carrier.run(rounds, s);
      }
    }
  } else if constexpr (kLinked && Op::kLooksAhead) {
    char* const parks =
        after_boards + kTeams * (bytes_to_prepare<Op>() + at.warps * Ring<Op>::kBytes);
    const Park<Op> park(parks + (team * at.warps + at.warp) * park_bytes<Op>(), at.lane);
    walk_ahead(op, ring, park, shared, at, k, end, stride);
    if (end == 0 && at.rank == 0 && at.warp == 0) {
      op.finish(s);
    }
  } else if constexpr (kLinked && folds_ahead<Op>()) {
    int folded = 0;  // the stage of the run that comes after the present one
    const auto look = [&](int round, int from) {
      Run<Op> run;
      run.decode(op, ring, folded, from, end);
      Map map = Map::identity();
      run.fold(op, ring, folded, from, end, map);
      shared.post(op, at, round, map);
      folded = folded + 1 == Op::kStages ? 0 : folded + 1;
    };
    if (end > 0) {
      ring.wait();
      look(0, k);
    }
    int stage = 0;
    int round = 0;
    for (int base = 0; base < end; base += stride, k += stride, ++round) {
      ring.template wait<2>();
      if (base + stride < end) {
        look(round + 1, k + stride);
      }
      Run<Op> run;
      shared.take(op, at, round, s);
      if constexpr (requires { run.take(ring, stage); }) {
        run.take(ring, stage);
      } else {
        run.decode(op, ring, stage, k, end);
      }
      run.advance_and_emit(op, ring, stage, k, end, s);
      if (end - base > Op::kStages * stride) {
        ring.fetch(op, stage, k + Op::kStages * stride, end);
      }
      commit_copies();
      stage = stage + 1 == Op::kStages ? 0 : stage + 1;
    }
    if (end == 0 && at.rank == 0 && at.warp == 0) {
      op.finish(s);
    }
  } else {
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
      if constexpr (takes_runs<Op>()) {
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

      if constexpr (!takes_runs<Op>()) {
        refill();
      }
      stage = stage + 1 == Op::kStages ? 0 : stage + 1;
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

}  // namespace tidegate::kernels
