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
  return sizeof(WalkShared<Op, kMode>) + warps * Ring<Op>::kBytes;
}

/// What a kernel must be told once on every device before it may use as much shared memory, and as
/// large clusters, as it wants.
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
  constexpr bool kCluster = kMode == WalkMode::kCluster;
  const auto kernel = walk_kernel<Op, kMode>;
  const int bytes = std::min(shared_bytes<Op, kMode>(kMaxWarps), limits.shared_bytes);
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (kCluster) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  prepared.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

inline cudaLaunchAttribute cluster_of(int blocks) {
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  return cluster;
}

/// How many clusters of that many blocks, of that many warps, the device holds at once. The chip's
/// geometry decides (an H200 holds 15 clusters of 8 blocks of 16 warps, not 16), so it is asked.
template <class Op>
cudaError_t resident_clusters(int splits, int warps, int* clusters) {
  static std::atomic<int> known[kMaxSplits + 1][kMaxWarps + 1] = {};  // of the device 0, plus one
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  if (const int found = known[splits][warps].load(std::memory_order_relaxed);
      found != 0 && device == 0) {
    *clusters = found - 1;
    return cudaSuccess;
  }
  TIDEGATE_RETURN_IF_CUDA_ERROR((prepare_kernel<Op, WalkMode::kCluster>()));
  cudaLaunchAttribute cluster = cluster_of(splits);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(splits);
  config.blockDim = dim3(warps * kWarpSize);
  config.dynamicSmemBytes = shared_bytes<Op, WalkMode::kCluster>(warps);
  config.attrs = &cluster;
  config.numAttrs = 1;
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      cudaOccupancyMaxActiveClusters(clusters, walk_kernel<Op, WalkMode::kCluster>, &config));
  if (device == 0) {
    known[splits][warps].store(*clusters + 1, std::memory_order_relaxed);
  }
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

/// The cluster with most warps of which the device holds all at once; no splits if there is none.
template <class Op>
cudaError_t choose_cluster(const WalkSize& size, const DeviceLimits& limits, ScanPlan* plan) {
  ScanPlan best = {.split = TimeSplit::kCluster, .splits = 0, .warps = 0};
  for (const int warps : {kMaxWarps, kMaxWarps / 2}) {
    for (int splits = kMaxSplits; splits >= 2; --splits) {
      if (splits * warps <= best.splits * best.warps || splits * warps > size.runs ||
          shared_bytes<Op, WalkMode::kCluster>(warps) > limits.shared_bytes) {
        continue;
      }
      int resident = 0;
      TIDEGATE_RETURN_IF_CUDA_ERROR(resident_clusters<Op>(splits, warps, &resident));
      if (resident >= size.blocks) {
        best.splits = splits;
        best.warps = warps;
      }
    }
  }
  *plan = best;
  return cudaSuccess;
}

/// Shares a multiprocessor's kMaxWarps warps among the blocks that it gets.
template <class Op>
ScanPlan plan_whole(const WalkSize& size, const DeviceLimits& limits) {
  const int64_t blocks_each = std::clamp<int64_t>(
      (size.blocks + limits.multiprocessors - 1) / limits.multiprocessors, 1, kMaxWarps / 4);
  ScanPlan plan = {.split = TimeSplit::kNone, .splits = 1};
  plan.warps = static_cast<int>(std::clamp<int64_t>(size.runs, 1, kMaxWarps / blocks_each));
  while (shared_bytes<Op, WalkMode::kSegmentMap>(plan.warps) > limits.shared_bytes) {
    --plan.warps;
  }
  return plan;
}

template <class Op>
ScanPlan plan_two_pass(const WalkSize& size, const DeviceLimits& limits) {
  ScanPlan plan = plan_whole<Op>(size, limits);
  plan.split = TimeSplit::kTwoPass;
  plan.splits = static_cast<int>(std::clamp<int64_t>(
      std::min(limits.multiprocessors / size.blocks, size.runs / plan.warps), 2, kMaxSplits));
  return plan;
}

/// Splits time when (sequences x channel tiles) alone would leave multiprocessors idle. `Whole` and
/// `Split` are one recurrence in the shapes for walking whole sequences and parts of them.
template <class Whole, class Split>
cudaError_t choose_split(const SequenceLayout& layout, int64_t channels, TimeSplit request,
                         const DeviceLimits& limits, ScanPlan* plan) {
  const WalkSize size = walk_size<Split>(layout, channels);
  // With one block a multiprocessor there is one chain to wait for, and longer runs make it
  // shorter.
  const bool one_each = size.blocks <= limits.multiprocessors;
  ScanPlan whole = one_each ? plan_whole<Split>(size, limits)
                            : plan_whole<Whole>(walk_size<Whole>(layout, channels), limits);
  whole.long_runs = one_each;
  const ScanPlan two_pass = plan_two_pass<Split>(size, limits);
  *plan = request == TimeSplit::kTwoPass ? two_pass : whole;
  const bool idle = size.blocks * 2 <= limits.multiprocessors && size.runs >= 2 * two_pass.warps;
  if (request == TimeSplit::kCluster ||
      (request == TimeSplit::kAuto && idle && limits.major >= 9)) {
    ScanPlan cluster;
    TIDEGATE_RETURN_IF_CUDA_ERROR(choose_cluster<Split>(size, limits, &cluster));
    if (cluster.splits * cluster.warps > whole.warps) {
      *plan = cluster;
    } else if (request == TimeSplit::kCluster) {
      *plan = {.split = TimeSplit::kCluster, .splits = 2, .warps = std::min(two_pass.warps, 8)};
    }
  } else if (request == TimeSplit::kAuto && idle && two_pass.splits >= 4) {
    *plan = two_pass;  // reads everything twice: that pays only when most of the chip would idle
  }
  plan->partials = layout.sequences * plan->splits;
  if (plan->split == TimeSplit::kTwoPass) {
    plan->workspace_bytes = SegmentMaps<Split>::kPlanes * plan->partials * channels *
                            int64_t{sizeof(typename Split::Number)};
  }
  return cudaSuccess;
}

template <class Op, WalkMode kMode>
cudaError_t launch_mode(const typename Op::Params& params, const WalkLaunch& launch, int warps,
                        cudaStream_t stream) {
  TIDEGATE_RETURN_IF_CUDA_ERROR((prepare_kernel<Op, kMode>()));
  cudaLaunchAttribute cluster = cluster_of(launch.splits);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(
      static_cast<unsigned>(Op::layout(params).sequences * launch.channel_tiles * launch.splits));
  config.blockDim = dim3(warps * kWarpSize);
  config.dynamicSmemBytes = shared_bytes<Op, kMode>(warps);
  config.stream = stream;
  if (kMode == WalkMode::kCluster) {
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, walk_kernel<Op, kMode>, params, launch);
}

template <class Whole, class Split>
cudaError_t launch_walk(const typename Whole::Params& params, const ScanPlan& plan, void* workspace,
                        bool wide_rows, cudaStream_t stream) {
  const WalkLaunch launch = {channel_tiles<Whole>(Whole::channels(params), kWarpSize), plan.splits,
                             wide_rows, workspace};
  switch (plan.split) {
    case TimeSplit::kCluster:
      return launch_mode<Split, WalkMode::kCluster>(params, launch, plan.warps, stream);
    case TimeSplit::kTwoPass:
      TIDEGATE_RETURN_IF_CUDA_ERROR(
          (launch_mode<Split, WalkMode::kSegmentMap>(params, launch, plan.warps, stream)));
      return launch_mode<Split, WalkMode::kSegment>(params, launch, plan.warps, stream);
    default:
      return plan.long_runs
                 ? launch_mode<Split, WalkMode::kWhole>(params, launch, plan.warps, stream)
                 : launch_mode<Whole, WalkMode::kWhole>(params, launch, plan.warps, stream);
  }
}

template <class Op>
cudaError_t launch_plain(const typename Op::Params& params, cudaStream_t stream) {
  constexpr int kThreads = 64;
  const WalkLaunch launch = {channel_tiles<Op>(Op::channels(params), kThreads), 1, false, nullptr};
  const auto blocks = static_cast<unsigned>(Op::layout(params).sequences * launch.channel_tiles);
  plain_walk_kernel<Op><<<blocks, kThreads, 0, stream>>>(params, launch);
  return cudaGetLastError();
}

/// Plans and launches one recurrence. `Recurrence` derives from this and has
///   Op<kPack, kSplit>   the op over packs of kPack channels, in the shape for whole sequences or
///                       for parts of them (walk.cuh)
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
    using Plain = typename Recurrence::template Op<1, false>;
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
    if (request == TimeSplit::kCluster && limits.major < 9) {
      return cudaErrorNotSupported;
    }
    return choose(params, tensors, [&]<int kPack, bool kPlain>() {
      using Whole = typename Recurrence::template Op<kPack, false>;
      const SequenceLayout& layout = Whole::layout(params);
      if constexpr (kPlain) {
        *plan = {.partials = layout.sequences};
        return cudaSuccess;
      } else {
        using Split = typename Recurrence::template Op<kPack, true>;
        return choose_split<Whole, Split>(layout, Whole::channels(params), request, limits, plan);
      }
    });
  }

  static cudaError_t launch(const Params& params, const ScanPlan& plan, void* workspace,
                            const Tensors& tensors, cudaStream_t stream) {
    return choose(params, tensors, [&]<int kPack, bool kPlain>() {
      using Whole = typename Recurrence::template Op<kPack, false>;
      const int64_t channels = Whole::channels(params);
      if (Whole::layout(params).sequences == 0 || channels == 0) {
        return cudaSuccess;
      }
      if constexpr (kPlain) {
        return launch_plain<Whole>(params, stream);
      } else {
        using Split = typename Recurrence::template Op<kPack, true>;
        const bool wide_rows =
            channels % (kWarpSize * kPack) == 0 && packs_align(tensors, channels, 4 * kPack);
        return launch_walk<Whole, Split>(params, plan, workspace, wide_rows, stream);
      }
    });
  }
};

}  // namespace tidegate::kernels
