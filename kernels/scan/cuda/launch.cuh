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

/// Shares a multiprocessor's kMaxWarps warps among the blocks that it gets, and splits time when
/// (sequences x channel tiles) alone would leave multiprocessors idle.
template <class Op>
ScanPlan choose_split(const SequenceLayout& layout, int64_t channels, TimeSplit request,
                      const DeviceLimits& limits) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t blocks =
      std::max<int64_t>(1, layout.sequences * channel_tiles<Op>(channels, kWarpSize));
  const int64_t mean_length = layout.time * layout.batch / std::max<int64_t>(1, layout.sequences);
  const int64_t blocks_each =
      std::clamp<int64_t>(ceil_div(blocks, limits.multiprocessors), 1, kMaxWarps / 4);
  ScanPlan plan;
  plan.warps = static_cast<int>(
      std::clamp<int64_t>(ceil_div(mean_length, Op::kSteps), 1, kMaxWarps / blocks_each));
  while (shared_bytes<Op, true>(plan.warps) > limits.shared_bytes) {
    --plan.warps;
  }
  const int64_t useful =
      std::min(limits.multiprocessors / blocks, mean_length / (int64_t{plan.warps} * Op::kSteps));
  plan.split = request;
  if (request == TimeSplit::kAuto) {
    // Two passes read everything twice: that pays only when most of the chip would idle.
    plan.split = useful < 2          ? TimeSplit::kNone
                 : limits.major >= 9 ? TimeSplit::kCluster
                 : useful >= 4       ? TimeSplit::kTwoPass
                                     : TimeSplit::kNone;
  }
  if (plan.split == TimeSplit::kCluster) {
    plan.splits = 2;
    while (plan.splits < kMaxSplits && plan.splits * 2 <= useful) {
      plan.splits *= 2;
    }
  } else if (plan.split == TimeSplit::kTwoPass) {
    plan.splits = static_cast<int>(std::clamp<int64_t>(useful, 2, kMaxSplits));
    plan.workspace_bytes =
        2 * layout.sequences * plan.splits * channels * int64_t{sizeof(typename Op::Number)};
  }
  plan.partials = layout.sequences * plan.splits;
  return plan;
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

template <class Op, WalkMode kMode>
cudaError_t launch_mode(const typename Op::Params& params, const WalkLaunch& launch, int warps,
                        cudaStream_t stream) {
  TIDEGATE_RETURN_IF_CUDA_ERROR((prepare_kernel<Op, kMode>()));
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(launch.splits), 1, 1};
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
        *plan = choose_split<Op>(layout, Op::channels(params), request, limits);
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
