#pragma once

// Plans and launches of the kernels that keep the matrix on the chip. The plan says how many
// sequences a block (or the blocks that share a matrix) takes side by side, which chooses the tile;
// the launch takes both from there.

#include <algorithm>
#include <type_traits>

#include "kernels/common/cuda/device.h"
#include "kernels/rnn/cuda/on_chip/configurations.cuh"
#include "kernels/rnn/cuda/on_chip/on_chip_family.h"
#include "kernels/rnn/cuda/on_chip/scan.cuh"

namespace tidegate::kernels::rnn {

/// A step's time by the number of sequences side by side, to no scale: what a step takes without
/// any (the exchange, the sums over lanes or warps, the gates), in units of what each adds.
constexpr int64_t kStepAlone = 2;

constexpr int kPortableCluster = 8;

template <class Tile>
struct OnChipLaunch {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};

  /// The grid for N sequences; `kernel` gets what it needs of shared memory and cluster size.
  template <class Kernel>
  cudaError_t prepare(Kernel kernel, int64_t sequences, cudaStream_t stream) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes));
    if constexpr (Tile::kNeedsClusters && Tile::kCluster > kPortableCluster) {
      TIDEGATE_RETURN_IF_CUDA_ERROR(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
    const int64_t clusters = (sequences + Tile::kVectors - 1) / Tile::kVectors;
    config.gridDim = dim3(static_cast<unsigned>(clusters * Tile::kCluster));
    config.blockDim = dim3(Tile::kThreads);
    config.dynamicSmemBytes = Tile::kSharedBytes;
    config.stream = stream;
    if constexpr (Tile::kNeedsClusters) {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = Tile::kCluster;
      attribute.val.clusterDim.y = 1;
      attribute.val.clusterDim.z = 1;
    } else {  // blocks that wait for each other must all run
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = Tile::kCluster > 1;
    }
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaSuccess;
  }
};

/// How many groups of blocks with a matrix each the device holds at once.
template <class Tile, class Kernel>
cudaError_t count_groups(Kernel kernel, const DeviceLimits& limits, int* groups) {
  *groups = 0;
  if (limits.shared_bytes < Tile::kSharedBytes) return cudaSuccess;
  if constexpr (Tile::kNeedsClusters) {
    // Only code for compute capability 9.0a holds the cluster kernels. The loaded kernel is asked,
    // not the device: one of 9.0 may run what was made for 8.0 (PTX, compiled when it is loaded).
    cudaFuncAttributes loaded{};
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&loaded, kernel));
    if (loaded.ptxVersion < 90) return cudaSuccess;
    OnChipLaunch<Tile> launch;
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch.prepare(kernel, Tile::kVectors, nullptr));
    return cudaOccupancyMaxActiveClusters(groups, kernel, &launch.config);
  } else {
    *groups = limits.multiprocessors / Tile::kCluster;
    return cudaSuccess;
  }
}

template <class Params>
GatedRnnParams& forward_of(Params& params) {
  if constexpr (std::is_same_v<Params, GatedRnnParams>) {
    return params;
  } else {
    return params.forward;
  }
}

template <class Tile, class Kernel, class Params>
cudaError_t launch_on_chip(Kernel kernel, Params params, cudaStream_t stream) {
  GatedRnnParams& forward = forward_of(params);
  const int64_t sequences = forward.layout.sequences;
  OnChipLaunch<Tile> launch;
  if constexpr (Tile::kNeedsClusters || Tile::kCluster == 1) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch.prepare(kernel, sequences, stream));
    return cudaLaunchKernelEx(&launch.config, kernel, params);
  } else {
    const int64_t groups = Tile::Exchange::Workspace::groups(forward.plan.workspace_bytes);
    int64_t& first = forward.plan.first_sequence;
    for (first = 0; first < sequences; first += groups * Tile::kVectors) {
      const int64_t count = std::min(groups * Tile::kVectors, sequences - first);
      TIDEGATE_RETURN_IF_CUDA_ERROR(launch.prepare(kernel, count, stream));
      TIDEGATE_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(
          forward.workspace, 0, static_cast<size_t>(forward.plan.workspace_bytes), stream));
      TIDEGATE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&launch.config, kernel, params));
    }
    return cudaSuccess;
  }
}

template <int kWidth, bool kIs16Bit, bool kExchangesInMemory>
cudaError_t OnChipFamily<kWidth, kIs16Bit, kExchangesInMemory>::plan(const GatedRnnParams& params,
                                                                     bool backward,
                                                                     GatedRnnPlan* plan) {
  using Use = OnChipUse<kWidth, kIs16Bit, kExchangesInMemory>;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  // All choices take a block's whole multiprocessor.
  int groups = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      (with_on_chip_tile<Use>(OnChipVectors<Use>::kChoices.back(), [&]<class Tile>() {
        return backward ? count_groups<Tile>(&gated_rnn_on_chip_backward<Tile>, limits, &groups)
                        : count_groups<Tile>(&gated_rnn_on_chip_forward<Tile>, limits, &groups);
      })));
  if (groups == 0) return cudaSuccess;
  plan->on_chip = true;
  plan->exchanges_in_memory = kExchangesInMemory;
  int64_t best = 0;
  for (const int rows : OnChipVectors<Use>::kChoices) {
    const int64_t at_once = int64_t{groups} * rows;
    const int64_t waves = (params.layout.sequences + at_once - 1) / at_once;
    const int64_t cost = waves * (kStepAlone + rows);
    if (best == 0 || cost < best) {
      best = cost;
      plan->rows = rows;
    }
  }
  if constexpr (kExchangesInMemory) {
    return with_on_chip_tile<Use>(plan->rows, [&]<class Tile>() {
      plan->workspace_bytes = Tile::Exchange::Workspace::bytes(groups);
      return cudaSuccess;
    });
  }
  return cudaSuccess;
}

template <int kWidth, bool kIs16Bit, bool kExchangesInMemory>
cudaError_t OnChipFamily<kWidth, kIs16Bit, kExchangesInMemory>::forward(
    const GatedRnnParams& params, cudaStream_t stream) {
  using Use = OnChipUse<kWidth, kIs16Bit, kExchangesInMemory>;
  return with_on_chip_tile<Use>(params.plan.rows, [&]<class Tile>() {
    return launch_on_chip<Tile>(&gated_rnn_on_chip_forward<Tile>, params, stream);
  });
}

template <int kWidth, bool kIs16Bit, bool kExchangesInMemory>
cudaError_t OnChipFamily<kWidth, kIs16Bit, kExchangesInMemory>::backward(
    const GatedRnnBackwardParams& params, cudaStream_t stream) {
  using Use = OnChipUse<kWidth, kIs16Bit, kExchangesInMemory>;
  return with_on_chip_tile<Use>(params.forward.plan.rows, [&]<class Tile>() {
    return launch_on_chip<Tile>(&gated_rnn_on_chip_backward<Tile>, params, stream);
  });
}

}  // namespace tidegate::kernels::rnn
