#pragma once

// What the walk (walk.cuh) asks of an Op: the mathematics of one recurrence in one direction, as a
// class over one thread's channels. linear_scan.cuh has the first ones to read.
//
// Every Op has
//   kVec; kSteps, kStages          channels a thread; WalkShape
//   kCrossByMap                    whether a state crosses a run by its map or step by step
//   kDecaysAlike                   whether all runs let a state decay alike: their maps then differ
//                                  in AffineMap::Added alone
//   kEmitsAtOnce                   whether, crossing by a map, a state is passed on before it is
//                                  advanced: emit then need not wait, and nothing is kept
//   Number, Real                   state of one channel, real or complex; the real type under it
//   kPackBytes                     bytes of a thread's elements of one input row; 0: they differ
//   Raw                            one step's inputs in memory
//   Params, layout(p), channels(p) the kernel's params, and where they say N, T and D
//   Op(params, seq, lane)
//   initial(s)                     the state before the first step
//   gather(source, k, last)        step k's inputs from a source (rows.cuh), always in one order,
//                                  since it fills and reads a slot of the ring; last: the last step
//   finish(s)                      the state after the last step
//   reduce(row, scratch, ...)      partial sums over the steps seen by a block, if the op has any
// and, for Run<Op> (run.cuh) and the plain walk to call,
//   Decoded, decode(raw)           the inputs prepared
//   advance(raw, decoded, s, kept) the state s through one step; kept[kVec]: what emit needs of it
//   emit<kLast>(k, i, raw, decoded, kept)   write step k + i's outputs; kLast: it may be the last
//   fold(raw, decoded, map)        map <- step o map, but for what seal does
//   seal(map)                      after kSteps folds: what fold left out
//   reduce_alone(row)              reduce where one thread has seen all steps (plain walk)
//
// An Op may change what WalkDefaults says, and may have
//   prepare()                      what takes a while to compute before the first step, while its
//                                  inputs are on their way
//   prepare(shared, at, given),    the same by all warps of a team together, where kPreparedBytes
//   take_prepared(shared, lane)    is not zero (never in the plain walk)
//   given(at)                      with it: what a warp prepares from, read before all runs
//   advance_alone(raw, s, kept)    advance in the plain walk
//   cross(map, s)                  what map.advance(s) does, in a walk of whole sequences
//   RunInputs, fetch_run(...)      with kRunInputBytes: inputs of a run besides those of its steps,
//                                  and what starts their copies into its place in the ring
//   launch_plain(params, stream)   a kernel of its own instead of the plain walk
//   Run                            with kOwnsRun, what Run<Op> is then (wkv4's: Wkv4Forward::Run,
//                                  Wkv4WholeRun, Wkv4LinkedRun). It crosses by map and emits at
//                                  once, so it has decode, fold and advance_and_emit. With
//                                  LookAhead::kOwnRuns fold is told where the run lies, and
//                                  take(ring, stage) may do the second time what decode has made
//                                  easy
//   gather_for_fold(source, raw, k), gather_others(source, raw, k, last), kFoldBytes, kOtherBytes
//                                  with LookAhead::kSplits: the parts of gather, and of Raw
//
// kSharesGauge makes the links wkv4's (wkv4_links.cuh).

namespace tidegate::kernels::scan {

/// How a walk is cut: steps a run, and runs in flight a warp.
template <int kSteps_, int kStages_>
struct WalkShape {
  static constexpr int kSteps = kSteps_;
  static constexpr int kStages = kStages_;
};

/// What a shape is for.
enum class WalkUse {
  kManyBlocks,  // whole sequences, several blocks a multiprocessor; and the plain walk
  kOneBlock,    // whole sequences, one block a multiprocessor: longer runs make its chain shorter
  kLinked,      // parts of sequences: long runs pay for the longer way of the carry
};

/// Whether linked workers post the map of their next run before the state of the present one comes
/// (ahead.cuh), and where the present one waits.
enum class LookAhead {
  kNone,     // one run after the other
  kParks,    // as decoded steps, in shared memory besides the ring
  kSplits,   // in the ring, from which it is taken twice; a fold reads some of the inputs
  kOwnRuns,  // the same, where a fold reads all inputs and runs are the Op's own (wkv4)
};

template <class Op>
__host__ __device__ constexpr bool looks_ahead() {
  return Op::kLookAhead != LookAhead::kNone;
}

/// What an Op is unless it says otherwise.
struct WalkDefaults {
  /// Whether maps of runs of linked blocks have decays of one word (kDecaysAlike is false then).
  static constexpr bool kPlainMaps = false;
  static constexpr LookAhead kLookAhead = LookAhead::kNone;
  /// Whether a run's inputs stay in registers from decode on, so that its place in the ring is
  /// filled again before the carry.
  static constexpr bool kTakesRuns = false;
  /// Whether copies of rows have L2 read the lines beside (rows.cuh).
  static constexpr bool kBringsNeighbours = false;
  /// Shared memory of a team for what its warps prepare together.
  static constexpr int kPreparedBytes = 0;
  /// Bytes of a thread in a run's place in the ring, besides its steps' inputs.
  static constexpr int kRunInputBytes = 0;
  static constexpr bool kOwnsRun = false;
  static constexpr bool kSharesGauge = false;
};

}  // namespace tidegate::kernels::scan
