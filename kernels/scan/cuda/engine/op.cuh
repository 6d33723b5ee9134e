#pragma once

// What the scan engine (scan_kernel.cuh) asks of an Op: the mathematics of one recurrence in one
// direction, as a class over one thread's channels. (An op in src/ops is the torch operator.)
// linear_scan/ has the first ones to read.
//
// Every Op has
//   kVec; kSteps, kStages          channels a thread; its tile configuration (below)
//   kCarryByMap                    whether a state crosses a chunk by its map or step by step
//   kEqualDecays                   whether all chunks let a state decay equally: their maps then
//                                  differ in AffineMap::Added alone
//   kEmitWhileAdvancing            whether, carried by a map, a state is passed on before it is
//                                  advanced: emit then need not wait, and nothing is kept
//   Number, Real                   state of one channel, real or complex; the real type under it
//   kPackBytes                     bytes of a thread's elements of one input row; 0: they differ
//   Data                           the elements of its rows; Unaligned<T> (unaligned.cuh): of T,
//                                  rows begin anywhere
//   Raw                            one step's inputs in memory
//   kInputs                        how many rows these are
//   Params                         the kernel's params
//   Op(params, seq, channels)
//   initial(s)                     the state before the first step
//   gather(source, k, last)        step k's inputs from a source (rows.cuh), always in one order,
//                                  since it fills and reads a slot of the ring; last: the last step
//   store_final_state(s)           the state after the last step
//   reduce(row, scratch, ...)      partial sums over the steps seen by a warp group, if the op has
//   any
// and, for WarpChunk<Op> (chunk_loops.cuh) and the sequential scan to call,
//   Decoded, decode(raw)           the inputs prepared
//   advance(raw, decoded, s, kept) the state s through one step; kept[kVec]: what emit needs of it
//   emit<kLast>(k, i, raw, decoded, kept)   write step k + i's outputs; kLast: it may be the last
//   compose(raw, decoded, map)     map <- step o map, but for what finalize does
//   finalize(map)                  after kSteps calls of compose: what these left out
//   reduce_alone(row)              reduce where one thread has seen all steps (sequential scan)
//
// An Op may change what OpDefaults says, and may have
//   prepare()                      what takes a while to compute before the first step, while its
//                                  inputs are on their way
//   prepare(shared, at, given),    what prepare() does, shared among all warps of a warp group,
//   take_prepared(shared, lane)    where kPreparedBytes is not zero (never in the sequential scan)
//   given(at)                      with it: what a warp prepares from, read before all chunks
//   advance_alone(raw, s, kept)    advance in the sequential scan
//   cross(map, s)                  what map.apply(s) does, in a single-block scan
//   ChunkInputs, fetch_chunk_inputs(...)  with kChunkInputBytes: inputs of a chunk besides those of
//                                  its steps, and what starts their copies into the chunk's stage
//   launch_sequential(params, stream)     a kernel of its own instead of the sequential scan
//   Chunk                          with kHasOwnChunk, what WarpChunk<Op> is then: wkv4's, which are
//                                  Wkv4Forward::Chunk, Wkv4SingleBlockChunk, Wkv4MultiBlockChunk.
//                                  Such a chunk is carried by map and emits while advancing, so it
//                                  has decode, compose and advance_and_emit. With
//                                  Pipelining::kOwnChunk compose is told
//                                  where the chunk lies, and take(ring, stage) may do the second
//                                  time what decode has made easy
//   gather_for_compose(source, raw, k), gather_others(source, raw, k, last), kComposeBytes,
//   kOtherBytes, kComposeInputs    with Pipelining::kSplitRing: the inputs that compose reads, and
//                                  the rest
//
// kSharedExponent makes the multi-block carry wkv4's (wkv4/wkv4_multi_block.cuh).

#include <cstdint>

#include "kernels/scan/wkv4.h"

namespace tidegate::kernels::scan {

/// How a multi-block scan is software-pipelined: a compute warp publishes the map of its next chunk
/// before the state that enters its present one has come. This says where the present chunk waits
/// (chunk_loops.cuh).
enum class Pipelining : uint8_t {
  kNone,           // one chunk after the other
  kStagingBuffer,  // as decoded steps, in a staging buffer in shared memory beside the ring
  kSplitRing,      // in the ring, from which it is read twice; compose reads some of the inputs
  kOwnChunk,       // in the ring as a whole, where chunks are the Op's own (wkv4)
};

template <class Op>
__host__ __device__ constexpr bool is_pipelined() {
  return Op::kPipelining != Pipelining::kNone;
}

/// The params of the recurrence itself: those of a backward pass hold them as `forward`.
template <class Params>
__host__ __device__ constexpr const auto& recurrence_params(const Params& params) {
  if constexpr (requires { params.forward; }) {
    return params.forward;
  } else {
    return params;
  }
}

/// What an Op is unless it says otherwise.
struct OpDefaults {
  /// Whether the maps of a multi-block scan have single-float decays (kEqualDecays is false then).
  static constexpr bool kSingleFloatDecay = false;
  static constexpr Pipelining kPipelining = Pipelining::kNone;
  /// Whether a chunk's inputs stay in registers from decode on, so that its stage of the ring is
  /// filled again before the carry.
  static constexpr bool kInputsInRegisters = false;
  /// Whether copies of rows have L2 read the lines beside (rows.cuh).
  static constexpr bool kPrefetchNeighbourLine = false;
  /// Shared memory of a warp group for what its warps prepare together.
  static constexpr int kPreparedBytes = 0;
  /// Bytes of a thread in a stage of the ring, besides its steps' inputs.
  static constexpr int kChunkInputBytes = 0;
  /// Whether a chunk's inputs are taken from the ring more than twice: rows that begin anywhere are
  /// then shifted into their places first (Ring::put_in_place).
  static constexpr bool kTakesOften = false;
  /// Whether a single-block scan finds where the next warp's carry lies when it sends one, and does
  /// not keep it. Where registers are short, a spilled address is read back on the way of the
  /// state: a fifth of a scan's time, where two instructions take a hundredth.
  static constexpr bool kFindsNextWarpLate = false;
  /// Whether WarpChunk<Op> is Op::Chunk.
  static constexpr bool kHasOwnChunk = false;
  /// Outputs of a step that leave by way of the ring.
  static constexpr int kStagedOutputs = 0;
  static constexpr bool kSharedExponent = false;
  /// Whether the carry warp of a multi-block scan polls for its block's maps instead of sleeping:
  /// it is on its way sooner, and takes issue slots from the compute warps. Measured op by op.
  static constexpr bool kPollsForMaps = false;
};

// ---- Tile configurations ----
//
// The table of tile configurations: for every op, direction and regime, how many steps a warp chunk
// has and how many chunks a warp's ring holds. All entries were tuned on an H200; docs/lab/scan.md
// has the figures. A longer chunk means fewer hops of the carry, a deeper ring more bytes in
// flight, and both cost registers or shared memory.

/// What a configuration is for: how many blocks a multiprocessor has, and whether blocks share a
/// sequence. A single-block scan has at most 16 warps an SM in either regime (kMaxWarps).
enum class Regime : uint8_t {
  kSeveralBlocksPerSm,  // single-block scans, several blocks an SM; and the sequential scan
  kOneBlockPerSm,  // single-block scans, one block an SM: there is one chain of carries to wait for
  kMultiBlock,     // blocks that share a sequence: the carry's way is the longest
};

enum class OpKind : uint8_t {
  kLinearScan,
  kHgru,
  kHgruSplitRing,  // hgru's backward pass with Pipelining::kSplitRing
  kComplexHgru,
  kLru,
  kWkv4,
};
enum class Direction : uint8_t { kForward, kBackward };

struct TileEntry {
  OpKind op;
  Direction direction;
  Regime regime;
  int steps;   // of a warp chunk
  int stages;  // chunks in a warp's ring
};

constexpr int kSavedEvery = static_cast<int>(kWkv4SavedEvery);

constexpr TileEntry kTiles[] = {
    // A step of linear_scan is one multiply-add, so its forward chunks can be long; backward, three
    // inputs a step leave less room.
    {OpKind::kLinearScan, Direction::kForward, Regime::kSeveralBlocksPerSm, 8, 2},
    {OpKind::kLinearScan, Direction::kForward, Regime::kOneBlockPerSm, 16, 2},
    {OpKind::kLinearScan, Direction::kForward, Regime::kMultiBlock, 16, 2},
    {OpKind::kLinearScan, Direction::kBackward, Regime::kSeveralBlocksPerSm, 8, 2},
    {OpKind::kLinearScan, Direction::kBackward, Regime::kMultiBlock, 8, 2},

    // With one chain an SM, chunks of 16 halve its hops. A pipelined multi-block scan frees a stage
    // as soon as the chunk is decoded, so one stage is enough.
    {OpKind::kHgru, Direction::kForward, Regime::kSeveralBlocksPerSm, 8, 2},
    {OpKind::kHgru, Direction::kForward, Regime::kOneBlockPerSm, 16, 2},
    {OpKind::kHgru, Direction::kForward, Regime::kMultiBlock, 16, 1},
    // Backward a step keeps four inputs and two gates: registers bound the chunk, and a third stage
    // keeps enough bytes in flight. Multi-block chunks of 12 steps make iterations longer than the
    // carry's way through 8 blocks.
    {OpKind::kHgru, Direction::kBackward, Regime::kSeveralBlocksPerSm, 4, 3},
    {OpKind::kHgru, Direction::kBackward, Regime::kOneBlockPerSm, 8, 3},
    {OpKind::kHgru, Direction::kBackward, Regime::kMultiBlock, 12, 2},
    // What compose reads lies three chunks deep, the rest two: 15 KB a warp. In the 227 KB of an
    // H100 or H200 that leaves room for 14 compute warps beside the carry; the map of the 15th is
    // the identity.
    {OpKind::kHgruSplitRing, Direction::kBackward, Regime::kMultiBlock, 12, 3},
    // Twice the registers a channel. Chunks of 12 and rings of three were slower forward.
    {OpKind::kComplexHgru, Direction::kForward, Regime::kOneBlockPerSm, 8, 2},
    {OpKind::kComplexHgru, Direction::kForward, Regime::kMultiBlock, 8, 2},
    {OpKind::kComplexHgru, Direction::kBackward, Regime::kOneBlockPerSm, 4, 3},
    {OpKind::kComplexHgru, Direction::kBackward, Regime::kMultiBlock, 4, 3},

    // lru emits as it advances, so nothing is kept and chunks may be long; with one block an SM its
    // bytes in flight are what is short, and a third stage gained 6 %.
    {OpKind::kLru, Direction::kForward, Regime::kSeveralBlocksPerSm, 8, 2},
    {OpKind::kLru, Direction::kForward, Regime::kOneBlockPerSm, 16, 3},
    {OpKind::kLru, Direction::kForward, Regime::kMultiBlock, 24, 2},
    {OpKind::kLru, Direction::kBackward, Regime::kSeveralBlocksPerSm, 4, 2},
    {OpKind::kLru, Direction::kBackward, Regime::kOneBlockPerSm, 8, 2},
    {OpKind::kLru, Direction::kBackward, Regime::kMultiBlock, 8, 2},

    // Backward a chunk is what lies between two saved states. A pipelined scan reads a chunk of the
    // ring twice, so a third stage takes the place of the one that waits.
    {OpKind::kWkv4, Direction::kForward, Regime::kSeveralBlocksPerSm, 8, 2},
    {OpKind::kWkv4, Direction::kForward, Regime::kOneBlockPerSm, 16, 2},
    {OpKind::kWkv4, Direction::kForward, Regime::kMultiBlock, 16, 3},
    {OpKind::kWkv4, Direction::kBackward, Regime::kSeveralBlocksPerSm, kSavedEvery, 2},
    {OpKind::kWkv4, Direction::kBackward, Regime::kMultiBlock, kSavedEvery, 3},
};

/// The regime of an Op that is the same kernel in both regimes of a single-block scan (two of the
/// backward passes): the table has one entry for them, and the kernel is compiled once.
constexpr Regime with_one_single_block(Regime regime) {
  return regime == Regime::kOneBlockPerSm ? Regime::kSeveralBlocksPerSm : regime;
}

/// The table's entry; one that is missing does not compile.
constexpr TileEntry find_tile(OpKind op, Direction direction, Regime regime) {
  for (const TileEntry& entry : kTiles) {
    if (entry.op == op && entry.direction == direction && entry.regime == regime) {
      return entry;
    }
  }
  throw "no such tile configuration";
}

/// The configuration of one Op, which inherits it.
template <OpKind kOp, Direction kDirection, Regime kRegime>
struct TileConfig {
  static constexpr int kSteps = find_tile(kOp, kDirection, kRegime).steps;
  static constexpr int kStages = find_tile(kOp, kDirection, kRegime).stages;
};

}  // namespace tidegate::kernels::scan
