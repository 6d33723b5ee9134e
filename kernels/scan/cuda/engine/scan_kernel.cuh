#pragma once

// The scan kernel: how a block of threads takes a recurrence  s <- A_k s + X_k  along a sequence in
// one pass over memory.
//
//   A warp owns 32 * kVec adjacent channels (a row of its inputs is one contiguous access) and
//   kSteps consecutive steps, its chunk. The warps of a warp group (a block, or half of one) own
//   consecutive chunks; together they are the group's tile of time. Where blocks share a sequence,
//   consecutive warp groups own consecutive tiles.
//
//   Inputs travel through a warp's ring in shared memory, kStages chunks deep, so that loads are
//   always in flight. Rings are private to their warps and need no barrier beyond __syncwarp.
//
//   One iteration of a compute warp whose loop is not pipelined (scan_chunks, chunk_loops.cuh):
//     decode   its chunk, from the ring
//     carry    receive the state that enters its chunk from the warp before
//     advance  the state through the chunk; send on what leaves it
//     emit     the outputs of the chunk's steps
//     fetch    the chunk kStages iterations later into the stage that has become free
//              (right after decode already, with Op::kInputsInRegisters)
//
//   One iteration of a software-pipelined compute warp (multi-block, Op::kPipelining not kNone):
//     decode   its next chunk; compose its map and publish it
//     receive  the state that enters the tile of its present chunk, and take it to the chunk
//     advance  through the present chunk, and emit each step at once
//     fetch    into the stage that has become free (kStagingBuffer: already after decode)
//
// Only receiving, advancing and sending are serial, a few instructions a step, while decode and
// emit overlap freely among the warps. The barriers are the carry's. A single-block scan has one a
// warp (carry.cuh), and computes every state from the one before by the operations of a step of
// generation (hgru_step). In a multi-block scan (multi_block.cuh) a warp group has maps_ready and
// carry_ready, both twice where pipelined, and one carry_ready for each compute warp where these
// are handed states of their own instead of prefix maps. There, and for an Op whose steps are
// expensive (kCarryByMap), every warp first composes its chunk to an affine map, by which a state
// crosses it at once. Either way the operations and their order do not depend on timing: results
// are bitwise reproducible.
//
// The mathematics is an Op's (op.cuh).

#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/scan/cuda/engine/chunk_loops.cuh"
#include "kernels/scan/cuda/engine/op.cuh"
#include "kernels/scan/scan.h"

namespace tidegate::kernels::scan {

struct ScanLaunch {
  int64_t channel_tiles = 0;  // of a sequence; where tails are shared, whole ones
  int blocks_per_sequence = 1;
  int carry_group = 1;            // warp groups that a state crosses at once
  bool wide_rows = false;         // all rows of all channel tiles are aligned to 16 bytes
  int8_t sharing = 0;             // 2^sharing sequences share their tails (shared_tails.h)
  void* carry_records = nullptr;  // of all warp groups (CarryWorkspace)
};

/// Warp groups and threads of a block, at most.
template <class Op, ScanMode kMode>
struct BlockBounds {
  static constexpr bool kMultiBlock = kMode == ScanMode::kMultiBlock;
  static constexpr int kWarpGroups = kMultiBlock ? WarpGroupShape<Op>::kWarpGroups : 1;
  static constexpr int kThreads =
      (kMultiBlock ? kWarpGroups * (WarpGroupShape<Op>::kComputeWarps + 1) : kMaxWarps) * kWarpSize;
};

/// A block's shared memory: first what the warp groups carry through, then what their warps prepare
/// together, then the compute warps' rings and staging buffers.
template <class Op, ScanMode kMode>
struct SharedLayout {
  using Shared = ScanShared<Op, kMode>;
  static constexpr int kWarpGroups = BlockBounds<Op, kMode>::kWarpGroups;
  static constexpr int kPrepared = kWarpGroups * static_cast<int>(sizeof(Shared));
  static constexpr int kRings = kPrepared + kWarpGroups * Op::kPreparedBytes;

  static __host__ __device__ constexpr int staging(int warps) {
    return kRings + kWarpGroups * warps * RingOf<Op>::kBytes;
  }
  /// All bytes, where a warp group has this many compute warps.
  static __host__ __device__ constexpr int bytes(int warps) {
    return staging(warps) + kWarpGroups * warps * staging_bytes<Op>();
  }
};

/// Where a warp is among those that share its sequence. The warp groups of a block lie far apart in
/// time, so that one waits while the other works.
template <class Op, ScanMode kMode>
__device__ __forceinline__ WarpPosition find_position(const ScanLaunch& launch, int* warp_group) {
  constexpr bool kMultiBlock = kMode == ScanMode::kMultiBlock;
  constexpr int kWarpGroups = BlockBounds<Op, kMode>::kWarpGroups;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int group_warps = static_cast<int>(blockDim.x) / (kWarpSize * kWarpGroups);
  *warp_group = kWarpGroups > 1 ? warp / group_warps : 0;
  const int blocks = kMultiBlock ? launch.blocks_per_sequence : 1;
  WarpPosition at = {.warp = warp - *warp_group * group_warps,
                     .warps = group_warps - (kMultiBlock ? 1 : 0),
                     .lane = static_cast<int>(threadIdx.x) % kWarpSize,
                     .rank = *warp_group * blocks + static_cast<int>(blockIdx.x) % blocks,
                     .warp_groups = blocks * kWarpGroups};
  if constexpr (kMultiBlock) {
    at.keep_in_registers();
  }
  return at;
}

/// Starts the copies of the first chunks on their way, then does all that takes a while: what the
/// Op prepares, and the barriers. Where warps prepare together, only their first chunks start
/// before that and the others afterwards: what is asked for comes in that order, and behind three
/// chunks of 16 warps the parameters would come late.
template <class Op, class Shared, class FetchStages>
__device__ __forceinline__ void start_and_prepare(Op& op, Shared& shared, const WarpPosition& at,
                                                  [[maybe_unused]] char* prepared,
                                                  [[maybe_unused]] bool computes,
                                                  const FetchStages& fetch_stages) {
  if constexpr (Op::kPreparedBytes > 0) {
    const auto given = op.given(at);
    fetch_stages(0, 1);
    shared.init(at);
    __syncthreads();  // no second chunk before every first one, for which the chain would wait
    op.prepare(prepared, at, given);
    fetch_stages(1, Op::kStages);
  } else {
    fetch_stages(0, Op::kStages);
    shared.init(at);
  }
  shared.prepare(op, at);
  __syncthreads();
  if constexpr (Op::kPreparedBytes > 0) {
    if (computes) {
      op.take_prepared(prepared, at.lane);
    }
  } else if constexpr (requires { op.prepare(); }) {
    op.prepare();
  }
}

/// A compute warp's part: all its chunks, by the loop for this Op's way of pipelining. `staging`:
/// the warp's place among the staging buffers.
template <class Op, ScanMode kMode>
__device__ __forceinline__ void scan_sequence(Op& op, const RingOf<Op>& ring,
                                              ScanShared<Op, kMode>& shared, const WarpPosition& at,
                                              [[maybe_unused]] char* staging, int k, int end,
                                              int stride, typename Op::Number (&s)[Op::kVec]) {
  constexpr bool kMultiBlock = kMode == ScanMode::kMultiBlock;
  if constexpr (kMultiBlock && Op::kPipelining == Pipelining::kStagingBuffer) {
    scan_with_staging_buffer(op, ring, StagingBuffer<Op>(staging, at.lane), shared, at, k, end,
                             stride);
  } else if constexpr (kMultiBlock && Op::kPipelining == Pipelining::kSplitRing) {
    scan_with_split_ring(op, ring, shared, at, k, end, stride);
  } else if constexpr (kMultiBlock && Op::kPipelining == Pipelining::kOwnChunk) {
    scan_with_own_chunks(op, ring, shared, at, k, end, stride, s);
  } else {
    scan_chunks<kMode>(op, ring, shared, at, k, end, stride, s);
  }
}

/// Which channel tile of which sequence a block scans.
struct AlignedChain {
  int64_t tile, sequence;
  static constexpr int sharing = 0;

  __device__ AlignedChain(int64_t chain, const ScanLaunch& launch)
      : tile(chain % launch.channel_tiles), sequence(chain / launch.channel_tiles) {}
  __device__ int64_t sequence_of(int, const SequenceLayout&) const { return sequence; }
  template <int kVec>
  __device__ Channels channels_of(int lane, int64_t channels) const {
    return find_channels<kVec>(tile, lane, channels);
  }
};
template <class Op>
using ChainOf = std::conditional_t<kIsUnaligned<typename Op::Data>, UnalignedChain, AlignedChain>;

/// A block scans one channel tile of one sequence, or its part of one: fill the rings, prepare,
/// scan or carry, reduce. (Where tails are shared, shared_tails.h, a tile of several sequences of
/// one length.)
template <class Op, ScanMode kMode>
__global__ __launch_bounds__(BlockBounds<Op, kMode>::kThreads,
                             1) void scan_kernel(const __grid_constant__ typename Op::Params params,
                                                 const __grid_constant__ ScanLaunch launch) {
  constexpr bool kMultiBlock = kMode == ScanMode::kMultiBlock;
  using Layout = SharedLayout<Op, kMode>;
  extern __shared__ __align__(16) char shared_memory[];

  int warp_group;
  const WarpPosition at = find_position<Op, kMode>(launch, &warp_group);
  const int64_t chain = blockIdx.x / (kMultiBlock ? launch.blocks_per_sequence : 1);
  auto& shared = reinterpret_cast<ScanShared<Op, kMode>*>(shared_memory)[warp_group];
  const ChainOf<Op> place(chain, launch);
  const int64_t n = place.sequence_of(at.lane, recurrence_params(params).layout);
  const Sequence seq = find_sequence(recurrence_params(params).layout, n);
  const Channels channels =
      place.template channels_of<Op::kVec>(at.lane, recurrence_params(params).channels);
  const int end = seq.length;
  Op op(params, seq, channels);

  const int stride = at.warp_groups * at.warps * Op::kSteps;  // steps of an iteration
  const bool computes = !kMultiBlock || at.warp < at.warps;   // else it is the carry warp
  const int k = (at.rank * at.warps + at.warp) * Op::kSteps;  // where the first chunk begins
  const int index = warp_group * at.warps + at.warp;          // among the block's compute warps
  const RingOf<Op> ring(shared_memory + Layout::kRings, index, at.lane, launch.wide_rows,
                        place.sharing);
  char* const prepared = shared_memory + Layout::kPrepared + warp_group * Op::kPreparedBytes;
  const auto fetch_stages = [&](int from, int to) {
    for (int stage = from; computes && stage < to; ++stage) {
      if constexpr (Op::kPipelining == Pipelining::kSplitRing) {
        ring.fetch(op, stage, k + stage * stride, end, stride);
      } else if (stage * stride < end) {
        ring.fetch(op, stage, k + stage * stride, end);
      }
      commit_copies();
    }
  };
  start_and_prepare(op, shared, at, prepared, computes, fetch_stages);
  typename Op::Number s[Op::kVec];
  op.initial(s);

  // The final state of an empty sequence is written inside the branch and not after it, so that s
  // is not live across carry() and across the multi-block loops, which need the registers.
  if (computes) {
    char* const staging = shared_memory + Layout::staging(at.warps) + index * staging_bytes<Op>();
    scan_sequence<Op, kMode>(op, ring, shared, at, staging, k, end, stride, s);
    if (end == 0 && at.rank == 0 && at.warp == 0) {
      op.store_final_state(s);
    }
  } else if constexpr (kMultiBlock) {
    auto* records = static_cast<CarryRecords<Op>*>(launch.carry_records) + chain * at.warp_groups;
    const int iterations = (end - 1) / stride + (end > 0 ? 1 : 0);
    CarryWarp<Op>{shared, records, at, launch.carry_group}.carry(iterations, s, op);
  }

  __syncthreads();  // the shared-memory carry, a pack or more for every thread, becomes scratch
  // A carry warp takes part in the reduction, with sums of zero.
  op.reduce(n * at.warp_groups + at.rank, &shared, at.warp, at.warps + (kMultiBlock ? 1 : 0),
            at.lane);
}

/// The sequential scan: one thread a channel, one step at a time, in any type. It takes what the
/// kernel above does not: double precision, and sequences of a step or two, where there is nothing
/// to divide. Reads its state before writing any, so that a step may update it in place.
template <class Op>
__global__ void sequential_scan_kernel(const __grid_constant__ typename Op::Params params,
                                       const __grid_constant__ ScanLaunch launch) {
  // A step of decoding stands between two other kernels, and each of the three begins early.
  let_next_kernel_begin();
  wait_for_kernels_before();
  const int64_t channel_tile = blockIdx.x % launch.channel_tiles;
  const int64_t n = blockIdx.x / launch.channel_tiles;
  const Sequence seq = find_sequence(recurrence_params(params).layout, n);
  const int64_t channel = channel_tile * blockDim.x + threadIdx.x;
  if (channel >= recurrence_params(params).channels) {
    return;
  }
  const Channels channels = {channel, recurrence_params(params).channels};
  Op op(params, seq, channels);
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
  op.store_final_state(s);
  op.reduce_alone(n);
}

}  // namespace tidegate::kernels::scan
