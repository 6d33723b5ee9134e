#pragma once

// The table of tile configurations: for every op, direction and regime, how many steps a warp chunk
// has and how many chunks a warp's ring holds. All entries were tuned on an H200; docs/lab/scan.md
// has the figures. A longer chunk means fewer hops of the carry, a deeper ring more bytes in
// flight, and both cost registers or shared memory.

#include <cstdint>

#include "kernels/scan/wkv4.h"

namespace tidegate::kernels::scan {

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
    {OpKind::kComplexHgru, Direction::kForward, Regime::kSeveralBlocksPerSm, 8, 2},
    {OpKind::kComplexHgru, Direction::kForward, Regime::kOneBlockPerSm, 8, 2},
    {OpKind::kComplexHgru, Direction::kForward, Regime::kMultiBlock, 8, 2},
    {OpKind::kComplexHgru, Direction::kBackward, Regime::kSeveralBlocksPerSm, 4, 3},
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
