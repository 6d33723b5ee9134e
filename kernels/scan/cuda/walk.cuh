#pragma once

// The walk: how a block of threads takes a recurrence  s <- A_k s + X_k  along a sequence in one
// pass over memory.
//
//   A warp owns 32 * kVec adjacent channels (a row of its inputs is one contiguous access) and
//   kSteps consecutive steps, its run. The warps of a block own consecutive runs; together they are
//   a tile. In a cluster, consecutive blocks own consecutive tiles.
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
//
// The carry is a chain: only taking, advancing and passing on are serial, a few instructions a
// step, while decoding and emitting overlap freely among the warps. No barrier stops a whole block,
// and every state is computed from the one before by the same operations as a step of decoding.
//
// Where time is split among blocks, a hop from block to block costs more than that chain can bear.
// There every warp first folds its run into an affine map, so that a state can cross a whole tile
// (carry_through_cluster) or a whole segment (SegmentMaps) at once. Either way the operations and
// their order do not depend on timing: results are bitwise reproducible.
//
// An Op supplies the mathematics (see hgru.cuh). It is a class over one thread's channels:
//   kVec; kSteps, kStages          channels a thread; WalkShape
//   kCrossByMap                    whether a state crosses a run by its map or step by step
//   Number                         state of one channel, real or complex
//   Raw, Decoded                   one step's inputs in memory / prepared
//   Op(params, seq, lane)
//   initial(s)                     the state before the first step
//   gather(source, k, last)        step k's inputs from a source (rows.cuh); last: the last step
//   decode(raw) -> Decoded
//   advance(raw, decoded, s, kept) the state s through one step; kept[kVec]: what emit needs of it
//   emit<kLast>(k, raw, decoded, kept)   write step k's outputs; kLast: k may be the last step
//   finish(s)                      the state after the last step
//   fold(raw, decoded, map)        map <- step o map, but for what seal does
//   seal(map)                      after kSteps folds: what fold left out
//   reduce(row, scratch, ...)      partial sums over the steps seen, if the op has any

#include <cooperative_groups.h>

#include "kernels/common/cuda/mbarrier.cuh"
#include "kernels/common/cuda/precise.cuh"
#include "kernels/scan/cuda/rows.cuh"
#include "kernels/scan/scan.h"

namespace tidegate::kernels {

constexpr int kWarpSize = 32;

constexpr int kMaxWarps = 16;  // of one block

/// How a walk is cut: steps a run, and runs in flight a warp.
template <int kSteps_, int kStages_>
struct WalkShape {
  static constexpr int kSteps = kSteps_;
  static constexpr int kStages = kStages_;
};

constexpr int kMaxSplits = 16;  // blocks of one cluster, or segments of a two-pass walk

/// What the blocks of one launch do.
enum class WalkMode { kWhole, kCluster, kSegmentMap, kSegment };

/// The effect of a run of steps on the state: s -> a * s + x, a channel each.
template <class Number, int kVec>
struct AffineMap {
  Precise<Number> a[kVec];
  Number x[kVec];

  __device__ static AffineMap identity() {
    AffineMap m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = as_precise(one<Number>());
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
      earlier.a[v] = multiply(a[v], earlier.a[v]);
    }
  }
};

/// Maps of several warps, their parts apart so that a warp's accesses have no bank conflicts.
template <class Number, int kVec, int kCount>
struct MapBoard {
  using Part = Pack<Number, kVec>;
  Part hi[kCount][kWarpSize];
  Part lo[kCount][kWarpSize];
  Part x[kCount][kWarpSize];

  __device__ void post(int slot, int lane, const AffineMap<Number, kVec>& m) {
    Number his[kVec], los[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      his[v] = m.a[v].hi;
      los[v] = m.a[v].lo;
    }
    hi[slot][lane] = pack<Number, kVec>(his);
    lo[slot][lane] = pack<Number, kVec>(los);
    x[slot][lane] = pack<Number, kVec>(m.x);
  }

  __device__ AffineMap<Number, kVec> read(int slot, int lane) const {
    const Part h = hi[slot][lane];
    const Part l = lo[slot][lane];
    const Part p = x[slot][lane];
    AffineMap<Number, kVec> m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = {h.get(v), l.get(v)};
      m.x[v] = p.get(v);
    }
    return m;
  }
};

template <class Number, int kVec>
__device__ inline void copy_state(Number (&to)[kVec], const Number (&from)[kVec]) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    to[v] = from[v];
  }
}

/// One state, a warp wide.
template <class Number, int kVec>
struct StateBoard {
  Pack<Number, kVec> state[kWarpSize];

  __device__ void post(int lane, const Number (&s)[kVec]) { state[lane] = pack<Number, kVec>(s); }
  /// Writes the same board of another block of the cluster, where `came` counts the bytes.
  __device__ void send(int lane, const Number (&s)[kVec], uint64_t* came, int rank) {
    store_remote(&state[lane].bits, pack<Number, kVec>(s).bits, came, rank);
  }
  __device__ void read(int lane, Number (&s)[kVec]) const {
    const Pack<Number, kVec> p = state[lane];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = p.get(v);
    }
  }
};

/// Shared memory of a block, besides its rings: what the warps tell each other, by the mode.
template <class Op, WalkMode kMode>
struct WalkShared {
  StateBoard<typename Op::Number, Op::kVec> mail[kMaxWarps];  // the state that enters a warp's run
  uint64_t mail_came[kMaxWarps];
};

template <class Op>
struct WalkShared<Op, WalkMode::kSegmentMap> {
  MapBoard<typename Op::Number, Op::kVec, kMaxWarps> mail;  // the map of all before a warp's run
  uint64_t mail_came[kMaxWarps];
};

/// Two of each board: a round writes one while laggards still read the other.
template <class Op>
struct WalkShared<Op, WalkMode::kCluster> {
  MapBoard<typename Op::Number, Op::kVec, kMaxWarps> runs[2];  // maps of this block's runs
  StateBoard<typename Op::Number, Op::kVec> mail[2];           // the state that enters its tile
  uint64_t runs_came[2];
  uint64_t mail_came[2];
};

/// A warp's place in its block and cluster.
struct Place {
  int warp, warps;
  int lane;
  int rank, splits;
};

template <class Op, WalkMode kMode>
__device__ inline void init_shared(WalkShared<Op, kMode>& shared, const Place& at) {
  if constexpr (kMode == WalkMode::kCluster) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (threadIdx.x < 2) {
      mbarrier_init(&shared.runs_came[threadIdx.x], at.warps * kWarpSize);
      mbarrier_init(&shared.mail_came[threadIdx.x], 1);
      mbarrier_fence_init();
    }
    cooperative_groups::this_cluster().sync();
#endif
  } else {
    if (at.lane == 0) {
      mbarrier_init(&shared.mail_came[at.warp], kWarpSize);
    }
    __syncthreads();
  }
}

/// The chain of warps, the last one linked to the first one's next round. Waiting for the mail of a
/// round also proves that the box it came in was emptied a round ago, since the chain went through
/// its owner: no barrier is needed for that.
template <class Op, WalkMode kMode>
struct Chain {
  using Number = typename Op::Number;
  using Map = AffineMap<Number, Op::kVec>;
  WalkShared<Op, kMode>& shared;
  const Place& at;

  /// False for the first run of all, whose mail is what the walk begins with.
  __device__ bool wait(int round) const {
    const bool expected = round > 0 || at.warp > 0;
    if (expected) {
      // The first warp's mail comes from the round before.
      mbarrier_wait(&shared.mail_came[at.warp], (at.warp == 0 ? round - 1 : round) & 1);
    }
    return expected;
  }
  __device__ void notify(int receiver) const { mbarrier_arrive(&shared.mail_came[receiver]); }
  __device__ int next() const { return at.warp + 1 == at.warps ? 0 : at.warp + 1; }

  __device__ void take_state(int round, Number (&s)[Op::kVec]) const {
    if (wait(round)) {
      shared.mail[at.warp].read(at.lane, s);
    }
  }
  __device__ void pass_state(const Number (&s)[Op::kVec]) const {
    shared.mail[next()].post(at.lane, s);
    notify(next());
  }

  /// `total` becomes the map of everything up to and with this run.
  __device__ void carry_map(int round, const Map& map, Map& total) const {
    if (wait(round)) {
      total = shared.mail.read(at.warp, at.lane);
    }
    map.append_to(total);
    shared.mail.post(next(), at.lane, total);
    notify(next());
  }
};

/// The round of a cluster. The warps of a block post the maps of their runs, and the last one, who
/// finds the map of the whole tile, takes the state that enters the tile from the block before and
/// sends on what leaves it: one hop through the cluster's shared memory a tile. The last block is
/// linked to the first one's next round; `more` says whether there is one. The others take the
/// state through the runs before theirs. On entry `s` is the sequence's initial state, used by the
/// first tile of all; on exit it is the state that enters this warp's run.
///
/// A board is written again two rounds later. By then the maps of the round between have come, to
/// which every warp contributed after it had read: no barrier is needed for that.
template <class Op>
__device__ inline void carry_through_cluster(WalkShared<Op, WalkMode::kCluster>& shared,
                                             const Place& at, int round, bool more,
                                             const AffineMap<typename Op::Number, Op::kVec>& map,
                                             typename Op::Number (&s)[Op::kVec]) {
  using Map = AffineMap<typename Op::Number, Op::kVec>;
  using Mail = StateBoard<typename Op::Number, Op::kVec>;
  auto& runs = shared.runs[round & 1];
  uint64_t* runs_came = &shared.runs_came[round & 1];
  uint64_t* mail_came = &shared.mail_came[round & 1];
  const int parity = (round >> 1) & 1;
  const bool first = round == 0 && at.rank == 0;

  runs.post(at.warp, at.lane, map);
  mbarrier_arrive(runs_came);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expecting(mail_came, first ? 0 : int{sizeof(Mail)});
  }
  mbarrier_wait(runs_came, parity);
  const bool sender = at.warp == at.warps - 1;
  Map total = map;
  if (sender) {  // while the state is on its way
    total = runs.read(0, at.lane);
#pragma unroll 4
    for (int w = 1; w < at.warps; ++w) {
      runs.read(w, at.lane).append_to(total);
    }
  }

  mbarrier_wait(mail_came, parity);
  if (!first) {
    shared.mail[round & 1].read(at.lane, s);
  }
  if (sender) {
    const int next = at.rank + 1 == at.splits ? 0 : at.rank + 1;
    const int next_round = next == 0 ? round + 1 : round;
    if (next > 0 || more) {
      typename Op::Number leaving[Op::kVec];
      copy_state(leaving, s);
      total.advance(leaving);
      shared.mail[next_round & 1].send(at.lane, leaving, &shared.mail_came[next_round & 1], next);
    }
  }
#pragma unroll 4
  for (int w = 0; w < at.warp; ++w) {
    runs.read(w, at.lane).advance(s);
  }
}

/// A warp's ring of runs in shared memory.
template <class Op>
class Ring {
 public:
  static constexpr int kSlotBytes = sizeof(typename Op::Raw) * kWarpSize;
  static constexpr int kStageBytes = kSlotBytes * Op::kSteps;
  static constexpr int kBytes = kStageBytes * Op::kStages;

  // All inputs must be packs of four bytes, a row of which is 128 bytes, for wide copies.
  using Wide = WideFetchSource<4>;
  static constexpr bool kCanBeWide = Op::kPackBytes == 4 && Op::kSteps % Wide::kStepsAtOnce == 0;

  __device__ Ring(char* shared, int warp, int lane, bool wide)
      : base_(shared + warp * kBytes), lane_(lane), wide_(wide) {}

  /// Starts copying the run from step k into a stage. Steps past the end repeat the last one: that
  /// is memory which exists, and nothing that comes of it is used.
  __device__ void fetch(const Op& op, int stage, int k, int end, int length) const {
    if constexpr (kCanBeWide) {
      if (wide_) {
        __syncwarp();  // the place is free only when all threads have taken what they need from it
#pragma unroll
        for (int first = 0; first < Op::kSteps; first += Wide::kStepsAtOnce) {
          const int i = first + lane_ / Wide::kThreadsARow;
          op.gather(Wide{slot(stage, i), lane_}, min(k + i, end - 1), length - 1);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      op.gather(FetchSource{slot(stage, i), lane_}, min(k + i, end - 1), length - 1);
    }
  }

  /// Waits until the oldest run under way has come. Every fetch, or its absence, is followed by
  /// commit_copies, so that groups count runs.
  __device__ void wait() const {
    wait_for_copies<Op::kStages - 1>();
    __syncwarp();
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
  bool wide_;
};

/// A run between the ring and the outputs.
template <class Op>
struct Run {
  using Number = typename Op::Number;
  typename Op::Decoded decoded[Op::kSteps];
  Number kept[Op::kSteps][Op::kVec];

  __device__ void decode(const Op& op, const Ring<Op>& ring, int stage) {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      decoded[i] = op.decode(ring.take(op, stage, i));
    }
  }

  __device__ void fold(const Op& op, const Ring<Op>& ring, int stage,
                       AffineMap<Number, Op::kVec>& map) const {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      op.fold(ring.take(op, stage, i), decoded[i], map);
    }
    op.seal(map);
  }

  /// Takes s through the run that begins at step k; where it holds the sequence's last step, writes
  /// the final state.
  __device__ void advance(const Op& op, const Ring<Op>& ring, int stage, int k, int end, int length,
                          Number (&s)[Op::kVec]) {
    if (k + Op::kSteps <= end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        op.advance(ring.take(op, stage, i), decoded[i], s, kept[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          op.advance(ring.take(op, stage, i), decoded[i], s, kept[i]);
        }
      }
    }
    if (k < length && length <= k + Op::kSteps) {
      op.finish(s);
    }
  }

  __device__ void emit(Op& op, const Ring<Op>& ring, int stage, int k, int end, int length) const {
    if (k + Op::kSteps <= end && k + Op::kSteps < length) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        op.template emit<false>(k + i, ring.take(op, stage, i), decoded[i], kept[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          op.template emit<true>(k + i, ring.take(op, stage, i), decoded[i], kept[i]);
        }
      }
    }
  }
};

/// The part of a sequence that a block walks, in steps: [begin, end).
struct Span {
  int begin, end;
};

template <class Op, WalkMode kMode>
__device__ inline Span find_span(int length, const Place& at) {
  if constexpr (kMode == WalkMode::kWhole || kMode == WalkMode::kCluster) {
    return {0, length};
  } else {
    // Segments of whole tiles; the last ones may be empty.
    const int tile = at.warps * Op::kSteps;
    const int tiles = (length - 1) / tile + 1;
    const int segment_tiles = (tiles - 1) / at.splits + 1;
    const int begin = min(at.rank * segment_tiles, tiles) * tile;
    const int end = min((at.rank + 1) * segment_tiles, tiles) * tile;
    return {min(begin, length), min(end, length)};
  }
}

/// Maps of the segments of a two-pass walk, in device memory: [N, splits, D] of hi, of lo, of x.
template <class Op>
struct SegmentMaps {
  using Number = typename Op::Number;
  static constexpr int kPlanes = 3;
  Number* planes;
  int64_t plane;  // elements

  __device__ SegmentMaps(void* workspace, int64_t sequences, int splits, int64_t channels)
      : planes(static_cast<Number*>(workspace)), plane(sequences * splits * channels) {}

  __device__ static int64_t at(int64_t n, int splits, int rank, const Lane& lane) {
    return (n * splits + rank) * lane.channels + lane.channel;
  }

  __device__ void write(int64_t n, int splits, int rank, const Lane& lane,
                        const AffineMap<Number, Op::kVec>& m) const {
#pragma unroll
    for (int v = 0; v < Op::kVec; ++v) {
      Number* p = planes + at(n, splits, rank, lane) + v;
      p[0] = m.a[v].hi;
      p[plane] = m.a[v].lo;
      p[2 * plane] = m.x[v];
    }
  }

  __device__ void advance(int64_t n, int splits, int rank, const Lane& lane,
                          Number (&s)[Op::kVec]) const {
#pragma unroll
    for (int v = 0; v < Op::kVec; ++v) {
      const Number* p = planes + at(n, splits, rank, lane) + v;
      s[v] = fused(Precise<Number>{p[0], p[plane]}, s[v], p[2 * plane]);
    }
  }
};

struct WalkLaunch {
  int64_t channel_tiles;
  int splits;
  bool wide_rows;   // all rows of a channel tile are whole and aligned to 16 bytes
  void* workspace;  // SegmentMaps of a two-pass walk
};

template <class Op, WalkMode kMode>
__global__ __launch_bounds__(kMaxWarps* kWarpSize,
                             1) void walk_kernel(const __grid_constant__ typename Op::Params params,
                                                 const __grid_constant__ WalkLaunch launch) {
  constexpr bool kCluster = kMode == WalkMode::kCluster;
  using Map = AffineMap<typename Op::Number, Op::kVec>;
  extern __shared__ __align__(16) char shared_memory[];
  auto& shared = *reinterpret_cast<WalkShared<Op, kMode>*>(shared_memory);

  const int splits = launch.splits;
  const Place at = {
      static_cast<int>(threadIdx.x) / kWarpSize, static_cast<int>(blockDim.x) / kWarpSize,
      static_cast<int>(threadIdx.x) % kWarpSize, static_cast<int>(blockIdx.x) % splits, splits};
  const int64_t tile = blockIdx.x / splits % launch.channel_tiles;
  const int64_t n = blockIdx.x / splits / launch.channel_tiles;

  const Sequence seq = find_sequence(Op::layout(params), n);
  const Lane lane = find_lane<Op::kVec>(tile * kWarpSize + at.lane, Op::channels(params));
  const Span span = find_span<Op, kMode>(seq.length, at);
  const SegmentMaps<Op> maps(launch.workspace, Op::layout(params).sequences, splits, lane.channels);
  Op op(params, seq, lane);

  init_shared<Op, kMode>(shared, at);
  typename Op::Number s[Op::kVec];
  op.initial(s);
  if constexpr (kMode == WalkMode::kSegment) {
    for (int r = 0; r < at.rank; ++r) {
      maps.advance(n, splits, r, lane, s);
    }
  }
  Map total = Map::identity();

  const int stride = (kCluster ? splits : 1) * at.warps * Op::kSteps;  // steps a round
  int k = span.begin + ((kCluster ? at.rank * at.warps : 0) + at.warp) * Op::kSteps;
  const Ring<Op> ring(shared_memory + sizeof(shared), at.warp, at.lane, launch.wide_rows);
  for (int stage = 0; stage < Op::kStages; ++stage) {
    if (span.begin + stage * stride < span.end) {
      ring.fetch(op, stage, k + stage * stride, span.end, seq.length);
    }
    commit_copies();
  }
  int stage = 0;
  int round = 0;
  for (int base = span.begin; base < span.end; base += stride, k += stride, ++round) {
    ring.wait();
    Run<Op> run;
    run.decode(op, ring, stage);
    Map map = Map::identity();
    if constexpr (kMode == WalkMode::kSegmentMap) {
      run.fold(op, ring, stage, map);
      Chain<Op, kMode>{shared, at}.carry_map(round, map, total);
    } else if constexpr (kCluster) {
      run.fold(op, ring, stage, map);
      carry_through_cluster<Op>(shared, at, round, base + stride < span.end, map, s);
      run.advance(op, ring, stage, k, span.end, seq.length, s);
      run.emit(op, ring, stage, k, span.end, seq.length);
    } else {
      const Chain<Op, kMode> chain{shared, at};
      if constexpr (Op::kCrossByMap) {
        run.fold(op, ring, stage, map);
        chain.take_state(round, s);
        typename Op::Number leaving[Op::kVec];
        copy_state(leaving, s);
        map.advance(leaving);
        chain.pass_state(leaving);
        run.advance(op, ring, stage, k, span.end, seq.length, s);
      } else {
        chain.take_state(round, s);
        run.advance(op, ring, stage, k, span.end, seq.length, s);
        chain.pass_state(s);
      }
      run.emit(op, ring, stage, k, span.end, seq.length);
    }

    if (base + Op::kStages * stride < span.end) {
      ring.fetch(op, stage, k + Op::kStages * stride, span.end, seq.length);
    }
    commit_copies();
    stage = stage + 1 == Op::kStages ? 0 : stage + 1;
  }

  if constexpr (kMode == WalkMode::kSegmentMap) {
    if (at.warp == at.warps - 1) {
      maps.write(n, splits, at.rank, lane, total);
    }
  } else {
    if (seq.length == 0 && at.rank == 0 && at.warp == 0) {
      op.finish(s);
    }
    __syncthreads();  // the boards become scratch
    op.reduce(n * splits + at.rank, &shared, at.warp, at.warps, at.lane);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kCluster) {
    cooperative_groups::this_cluster().sync();  // nobody leaves while others may write to it
  }
#endif
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
      const typename Op::Decoded decoded = op.decode(raw);
      typename Op::Number kept[Op::kVec];
      op.advance(raw, decoded, s, kept);
      op.template emit<true>(k, raw, decoded, kept);
      raw = next;
    }
  }
  op.finish(s);
  op.reduce_alone(n);
}

}  // namespace tidegate::kernels
