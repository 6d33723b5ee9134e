#pragma once

// From params to launches: how many blocks share a sequence, and which walk they take.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>

#include "kernels/common/cuda/device.h"
#include "kernels/scan/cuda/walk.cuh"
#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels::scan {

/// Whether all rows of a tensor can be accessed in packs of kVec elements.
inline bool packs_align(const TimeSeries& t, int vec) {
  const int64_t bytes = vec * element_size(t.dtype);
  return reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && t.stride_b % vec == 0 &&
         t.stride_t % vec == 0;
}

inline bool packs_align(std::initializer_list<const TimeSeries*> tensors, int64_t channels,
                        int vec) {
  return channels % vec == 0 && std::all_of(tensors.begin(), tensors.end(), [&](const auto* t) {
           return t->data == nullptr || packs_align(*t, vec);
         });
}

template <class Op>
int64_t channel_tiles(int64_t channels, int threads) {
  return (channels + threads * Op::kVec - 1) / (threads * Op::kVec);
}

template <class Op, WalkMode kMode>
constexpr int shared_bytes(int warps) {
  using Bounds = WalkBounds<Op, kMode>;
  return Bounds::kTeams * (sizeof(WalkShared<Op, kMode>) + Op::kPreparedBytes +
                           warps * (RingOf<Op>::kBytes + park_bytes<Op>()));
}

/// As many warps (of a team) as have room, `most` or fewer.
template <class Op, WalkMode kMode>
int warps_that_fit(int most, const DeviceLimits& limits) {
  while (most > 1 && shared_bytes<Op, kMode>(most) > limits.shared_bytes) {
    --most;
  }
  return most;
}

/// How many linked blocks of so many workers a team the device holds at once.
template <class Op>
cudaError_t resident_blocks(int warps, const DeviceLimits& limits, int* blocks) {
  static std::atomic<int> known[LinkSize<Op>::kWorkers + 1] = {};  // of device 0, by `warps`
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  int each = device == 0 ? known[warps].load(std::memory_order_relaxed) : 0;
  if (each == 0) {
    constexpr auto* kKernel = &walk_kernel<Op, WalkMode::kLinked>;
    const int bytes = shared_bytes<Op, WalkMode::kLinked>(warps);
    TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &each, kKernel, LinkSize<Op>::kTeams * (warps + 1) * kWarpSize, bytes));
    if (device == 0) {
      known[warps].store(each, std::memory_order_relaxed);
    }
  }
  *blocks = each * limits.multiprocessors;
  return cudaSuccess;
}

/// The work of a launch as the planner sees it.
struct WalkSize {
  int64_t blocks;  // sequences x channel tiles: what there is without splitting time
  int64_t runs;    // of a sequence of mean length
};

template <class Op>
WalkSize walk_size(const SequenceLayout& layout, int64_t channels) {
  const int64_t sequences = std::max<int64_t>(1, layout.sequences);
  const int64_t length = layout.time * layout.batch / sequences;
  return {std::max<int64_t>(1, sequences * channel_tiles<Op>(channels, kWarpSize)),
          std::max<int64_t>(1, (length + Op::kSteps - 1) / Op::kSteps)};
}

/// Shares a multiprocessor's kMaxWarps warps among the blocks that it gets: four at least for each.
template <class Op>
ScanPlan plan_whole(const WalkSize& size, const DeviceLimits& limits) {
  const int64_t blocks_each = std::clamp<int64_t>(
      (size.blocks + limits.multiprocessors - 1) / limits.multiprocessors, 1, kMaxWarps / 4);
  ScanPlan plan = {.split = TimeSplit::kWhole, .linked_blocks = 1};
  plan.warps = warps_that_fit<Op, WalkMode::kWhole>(
      static_cast<int>(std::clamp<int64_t>(size.runs, 1, kMaxWarps / blocks_each)), limits);
  return plan;
}

/// As many blocks a sequence as the device holds, or fewer that do with as many rounds; `rounds` of
/// them at least, where the sequence is long enough. Leaves the plan alone where they do not fit.
template <class Op>
cudaError_t plan_linked(const WalkSize& size, const DeviceLimits& limits, int rounds,
                        ScanPlan* plan) {
  const int warps = warps_that_fit<Op, WalkMode::kLinked>(LinkSize<Op>::kWorkers, limits);
  int resident = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(resident_blocks<Op>(warps, limits, &resident));
  if (size.blocks > resident) {
    return cudaSuccess;
  }
  const int64_t tile_runs = LinkSize<Op>::kTeams * warps;  // of a block, in one round
  const int64_t tiles = (size.runs + tile_runs - 1) / tile_runs;
  const int64_t most = std::clamp<int64_t>(tiles / rounds, 1, resident / size.blocks);
  const int64_t least_rounds = (tiles + most - 1) / most;
  const int64_t linked_blocks = (tiles + least_rounds - 1) / least_rounds;
  *plan = {.split = TimeSplit::kLinked,
           .linked_blocks = static_cast<int>(linked_blocks),
           .warps = warps};
  plan->workspace_bytes =
      size.blocks * linked_blocks * LinkSize<Op>::kTeams * int64_t{sizeof(Mailbox<Op>)};
  return cudaSuccess;
}

/// Splits time when (sequences x channel tiles) alone would leave multiprocessors idle. The three
/// are one recurrence in the shapes for each use.
template <class ManyBlocks, class OneBlock, class Linked>
cudaError_t choose_split(const SequenceLayout& layout, int64_t channels, TimeSplit request,
                         const DeviceLimits& limits, ScanPlan* plan) {
  const WalkSize size = walk_size<OneBlock>(layout, channels);
  // With one block a multiprocessor there is one chain to wait for, and longer runs make it
  // shorter.
  const bool one_each = size.blocks <= limits.multiprocessors;
  *plan = one_each ? plan_whole<OneBlock>(size, limits)
                   : plan_whole<ManyBlocks>(walk_size<ManyBlocks>(layout, channels), limits);
  plan->one_block_each = one_each;
  // Of less than two rounds there is nothing to share.
  const bool idle = size.blocks * 2 <= limits.multiprocessors && size.runs >= 2 * plan->warps;
  if (request == TimeSplit::kLinked || (request == TimeSplit::kAuto && idle)) {
    const int rounds = request == TimeSplit::kLinked ? 3 : 1;  // asked for: there shall be some
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        plan_linked<Linked>(walk_size<Linked>(layout, channels), limits, rounds, plan));
  }
  const int teams = plan->split == TimeSplit::kLinked ? LinkSize<Linked>::kTeams : 1;
  plan->partials = layout.sequences * plan->linked_blocks * teams;
  return cudaSuccess;
}

template <class Op>
cudaError_t launch_whole(const typename Op::Params& params, const WalkLaunch& launch, int warps,
                         cudaStream_t stream) {
  constexpr auto* kKernel = &walk_kernel<Op, WalkMode::kWhole>;
  const int bytes = shared_bytes<Op, WalkMode::kWhole>(warps);
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  unsigned blocks = 0;
  if (!make_grid(Op::layout(params).sequences * launch.channel_tiles, &blocks)) {
    return cudaErrorInvalidConfiguration;
  }
  kKernel<<<blocks, warps * kWarpSize, bytes, stream>>>(params, launch);
  return cudaGetLastError();
}

/// Linked blocks wait for each other, so they are launched together or not at all.
template <class Op>
cudaError_t launch_linked(const typename Op::Params& params, const WalkLaunch& launch, int warps,
                          cudaStream_t stream) {
  constexpr auto* kKernel = &walk_kernel<Op, WalkMode::kLinked>;
  const int bytes = shared_bytes<Op, WalkMode::kLinked>(warps);
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  const int64_t blocks = Op::layout(params).sequences * launch.channel_tiles * launch.linked_blocks;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(launch.mailboxes, 0,
                                                blocks * LinkSize<Op>::kTeams * sizeof(Mailbox<Op>),
                                                stream));  // no round yet
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(LinkSize<Op>::kTeams * (warps + 1) * kWarpSize);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kKernel, params, launch);
}

template <class ManyBlocks, class OneBlock, class Linked>
cudaError_t launch_walk(const typename ManyBlocks::Params& params, const ScanPlan& plan,
                        void* workspace, bool wide_rows, cudaStream_t stream) {
  const WalkLaunch launch = {channel_tiles<ManyBlocks>(ManyBlocks::channels(params), kWarpSize),
                             plan.linked_blocks, group_of<Linked>(plan.linked_blocks), wide_rows,
                             workspace};
  if (plan.split == TimeSplit::kLinked) {
    return launch_linked<Linked>(params, launch, plan.warps, stream);
  }
  return plan.one_block_each ? launch_whole<OneBlock>(params, launch, plan.warps, stream)
                             : launch_whole<ManyBlocks>(params, launch, plan.warps, stream);
}

template <class Op>
cudaError_t launch_plain(const typename Op::Params& params, cudaStream_t stream) {
  if constexpr (requires { Op::launch_plain(params, stream); }) {
    return Op::launch_plain(params, stream);  // of its own
  } else {
    constexpr int kThreads = 64;
    const WalkLaunch launch = {.channel_tiles = channel_tiles<Op>(Op::channels(params), kThreads)};
    unsigned blocks = 0;
    if (!make_grid(Op::layout(params).sequences * launch.channel_tiles, &blocks)) {
      return cudaErrorInvalidConfiguration;
    }
    plain_walk_kernel<Op><<<blocks, kThreads, 0, stream>>>(params, launch);
    return cudaGetLastError();
  }
}

/// Plans and launches one recurrence. `Recurrence` derives from this and has
///   Op<kPack, kUse>     the op over packs of kPack channels, in the shape for a use (walk_op.cuh)
///   kVec                the pack that makes four bytes, for rows that are aligned to it; others,
///                       and odd D, are walked with packs of one
/// Double precision takes the plain walk, and so does a step or two of time, where there is nothing
/// to divide and a step may update its state in place.
template <class Recurrence, class Params>
struct WalkFamily {
  using Tensors = std::initializer_list<const TimeSeries*>;

  /// Calls `visit` with the pack, and whether the walk is plain, as template arguments.
  template <class Visit>
  static cudaError_t choose(const Params& params, const Tensors& tensors, Visit visit) {
    using Plain = typename Recurrence::template Op<1, WalkUse::kManyBlocks>;
    if constexpr (sizeof(typename Plain::Real) < 8) {
      constexpr int kVec = Recurrence::kVec;
      if (Plain::layout(params).time > 2) {
        return packs_align(tensors, Plain::channels(params), kVec)
                   ? visit.template operator()<kVec, false>()
                   : visit.template operator()<1, false>();
      }
    }
    return visit.template operator()<1, true>();
  }

  static cudaError_t plan(const Params& params, TimeSplit request, const Tensors& tensors,
                          ScanPlan* plan) {
    DeviceLimits limits;
    TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
    return choose(params, tensors, [&]<int kPack, bool kPlain>() {
      using ManyBlocks = typename Recurrence::template Op<kPack, WalkUse::kManyBlocks>;
      const SequenceLayout& layout = ManyBlocks::layout(params);
      if constexpr (kPlain) {
        *plan = {.partials = layout.sequences};
        return cudaSuccess;
      } else {
        using OneBlock = typename Recurrence::template Op<kPack, WalkUse::kOneBlock>;
        using Linked = typename Recurrence::template Op<kPack, WalkUse::kLinked>;
        return choose_split<ManyBlocks, OneBlock, Linked>(layout, ManyBlocks::channels(params),
                                                          request, limits, plan);
      }
    });
  }

  static cudaError_t launch(const Params& params, const ScanPlan& plan, void* workspace,
                            const Tensors& tensors, cudaStream_t stream) {
    return choose(params, tensors, [&]<int kPack, bool kPlain>() {
      using ManyBlocks = typename Recurrence::template Op<kPack, WalkUse::kManyBlocks>;
      const int64_t channels = ManyBlocks::channels(params);
      if (ManyBlocks::layout(params).sequences == 0 || channels == 0) {
        return cudaSuccess;
      }
      if constexpr (kPlain) {
        return launch_plain<ManyBlocks>(params, stream);
      } else {
        const bool wide_rows =
            channels % (kWarpSize * kPack) == 0 && packs_align(tensors, channels, 4 * kPack);
        using OneBlock = typename Recurrence::template Op<kPack, WalkUse::kOneBlock>;
        using Linked = typename Recurrence::template Op<kPack, WalkUse::kLinked>;
        return launch_walk<ManyBlocks, OneBlock, Linked>(params, plan, workspace, wide_rows,
                                                         stream);
      }
    });
  }
};

}  // namespace tidegate::kernels::scan
