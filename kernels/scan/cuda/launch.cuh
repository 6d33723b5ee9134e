#pragma once

// From params to launches: how many blocks share a sequence, and which walk they take.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>

#include "kernels/scan/cuda/walk.cuh"
#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels {

#define TIDEGATE_RETURN_IF_CUDA_ERROR(expression)                 \
  do {                                                            \
    if (cudaError_t error = (expression); error != cudaSuccess) { \
      return error;                                               \
    }                                                             \
  } while (false)

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

struct DeviceLimits {
  int multiprocessors = 0;
  int major = 0;
  int shared_bytes = 0;  // that one block may use
};

inline cudaError_t read_device_limits(DeviceLimits* limits) {
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(value, attribute, device);
  };
  TIDEGATE_RETURN_IF_CUDA_ERROR(read(&limits->multiprocessors, cudaDevAttrMultiProcessorCount));
  TIDEGATE_RETURN_IF_CUDA_ERROR(read(&limits->major, cudaDevAttrComputeCapabilityMajor));
  return read(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

template <class Op>
int64_t channel_tiles(int64_t channels, int threads) {
  return (channels + threads * Op::kVec - 1) / (threads * Op::kVec);
}

template <class Op, bool kCluster>
constexpr int shared_bytes(int warps) {
  return sizeof(WalkShared<Op, kCluster>) + warps * Ring<Op>::kBytes;
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
  const int bytes = std::min(shared_bytes<Op, kCluster>(kMaxWarps), limits.shared_bytes);
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
  config.dynamicSmemBytes = shared_bytes<Op, true>(warps);
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
  for (const int warps : {kMaxWarps / 2, kMaxWarps}) {
    for (int splits = kMaxSplits; splits >= 2; --splits) {
      if (splits * warps <= best.splits * best.warps || splits * warps > size.runs ||
          shared_bytes<Op, true>(warps) > limits.shared_bytes) {
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

/// Shares a multiprocessor's kMaxWarps warps among the blocks that it gets, and splits time when
/// (sequences x channel tiles) alone would leave multiprocessors idle.
template <class Op>
cudaError_t choose_split(const SequenceLayout& layout, int64_t channels, TimeSplit request,
                         const DeviceLimits& limits, ScanPlan* plan) {
  const WalkSize size = walk_size<Op>(layout, channels);
  const int64_t blocks_each = std::clamp<int64_t>(
      (size.blocks + limits.multiprocessors - 1) / limits.multiprocessors, 1, kMaxWarps / 4);
  ScanPlan whole = {.split = TimeSplit::kNone, .splits = 1};
  whole.warps = static_cast<int>(std::clamp<int64_t>(size.runs, 1, kMaxWarps / blocks_each));
  while (shared_bytes<Op, false>(whole.warps) > limits.shared_bytes) {
    --whole.warps;
  }
  ScanPlan two_pass = whole;
  two_pass.split = TimeSplit::kTwoPass;
  two_pass.splits = static_cast<int>(std::clamp<int64_t>(
      std::min(limits.multiprocessors / size.blocks, size.runs / whole.warps), 2, kMaxSplits));
  two_pass.workspace_bytes =
      2 * layout.sequences * two_pass.splits * channels * int64_t{sizeof(typename Op::Number)};

  *plan = request == TimeSplit::kTwoPass ? two_pass : whole;
  const bool idle = size.blocks * 2 <= limits.multiprocessors && size.runs >= 2 * whole.warps;
  if (request == TimeSplit::kCluster ||
      (request == TimeSplit::kAuto && idle && limits.major >= 9)) {
    ScanPlan cluster;
    TIDEGATE_RETURN_IF_CUDA_ERROR(choose_cluster<Op>(size, limits, &cluster));
    if (cluster.splits * cluster.warps > whole.warps) {
      *plan = cluster;
    } else if (request == TimeSplit::kCluster) {
      *plan = {.split = TimeSplit::kCluster, .splits = 2, .warps = std::min(whole.warps, 8)};
    }
  } else if (request == TimeSplit::kAuto && idle && two_pass.splits >= 4) {
    *plan = two_pass;  // reads everything twice: that pays only when most of the chip would idle
  }
  plan->partials = layout.sequences * plan->splits;
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
  config.dynamicSmemBytes = shared_bytes<Op, kMode == WalkMode::kCluster>(warps);
  config.stream = stream;
  if (kMode == WalkMode::kCluster) {
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, walk_kernel<Op, kMode>, params, launch);
}

template <class Op>
cudaError_t launch_walk(const typename Op::Params& params, const ScanPlan& plan, void* workspace,
                        bool wide_rows, cudaStream_t stream) {
  const WalkLaunch launch = {channel_tiles<Op>(Op::channels(params), kWarpSize), plan.splits,
                             wide_rows, workspace};
  switch (plan.split) {
    case TimeSplit::kCluster:
      return launch_mode<Op, WalkMode::kCluster>(params, launch, plan.warps, stream);
    case TimeSplit::kTwoPass:
      TIDEGATE_RETURN_IF_CUDA_ERROR(
          (launch_mode<Op, WalkMode::kSegmentMap>(params, launch, plan.warps, stream)));
      return launch_mode<Op, WalkMode::kSegment>(params, launch, plan.warps, stream);
    default:
      return launch_mode<Op, WalkMode::kWhole>(params, launch, plan.warps, stream);
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

/// One recurrence in the forms that its launches choose from.
///   Wide    the walk, a Pack of channels a thread
///   Narrow  the walk, one channel a thread: rows that are not aligned to packs, odd D
///   Plain   the plain walk, one channel a thread: double precision; a step or two of time, where
///           there is nothing to divide and a step may update its state in place
template <class Wide, class Narrow>
struct WalkFamily {
  using Plain = Narrow;
  using Params = typename Plain::Params;
  using Tensors = std::initializer_list<const TimeSeries*>;

  template <class Visit>
  static cudaError_t choose(const Params& params, const Tensors& tensors, Visit visit) {
    if constexpr (sizeof(typename Plain::Real) < 8) {
      if (Plain::layout(params).time > 2) {
        return packs_align(tensors, Plain::channels(params), Wide::kVec)
                   ? visit.template operator()<Wide, false>()
                   : visit.template operator()<Narrow, false>();
      }
    }
    return visit.template operator()<Plain, true>();
  }

  static cudaError_t plan(const Params& params, TimeSplit request, const Tensors& tensors,
                          ScanPlan* plan) {
    DeviceLimits limits;
    TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
    if (request == TimeSplit::kCluster && limits.major < 9) {
      return cudaErrorNotSupported;
    }
    return choose(params, tensors, [&]<class Op, bool kPlain>() {
      const SequenceLayout& layout = Op::layout(params);
      if constexpr (kPlain) {
        *plan = {.partials = layout.sequences};
      } else {
        TIDEGATE_RETURN_IF_CUDA_ERROR(
            choose_split<Op>(layout, Op::channels(params), request, limits, plan));
      }
      return cudaSuccess;
    });
  }

  static cudaError_t launch(const Params& params, const ScanPlan& plan, void* workspace,
                            const Tensors& tensors, cudaStream_t stream) {
    if (Plain::layout(params).sequences == 0 || Plain::channels(params) == 0) {
      return cudaSuccess;
    }
    return choose(params, tensors, [&]<class Op, bool kPlain>() {
      if constexpr (kPlain) {
        return launch_plain<Op>(params, stream);
      } else {
        const bool wide_rows = Plain::channels(params) % (kWarpSize * Op::kVec) == 0 &&
                               packs_align(tensors, Plain::channels(params), 4 * Op::kVec);
        return launch_walk<Op>(params, plan, workspace, wide_rows, stream);
      }
    });
  }
};

}  // namespace tidegate::kernels
