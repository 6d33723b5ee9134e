#pragma once

// From params to launches: how many blocks share a sequence, and which walk they take.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>

#include "kernels/common/cuda/device.h"
#include "kernels/scan/cuda/walk.cuh"
#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels {

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
  return Bounds::kTeams * (sizeof(WalkShared<Op, kMode>) + bytes_to_prepare<Op>() +
                           warps * (Ring<Op>::kBytes + park_bytes<Op>()));
}

/// As many warps (of a team) as have room, `most` or fewer.
template <class Op, WalkMode kMode>
int warps_that_fit(int most, const DeviceLimits& limits) {
  while (shared_bytes<Op, kMode>(most) > limits.shared_bytes) {
    --most;
  }
  return most;
}

/// What a kernel must be told once on every device before it may use as much shared memory as it
/// wants.
template <class Op, WalkMode kMode>
cudaError_t prepare_kernel() {
  static std::atomic<uint64_t> prepared = 0;
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((prepared.load(std::memory_order_relaxed) & bit) != 0) {
    return cudaSuccess;
  }
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int bytes = std::min(shared_bytes<Op, kMode>(kMaxWarps), limits.shared_bytes);
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
      walk_kernel<Op, kMode>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  prepared.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

/// How many linked blocks the device holds at once.
template <class Op>
cudaError_t resident_blocks(int warps, const DeviceLimits& limits, int* blocks) {
  static std::atomic<int> known = 0;  // of the device 0, a multiprocessor
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  int each = device == 0 ? known.load(std::memory_order_relaxed) : 0;
  if (each == 0) {
    TIDEGATE_RETURN_IF_CUDA_ERROR((prepare_kernel<Op, WalkMode::kLinked>()));
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &each, walk_kernel<Op, WalkMode::kLinked>, LinkSize<Op>::kTeams * (warps + 1) * kWarpSize,
        shared_bytes<Op, WalkMode::kLinked>(warps)));
    if (device == 0) {
      known.store(each, std::memory_order_relaxed);
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

/// Shares a multiprocessor's kMaxWarps warps among the blocks that it gets.
template <class Op>
ScanPlan plan_whole(const WalkSize& size, const DeviceLimits& limits) {
  const int64_t blocks_each = std::clamp<int64_t>(
      (size.blocks + limits.multiprocessors - 1) / limits.multiprocessors, 1, kMaxWarps / 4);
  ScanPlan plan = {.split = TimeSplit::kNone, .linked_blocks = 1};
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
template <class Short, class Long, class Linked>
cudaError_t choose_split(const SequenceLayout& layout, int64_t channels, TimeSplit request,
                         const DeviceLimits& limits, ScanPlan* plan) {
  const WalkSize size = walk_size<Long>(layout, channels);
  // With one block a multiprocessor there is one chain to wait for, and longer runs make it
  // shorter.
  const bool one_each = size.blocks <= limits.multiprocessors;
  *plan = one_each ? plan_whole<Long>(size, limits)
                   : plan_whole<Short>(walk_size<Short>(layout, channels), limits);
  plan->long_runs = one_each;
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
  TIDEGATE_RETURN_IF_CUDA_ERROR((prepare_kernel<Op, WalkMode::kWhole>()));
  const auto blocks = static_cast<unsigned>(Op::layout(params).sequences * launch.channel_tiles);
  walk_kernel<Op, WalkMode::kWhole>
      <<<blocks, warps * kWarpSize, shared_bytes<Op, WalkMode::kWhole>(warps), stream>>>(params,
                                                                                         launch);
  return cudaGetLastError();
}

/// Linked blocks wait for each other, so they are launched together or not at all.
template <class Op>
cudaError_t launch_linked(const typename Op::Params& params, const WalkLaunch& launch, int warps,
                          cudaStream_t stream) {
  TIDEGATE_RETURN_IF_CUDA_ERROR((prepare_kernel<Op, WalkMode::kLinked>()));
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
  config.dynamicSmemBytes = shared_bytes<Op, WalkMode::kLinked>(warps);
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, walk_kernel<Op, WalkMode::kLinked>, params, launch);
}

template <class Short, class Long, class Linked>
cudaError_t launch_walk(const typename Short::Params& params, const ScanPlan& plan, void* workspace,
                        bool wide_rows, cudaStream_t stream) {
  int group = group_of<Linked>(plan.linked_blocks);
  if constexpr (requires { LinkSize<Linked>::kMostInGroup; }) {
    group = std::min(group, LinkSize<Linked>::kMostInGroup);
  }
  const WalkLaunch launch = {channel_tiles<Short>(Short::channels(params), kWarpSize),
                             plan.linked_blocks, group, wide_rows, workspace};
  if (plan.split == TimeSplit::kLinked) {
    return launch_linked<Linked>(params, launch, plan.warps, stream);
  }
  return plan.long_runs ? launch_whole<Long>(params, launch, plan.warps, stream)
                        : launch_whole<Short>(params, launch, plan.warps, stream);
}

template <class Op>
cudaError_t launch_plain(const typename Op::Params& params, cudaStream_t stream) {
  if constexpr (requires { Op::launch_plain(params, stream); }) {
    return Op::launch_plain(params, stream);  // of its own
  } else {
    constexpr int kThreads = 64;
    const WalkLaunch launch = {.channel_tiles = channel_tiles<Op>(Op::channels(params), kThreads)};
    const auto blocks = static_cast<unsigned>(Op::layout(params).sequences * launch.channel_tiles);
    plain_walk_kernel<Op><<<blocks, kThreads, 0, stream>>>(params, launch);
    return cudaGetLastError();
  }
}

/// Plans and launches one recurrence. `Recurrence` derives from this and has
///   Op<kPack, kUse>     the op over packs of kPack channels, in the shape for a use (walk.cuh)
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
    using Plain = typename Recurrence::template Op<1, WalkUse::kShort>;
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
      using Short = typename Recurrence::template Op<kPack, WalkUse::kShort>;
      const SequenceLayout& layout = Short::layout(params);
      if constexpr (kPlain) {
        *plan = {.partials = layout.sequences};
        return cudaSuccess;
      } else {
        using Long = typename Recurrence::template Op<kPack, WalkUse::kLong>;
        using Linked = typename Recurrence::template Op<kPack, WalkUse::kLinked>;
        return choose_split<Short, Long, Linked>(layout, Short::channels(params), request, limits,
                                                 plan);
      }
    });
  }

  static cudaError_t launch(const Params& params, const ScanPlan& plan, void* workspace,
                            const Tensors& tensors, cudaStream_t stream) {
    return choose(params, tensors, [&]<int kPack, bool kPlain>() {
      using Short = typename Recurrence::template Op<kPack, WalkUse::kShort>;
      const int64_t channels = Short::channels(params);
      if (Short::layout(params).sequences == 0 || channels == 0) {
        return cudaSuccess;
      }
      if constexpr (kPlain) {
        return launch_plain<Short>(params, stream);
      } else {
        const bool wide_rows =
            channels % (kWarpSize * kPack) == 0 && packs_align(tensors, channels, 4 * kPack);
        using Long = typename Recurrence::template Op<kPack, WalkUse::kLong>;
        using Linked = typename Recurrence::template Op<kPack, WalkUse::kLinked>;
        return launch_walk<Short, Long, Linked>(params, plan, workspace, wide_rows, stream);
      }
    });
  }
};

}  // namespace tidegate::kernels
