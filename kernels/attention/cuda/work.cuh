#pragma once

// What a launch of the tensor-core kernels is told, where a block of threads finds its part, and
// how each path divides its workspace.

#include <algorithm>
#include <cstdint>

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/forgetting_attention_cuda.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/common/cuda/shared_memory.cuh"

namespace tidegate::kernels::attention {

// ---- The work of a launch and of a block ----

/// Heads that a launch of the backward pass takes. Short-range heads are those where pruning leaves
/// a key few queries: they have tiles of their own, or a kernel (hopper/short_range.cuh).
enum class HeadRange : uint8_t { kAll, kShort, kLong };

/// Which queries pruning leaves to the keys: of every kKeys keys of a sequence and every query
/// head, the first query that sees none of them; and which heads are long-range. See
/// key_extents_kernel.
struct KeyExtents {
  static constexpr int kKeys = 64;
  TimeTiles keys = {};
  int* ends = nullptr;     // [keys.count, Hq]
  int* is_long = nullptr;  // [sequences, Hq], zero before
  // [2], zero before: whether there are such heads; how many of their tiles have been taken.
  unsigned* long_range = nullptr;
};

/// What one launch is told: the params, its tiles, and the arrays of the workspace.
struct TensorAttention {
  ForgettingAttentionBackwardParams params = {};  // the forward pass: its part
  TimeTiles tiles = {};                           // the blocks' own: of queries or of keys
  int side_by_side = 1;                           // see heads_side_by_side
  TimeTiles query_tiles = {};                     // backward: those of dq_sums
  const double* gate_sums = nullptr;              // c: [B, Hq, Tk]
  const unsigned* score_bounds = nullptr;         // where keys are pruned: see ScoreBounds
  KeyExtents extents = {};                        // backward, where keys are pruned
  HeadRange head_range = HeadRange::kAll;         // backward: which heads this launch takes
  // Backward on Hopper, where keys are pruned: short-range are heads whose tiles of 64 keys are
  // seen by queries of the tile at the same positions and of the next one only
  // (hopper/short_range.cuh).
  bool has_short_range = false;
  float* delta_minus_dlse = nullptr;  // backward: delta - dlse = do . o - dlse, [B, Hq, Tq]
  float* row_sums = nullptr;          // backward: of dS, [B, Hq, Tq]
  float* column_sums = nullptr;       // backward: of dS, [B, Hq, Tk]
  float* dq_sums = nullptr;           // backward: dq in float, tile by tile
  int* turns = nullptr;  // backward, where additions are ordered: see BackwardWorkspace
};

/// The classes of head dimensions, each compiled for itself: up to 96, and above.
enum class HeadDims : uint8_t { kSmall, kLarge };
constexpr int64_t kLargestSmallHeadDim = 96;

template <class Data, HeadDims kDims>
struct AttentionForwardUnit {
  /// Fills in work.tiles and work.side_by_side.
  static cudaError_t launch(TensorAttention work, cudaStream_t stream);
};

template <class Data>
struct AttentionSingleTileForwardUnit {
  /// Adds up gates itself.
  static cudaError_t launch(TensorAttention work, cudaStream_t stream);
};

template <class Data, HeadDims kDims>
struct AttentionBackwardUnit {
  /// With work.dq_sums: all gradients but the gates', dq by additions. Without, dq comes from a
  /// kernel of its own. Then adds up the chunks of `gates`.
  static cudaError_t launch(TensorAttention work, const GateGradientChunks& gates,
                            const DeviceLimits& limits, cudaStream_t stream);
};

/// How many heads' tiles are taken side by side, where `resident` blocks run at once: as many as
/// let them all start with tiles that have as much to do. Packed sequences: one.
inline int heads_side_by_side(const TimeTiles& tiles, int64_t resident) {
  return tiles.layout.offsets != nullptr
             ? 1
             : static_cast<int>(std::max<int64_t>(1, resident / tiles.per_sequence));
}

/// The block's tile and head. `side_by_side` heads, of a batch row or of several, all have their
/// first tile taken, then all their second, and so on; as many more heads follow. With two: head 0
/// tile 0, head 1 tile 0, head 0 tile 1... and then heads 2 and 3. With last_first the order of a
/// head's tiles is turned round, since the last queries see most keys. So the tiles with most to do
/// are never the last to be taken, and neighbouring blocks share keys and values, or queries.
struct TileAndHead {
  TimeTile tile;
  int64_t tile_index;
  int head;

  __device__ TileAndHead(const TimeTiles& tiles, int64_t all_heads, int side_by_side,
                         unsigned block, bool last_first) {
    const auto heads = static_cast<unsigned>(all_heads);
    const unsigned a_head =  // tiles of a head
        tiles.layout.offsets == nullptr ? static_cast<unsigned>(tiles.per_sequence)
                                        : static_cast<unsigned>(tiles.count);
    const unsigned all = static_cast<unsigned>(tiles.count) / a_head * heads;
    const unsigned first = block / (a_head * side_by_side) * side_by_side;
    const unsigned within = block - first * a_head;
    const unsigned width = min(static_cast<unsigned>(side_by_side), all - first);
    const unsigned at = within / width, rest = first + within % width;
    tile_index = rest / heads * a_head + (last_first ? a_head - 1 - at : at);
    head = static_cast<int>(rest % heads);
    tile = find_time_tile(tiles, static_cast<int>(tile_index));
  }
};

/// Which pairs of queries and keys count.
struct PairMask {
  int window;  // 0: none

  __device__ bool sees(int position, int key) const {
    return key <= position && (window == 0 || key > position - window);
  }
  /// One row's mask, of keys counted from `key`: it sees those in (oldest, newest].
  struct Row {
    int oldest, newest;
    __device__ bool sees(int key) const { return key <= newest && key > oldest; }
  };
  __device__ Row row(int position, int key) const {
    const int newest = position - key;
    return {window == 0 ? -(1 << 30) : newest - window, newest};
  }
};

/// Which keys the queries at positions [first, last] may see: tiles [begin, end).
struct KeyTileRange {
  int begin, end;

  template <int kKeys>
  static __device__ KeyTileRange of(int first, int last, int window) {
    const int oldest = window > 0 ? max(0, first - window + 1) : 0;
    return {oldest / kKeys, last < 0 ? 0 : last / kKeys + 1};
  }
};

/// Which queries may see one of the keys [first_key, last_key]: tiles [begin, end) of kRows, from
/// that of the first query that sees the first key to that of the last one that sees the last.
struct QueryTileRange {
  int begin, end;

  /// `shift`: from a query to its position.
  template <int kRows>
  static __device__ __forceinline__ QueryTileRange of(int first_key, int last_key, int shift,
                                                      int queries, int window) {
    QueryTileRange r = {max(0, first_key - shift) / kRows, (queries + kRows - 1) / kRows};
    if (window > 0) {
      const int last_row = last_key + window - 1 - shift;
      r.end = last_row < 0 ? 0 : min(r.end, last_row / kRows + 1);
    }
    return r;
  }
};

/// Two floats of shared memory, read where this stands and not kept: edge tiles are rare, and the
/// registers that they would take are missed by all tiles.
__device__ inline float2 read_pair(const float* p) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared_address(p)));
  return x;
}

/// One head's cumulative gates of a sequence.
class GateSums {
 public:
  __device__ GateSums(const TensorAttention& w, const Sequence& keys, int head)
      : sums_(w.gate_sums +
              (keys.batch * w.params.forward.heads + head) * w.params.forward.key_layout.time +
              keys.start),
        last_(keys.length - 1) {}
  __device__ GateSums(const double* sums, int length) : sums_(sums), last_(length - 1) {}

  /// The sum at a position, or at the nearest token there is.
  __device__ double at(int position) const {
    return last_ < 0 ? 0.0 : sums_[max(0, min(position, last_))];
  }

  __device__ const double* data() const { return sums_; }

  /// The first of the tokens [0, end) whose sum is not above `bound`: c falls. The first one if
  /// that is NaN. All lanes of the warp call it, and look at 32 places at once.
  __device__ int first_not_above(double bound, int end, int lane) const {
    return first_past([&](double sum) { return sum > bound; }, end, lane);
  }
  /// Differs from first_not_above where a sum or the bound is NaN: such a sum is passed. Where
  /// there is one, the last sum is NaN too, and none is left out.
  __device__ int first_known_not_above(double bound, int end, int lane) const {
    if (end > 0 && isnan(sums_[end - 1])) {
      return end;
    }
    return first_past([&](double sum) { return !(sum <= bound); }, end, lane);
  }

 private:
  template <class Passed>
  __device__ int first_past(const Passed& passed, int end, int lane) const {
    int low = 0, count = end;  // the answer lies in [low, low + count]
    while (count > 0) {
      const int step = (count + 31) / 32;
      const int place = low + (lane + 1) * step - 1;
      const int past =
          __popc(__ballot_sync(0xffffffffu, place < low + count && passed(sums_[place])));
      const int end_of_range = low + count;
      low += past * step;
      count = min(step - 1, end_of_range - low);
    }
    return low;
  }

  const double* sums_;
  int last_;
};

/// c relative to a reference, in units of log2, as two floats whose sum keeps the digits of a
/// difference of neighbours however far both are from the reference.
struct SplitGate {
  float high, low;

  __device__ static SplitGate of(double relative) {
    const double scaled = relative * 1.4426950408889634074;
    const float high = static_cast<float>(scaled);
    return {high, static_cast<float>(scaled - static_cast<double>(high))};
  }
};

// ---- The workspace ----
//
// How each path divides its workspace. A plan asks for the bytes, a launch for the pointers, both
// of the same constructor.

/// Hands out a workspace part by part, each from a multiple of 16 bytes on. Planning, there is none
/// yet: then the pointers mean nothing.
class WorkspaceParts {
 public:
  explicit WorkspaceParts(void* workspace) : begin_(reinterpret_cast<uintptr_t>(workspace)) {}

  template <class T>
  T* take(int64_t count) {
    T* const part = reinterpret_cast<T*>(begin_ + static_cast<uintptr_t>(bytes_));
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return part;
  }
  [[nodiscard]] int64_t bytes() const { return bytes_; }

 private:
  uintptr_t begin_;
  int64_t bytes_ = 0;
};

inline int64_t query_rows(const ForgettingAttentionParams& p) {
  return p.layout.batch * p.heads * p.layout.time;
}
inline int64_t key_rows(const ForgettingAttentionParams& p) {
  return p.key_layout.batch * p.heads * p.key_layout.time;
}

/// Bytes of work.score_bounds; see ScoreBounds. Zero for a pass that does not prune.
int64_t score_bounds_bytes(const ForgettingAttentionParams& params, bool of_queries);

/// The forward pass on tensor cores.
struct ForwardWorkspace {
  double* gate_sums;       // c, then the totals of its scan
  unsigned* score_bounds;  // where keys are pruned
  unsigned* next_item;     // of the Hopper kernel's blocks
  int64_t bytes;

  explicit ForwardWorkspace(const ForgettingAttentionParams& p) {
    WorkspaceParts parts(p.workspace);
    gate_sums = parts.take<double>(gate_sums_count(p));
    next_item = parts.take<unsigned>(1);
    score_bounds = parts.take<unsigned>(score_bounds_bytes(p, false) / 4);
    bytes = parts.bytes();
  }
};

/// The backward pass on tensor cores, with tiles of `tile_rows` queries whose dq sums have
/// `tile_columns` columns. `adds`: dq by additions, which a deterministic pass puts in order.
/// `clears_dq`: to sums that are cleared with the rest, rather than only those of long-range heads.
struct BackwardWorkspace {
  double* gate_sums;  // c, then the totals of its scan
  double* totals;     // of the gates' gradients: reuses gate_sums, as c is not read by then
  int* extent_ends;   // where keys are pruned
  float* delta_minus_dlse;
  float* column_sums;
  // What follows is cleared together: up to row_sums without additions, up to dq_sums without
  // clears_dq, else to the end.
  unsigned* score_bounds;
  unsigned* long_range;   // where keys are pruned
  int* is_long;           // where keys are pruned
  int* turns;             // where additions are ordered; see below
  float* row_sums;        // without additions, query_gradient_kernel writes all of them
  float* dq_sums;         // null without additions
  int64_t cleared_bytes;  // from score_bounds on
  int64_t bytes;

  BackwardWorkspace(const ForgettingAttentionParams& p, int tile_rows, int tile_columns, bool adds,
                    bool clears_dq) {
    const bool pruned = p.prune > 0;
    WorkspaceParts parts(p.workspace);
    gate_sums = parts.take<double>(gate_sums_count(p));
    totals = gate_sums;
    extent_ends =
        parts.take<int>(pruned ? time_tiles(p.key_layout, KeyExtents::kKeys).count * p.heads : 0);
    delta_minus_dlse = parts.take<float>(query_rows(p));
    column_sums = parts.take<float>(key_rows(p));
    const int64_t cleared = parts.bytes();
    score_bounds = parts.take<unsigned>(score_bounds_bytes(p, true) / 4);
    long_range = parts.take<unsigned>(pruned ? 2 : 0);
    is_long = parts.take<int>(pruned ? p.key_layout.sequences * p.heads : 0);
    cleared_bytes = parts.bytes() - cleared;
    const int64_t row_tiles = time_tiles(p.layout, tile_rows).count * p.heads;
    // How many blocks have taken a tile of keys; how many have added to each tile of queries.
    turns = adds && p.deterministic ? parts.take<int>(1 + row_tiles) : nullptr;
    row_sums = parts.take<float>(query_rows(p));
    dq_sums = nullptr;
    if (adds) {
      cleared_bytes = parts.bytes() - cleared;
      dq_sums = parts.take<float>(row_tiles * tile_rows * tile_columns);
    }
    if (adds && clears_dq) {
      cleared_bytes = parts.bytes() - cleared;
    }
    bytes = parts.bytes();
  }
};

/// The plain path; all parts are of doubles, or of at most their size.
struct PlainWorkspace {
  double* gate_sums;       // c, then the totals of its scan
  void* delta_minus_dlse;  // backward, [B, Hq, Tq] state type
  double* row_sums;
  double* column_sums;
  double* totals;  // of the scan of the gates' gradients
  int64_t bytes;

  PlainWorkspace(const ForgettingAttentionParams& p, bool backward) {
    WorkspaceParts parts(p.workspace);
    gate_sums = parts.take<double>(gate_sums_count(p));
    delta_minus_dlse = parts.take<double>(backward ? query_rows(p) : 0);
    row_sums = parts.take<double>(backward ? query_rows(p) : 0);
    column_sums = parts.take<double>(backward ? key_rows(p) : 0);
    totals = parts.take<double>(backward ? gate_totals_count(p) : 0);
    bytes = parts.bytes();
  }
};

}  // namespace tidegate::kernels::attention
