#pragma once

// The walk: how a block of threads takes a recurrence  s <- A_k s + X_k  along a sequence in one
// pass over memory.
//
//   A warp owns 32 * kVec adjacent channels (a row of its inputs is one contiguous access) and
//   kSteps consecutive steps, its run. The kWarps warps of a block own consecutive runs; together
//   they are a tile. In a cluster, consecutive blocks own consecutive tiles.
//
//   Inputs travel through a ring in shared memory, kStages runs deep, so that loads are always in
//   flight. A thread copies and reads only its own channels: the ring needs no barrier.
//
//   One round, for every warp:                                     other warps
//     fold    its run, from the ring, into one affine map (A, X)
//     post    the map                                              shared memory, barrier
//     carry   the state that enters its run: the maps before it, applied in order
//     apply   its steps to that state; write the outputs
//     fetch   the run kStages rounds ahead into the place that has become free
//
// Every warp computes the state that leaves the round by itself and in the same order, so the
// result does not depend on timing: it is bitwise reproducible.
//
// An Op supplies the mathematics (see hgru.cuh). It is a class over one thread's channels:
//   kVec, WalkShape                the shape of the walk
//   Number                         state of one channel, real or complex
//   Raw, Decoded                   one step's inputs in memory / what fold keeps for apply
//   Op(params, seq, lane)
//   initial(s)                     the state before the first step
//   gather(source, k, last)        step k's inputs from a source (rows.cuh); last: the last step
//   fold(raw, map) -> Decoded      map <- step o map
//   seal(map)                      after kSteps folds: what fold left out
//   apply(k, raw, decoded, s)      advance the state s by step k and write its outputs
//   finish(s)                      the state after the last step
//   reduce(row, scratch, ...)      partial sums over the steps seen, if the op has any

#include <cooperative_groups.h>

#include "kernels/scan/cuda/rows.cuh"
#include "kernels/scan/scan.h"

namespace tidegate::kernels {

constexpr int kWarpSize = 32;

/// How a walk is cut: steps a run, runs (warps) a tile, runs in flight a warp, and how many blocks
/// a multiprocessor should hold.
template <int kWarps_, int kSteps_, int kStages_, int kMinBlocks_>
struct WalkShape {
  static constexpr int kWarps = kWarps_;
  static constexpr int kSteps = kSteps_;
  static constexpr int kStages = kStages_;
  static constexpr int kMinBlocks = kMinBlocks_;
};

constexpr int kMaxSplits = 16;  // blocks of one cluster, or segments of a two-pass walk

/// The effect of a run of steps on the state: s -> a * s + x, a channel each.
template <class Number, int kVec>
struct AffineMap {
  Number a[kVec];
  Number x[kVec];

  __device__ static AffineMap identity() {
    AffineMap m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = one<Number>();
      m.x[v] = Number{};
    }
    return m;
  }

  __device__ void advance(Number (&s)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = fused(a[v], s[v], x[v]);
    }
  }

  /// This map after `earlier`.
  __device__ void append_to(AffineMap& earlier) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      earlier.x[v] = fused(a[v], earlier.x[v], x[v]);
      earlier.a[v] = a[v] * earlier.a[v];
    }
  }
};

/// Maps of several warps or blocks, a and x apart so that a warp's accesses have no bank conflicts.
template <class Number, int kVec, int kCount>
struct MapBoard {
  using Half = Pack<Number, kVec>;
  Half a[kCount][kWarpSize];
  Half x[kCount][kWarpSize];

  __device__ void post(int slot, int lane, const AffineMap<Number, kVec>& m) {
    a[slot][lane] = pack<Number, kVec>(m.a);
    x[slot][lane] = pack<Number, kVec>(m.x);
  }

  __device__ AffineMap<Number, kVec> read(int slot, int lane) const {
    const Half ha = a[slot][lane];
    const Half hx = x[slot][lane];
    AffineMap<Number, kVec> m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = ha.get(v);
      m.x[v] = hx.get(v);
    }
    return m;
  }
};

/// What the blocks of one launch do.
enum class WalkMode { kWhole, kCluster, kSegmentMap, kSegment };

/// Shared memory of a block. Two of each board: a round writes one while laggards read the other,
/// so a round needs one barrier.
template <class Op, bool kCluster>
struct WalkShared {
  MapBoard<typename Op::Number, Op::kVec, Op::kWarps> warps[2];
  MapBoard<typename Op::Number, Op::kVec, kCluster ? kMaxSplits : 1> blocks[2];
};

/// Exchanges the maps of one round. On entry `s` is the state before the round; on exit the state
/// after it. Returns through `mine` the state that enters this warp's run.
template <class Op, bool kCluster>
__device__ inline void carry_round(WalkShared<Op, kCluster>& shared, int parity, int warp, int lane,
                                   int rank, int splits,
                                   const AffineMap<typename Op::Number, Op::kVec>& map,
                                   typename Op::Number (&s)[Op::kVec],
                                   typename Op::Number (&mine)[Op::kVec]) {
  auto& warps = shared.warps[parity];
  warps.post(warp, lane, map);
  __syncthreads();
  if constexpr (kCluster) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    auto cluster = cooperative_groups::this_cluster();
    auto& blocks = shared.blocks[parity];
    if (warp < splits) {
      auto total = warps.read(0, lane);
#pragma unroll
      for (int w = 1; w < Op::kWarps; ++w) {
        warps.read(w, lane).append_to(total);
      }
      for (int r = warp; r < splits; r += Op::kWarps) {
        cluster.map_shared_rank(&blocks, r)->post(rank, lane, total);
      }
    }
    cluster.sync();
    for (int r = 0; r < rank; ++r) {
      blocks.read(r, lane).advance(s);
    }
#pragma unroll
    for (int v = 0; v < Op::kVec; ++v) {
      mine[v] = s[v];
    }
    for (int r = rank; r < splits; ++r) {
      blocks.read(r, lane).advance(s);
    }
    for (int w = 0; w < warp; ++w) {
      warps.read(w, lane).advance(mine);
    }
#endif
  } else {
#pragma unroll
    for (int w = 0; w < Op::kWarps; ++w) {
      if (w == warp) {
#pragma unroll
        for (int v = 0; v < Op::kVec; ++v) {
          mine[v] = s[v];
        }
      }
      warps.read(w, lane).advance(s);
    }
  }
}

/// The part of a sequence that a block walks, in steps: [begin, end).
struct Span {
  int begin, end;
};

/// A warp's ring of runs in shared memory.
template <class Op>
class Ring {
 public:
  static constexpr int kSlotBytes = sizeof(typename Op::Raw) * kWarpSize;
  static constexpr int kStageBytes = kSlotBytes * Op::kSteps * Op::kWarps;
  static constexpr int kBytes = kStageBytes * Op::kStages;

  __device__ Ring(char* shared, int warp, int lane)
      : base_(shared + warp * kSlotBytes * Op::kSteps), lane_(lane) {}

  /// Starts copying the run from step k into a stage. Steps past the end repeat the last one: that
  /// is memory which exists, and nothing that comes of it is used.
  __device__ void fetch(const Op& op, int stage, int k, int end, int length) const {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      op.gather(FetchSource{slot(stage, i), lane_}, min(k + i, end - 1), length - 1);
    }
  }

  __device__ typename Op::Raw take(const Op& op, int stage, int i) const {
    return op.gather(SlotSource{slot(stage, i), lane_}, 0, 0);
  }

 private:
  __device__ char* slot(int stage, int i) const {
    return base_ + stage * kStageBytes + i * kSlotBytes;
  }

  char* base_;
  int lane_;
};

/// Applies the run that begins at step k to the state that enters it. `s` becomes the state after
/// the run; where the run holds the sequence's last step, the final state is written.
template <class Op>
__device__ inline void apply_run(Op& op, const Ring<Op>& ring, int stage,
                                 const typename Op::Decoded (&decoded)[Op::kSteps], int k, int end,
                                 int length, typename Op::Number (&s)[Op::kVec]) {
  if (k + Op::kSteps <= end && k + Op::kSteps < length) {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      op.apply(k + i, ring.take(op, stage, i), decoded[i], s);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Op::kSteps; ++i) {
    if (k + i < end) {
      op.apply(k + i, ring.take(op, stage, i), decoded[i], s);
      if (k + i == length - 1) {
        op.finish(s);
      }
    }
  }
}

template <class Op, WalkMode kMode>
__device__ inline Span find_span(int length, int rank, int splits) {
  if constexpr (kMode == WalkMode::kWhole || kMode == WalkMode::kCluster) {
    return {0, length};
  } else {
    // Segments of whole tiles; the last ones may be empty.
    constexpr int kTile = Op::kWarps * Op::kSteps;
    const int tiles = (length - 1) / kTile + 1;
    const int segment_tiles = (tiles - 1) / splits + 1;
    const int begin = min(rank * segment_tiles, tiles) * kTile;
    const int end = min((rank + 1) * segment_tiles, tiles) * kTile;
    return {min(begin, length), min(end, length)};
  }
}

/// Maps of the segments of a two-pass walk, in device memory: [N, splits, D] of a, then of x.
template <class Op>
struct SegmentMaps {
  typename Op::Number* a;
  typename Op::Number* x;

  __device__ SegmentMaps(void* workspace, int64_t sequences, int splits, int64_t channels)
      : a(static_cast<typename Op::Number*>(workspace)), x(a + sequences * splits * channels) {}

  __device__ static int64_t at(int64_t n, int splits, int rank, const Lane& lane) {
    return (n * splits + rank) * lane.channels + lane.channel;
  }

  __device__ void write(int64_t n, int splits, int rank, const Lane& lane,
                        const AffineMap<typename Op::Number, Op::kVec>& m) const {
#pragma unroll
    for (int v = 0; v < Op::kVec; ++v) {
      a[at(n, splits, rank, lane) + v] = m.a[v];
      x[at(n, splits, rank, lane) + v] = m.x[v];
    }
  }

  __device__ void advance(int64_t n, int splits, int rank, const Lane& lane,
                          typename Op::Number (&s)[Op::kVec]) const {
#pragma unroll
    for (int v = 0; v < Op::kVec; ++v) {
      const int64_t i = at(n, splits, rank, lane) + v;
      s[v] = fused(a[i], s[v], x[i]);
    }
  }
};

struct WalkLaunch {
  int64_t channel_tiles;
  int splits;
  void* workspace;  // SegmentMaps of a two-pass walk
};

template <class Op, WalkMode kMode>
__global__ __launch_bounds__(Op::kWarps* kWarpSize, Op::kMinBlocks) void walk_kernel(
    const __grid_constant__ typename Op::Params params, const __grid_constant__ WalkLaunch launch) {
  constexpr bool kCluster = kMode == WalkMode::kCluster;
  constexpr int kTile = Op::kWarps * Op::kSteps;
  using Map = AffineMap<typename Op::Number, Op::kVec>;
  extern __shared__ __align__(16) char shared_memory[];
  auto& shared = *reinterpret_cast<WalkShared<Op, kCluster>*>(shared_memory);

  const int warp = threadIdx.x / kWarpSize;
  const int lane_index = threadIdx.x % kWarpSize;
  const int splits = launch.splits;
  const int rank = blockIdx.x % splits;
  const int64_t tile = blockIdx.x / splits % launch.channel_tiles;
  const int64_t n = blockIdx.x / splits / launch.channel_tiles;

  const Sequence seq = find_sequence(Op::layout(params), n);
  const Lane lane = find_lane<Op::kVec>(tile * kWarpSize + lane_index, Op::channels(params));
  const Span span = find_span<Op, kMode>(seq.length, rank, splits);
  Op op(params, seq, lane);

  typename Op::Number s[Op::kVec];
  op.initial(s);
  if constexpr (kMode == WalkMode::kSegment) {
    const SegmentMaps<Op> maps(launch.workspace, Op::layout(params).sequences, splits,
                               lane.channels);
    for (int r = 0; r < rank; ++r) {
      maps.advance(n, splits, r, lane, s);
    }
  }
  if constexpr (kCluster) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();  // nobody posts to a block that has not started
#endif
  }

  Map segment_map = Map::identity();
  const int round = kCluster ? splits * kTile : kTile;
  int k = span.begin + (kCluster ? rank * kTile : 0) + warp * Op::kSteps;
  const Ring<Op> ring(shared_memory + sizeof(shared), warp, lane_index);
  for (int stage = 0; stage < Op::kStages; ++stage) {
    if (span.begin + stage * round < span.end) {
      ring.fetch(op, stage, k + stage * round, span.end, seq.length);
    }
    commit_copies();
  }
  int parity = 0;
  int stage = 0;
  for (int base = span.begin; base < span.end; base += round, k += round, parity ^= 1) {
    wait_for_copies<Op::kStages - 1>();
    typename Op::Decoded decoded[Op::kSteps];
    Map map = Map::identity();
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      decoded[i] = op.fold(ring.take(op, stage, i), map);
    }
    op.seal(map);

    if constexpr (kMode == WalkMode::kSegmentMap) {
      shared.warps[parity].post(warp, lane_index, map);
      __syncthreads();
#pragma unroll
      for (int w = 0; w < Op::kWarps; ++w) {
        shared.warps[parity].read(w, lane_index).append_to(segment_map);
      }
    } else {
      typename Op::Number mine[Op::kVec];
      carry_round<Op, kCluster>(shared, parity, warp, lane_index, rank, splits, map, s, mine);
      apply_run(op, ring, stage, decoded, k, span.end, seq.length, mine);
    }

    if (base + Op::kStages * round < span.end) {
      ring.fetch(op, stage, k + Op::kStages * round, span.end, seq.length);
    }
    commit_copies();
    stage = stage + 1 == Op::kStages ? 0 : stage + 1;
  }

  if constexpr (kMode == WalkMode::kSegmentMap) {
    if (warp == 0) {
      SegmentMaps<Op>(launch.workspace, Op::layout(params).sequences, splits, lane.channels)
          .write(n, splits, rank, lane, segment_map);
    }
  } else {
    if (seq.length == 0 && rank == 0 && warp == 0) {
      op.finish(s);
    }
    __syncthreads();  // the boards become scratch
    op.reduce(n * splits + rank, &shared, warp, lane_index);
  }
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
    for (int k = 0; k <= last; ++k) {
      const typename Op::Raw next = op.gather(DirectSource{}, min(k + 1, last), last);
      auto unused = AffineMap<typename Op::Number, Op::kVec>::identity();
      op.apply(k, raw, op.fold(raw, unused), s);
      raw = next;
    }
  }
  op.finish(s);
  op.reduce_alone(n);
}

}  // namespace tidegate::kernels
