#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "kernels/common/cuda/device.h"
#include "kernels/rnn/cuda/chip_family.h"
#include "kernels/rnn/cuda/on_chip.cuh"

namespace tidegate::kernels::rnn {

/// What a family is for: D, whether the matrix is of 16-bit numbers, whether there are clusters.
template <int kWidth_, bool kIs16Bit_, bool kExchangesInMemory_>
struct ChipUse {
  static constexpr int kWidth = kWidth_;
  static constexpr bool kIs16Bit = kIs16Bit_;
  static constexpr bool kExchangesInMemory = kExchangesInMemory_;
};

/// How the matrix lies in the threads, for so many sequences side by side. A ChipTile, for the
/// floating-point units: as many lanes a row as leave each thread at most 128 weights in registers.
template <class Use, int kRows>
struct ChipTileOf;
template <int kRows>
struct ChipTileOf<ChipUse<128, false, false>, kRows> {
  using Tile = ChipTile<4, 32, 2, 0, kRows, 1>;
};
template <int kRows>
struct ChipTileOf<ChipUse<256, false, false>, kRows> {
  using Tile = ChipTile<8, 32, 4, 0, kRows, 2>;
};
template <int kRows>
struct ChipTileOf<ChipUse<1024, false, false>, kRows> {
  using Tile = ChipTile<32, 32, 4, 4, kRows, 16>;
};
/// A matrix of floats takes twice the registers: they have no room for more columns at a time.
template <bool kIs16Bit, int kRows>
struct ChipTileOf<ChipUse<512, kIs16Bit, false>, kRows> {
  using Tile = FragmentTile<kRows, kIs16Bit ? 1 : 2, kIs16Bit ? 2 : 1, ClusterExchange>;
};
template <bool kIs16Bit, int kRows>
struct ChipTileOf<ChipUse<512, kIs16Bit, true>, kRows> {
  using Tile = FragmentTile<kRows, kIs16Bit ? 1 : 2, 1, MemoryExchange>;
};

/// How many sequences can be walked side by side. In between, what costs least where the device
/// holds a few clusters less than there would have to be.
template <class Use>
struct ChipRows {
  static constexpr std::array kChoices = {1, 2, 4};
};
template <bool kIs16Bit, bool kExchangesInMemory>
struct ChipRows<ChipUse<512, kIs16Bit, kExchangesInMemory>> {
  static constexpr std::array kChoices = {2, 4, 5, 8};
};

/// A step's time by the number of sequences side by side, to no scale: what a step takes without
/// any (the exchange, the sums over lanes or warps, the gates), in units of what each adds.
constexpr int64_t kStepAlone = 2;

constexpr int kPortableCluster = 8;

template <class Tile>
struct ChipLaunch {
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
    ChipLaunch<Tile> launch;
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
cudaError_t launch_chip(Kernel kernel, Params params, cudaStream_t stream) {
  GatedRnnParams& forward = forward_of(params);
  const int64_t sequences = forward.layout.sequences;
  ChipLaunch<Tile> launch;
  if constexpr (Tile::kNeedsClusters || Tile::kCluster == 1) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch.prepare(kernel, sequences, stream));
    return cudaLaunchKernelEx(&launch.config, kernel, params);
  } else {
    const int64_t groups = forward.plan.workspace_bytes / Tile::Exchange::kBytes;
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

/// Calls visit<Tile>() with the tile for `rows` sequences, one of the choices.
template <class Use, int kChoice = 0, class Visit>
cudaError_t with_chip_rows(int rows, Visit visit) {
  using Rows = ChipRows<Use>;
  if constexpr (kChoice < static_cast<int>(Rows::kChoices.size())) {
    constexpr int kRows = Rows::kChoices[kChoice];
    if (rows == kRows) {
      return visit.template operator()<typename ChipTileOf<Use, kRows>::Tile>();
    }
    return with_chip_rows<Use, kChoice + 1>(rows, visit);
  }
  return cudaErrorInvalidValue;
}

template <int kWidth, bool kIs16Bit, bool kExchangesInMemory>
cudaError_t ChipFamily<kWidth, kIs16Bit, kExchangesInMemory>::plan(const GatedRnnParams& params,
                                                                   bool backward,
                                                                   GatedRnnPlan* plan) {
  using Use = ChipUse<kWidth, kIs16Bit, kExchangesInMemory>;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  // All choices take a block's whole multiprocessor.
  int groups = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      (with_chip_rows<Use>(ChipRows<Use>::kChoices.back(), [&]<class Tile>() {
        return backward ? count_groups<Tile>(&gated_rnn_chip_backward<Tile>, limits, &groups)
                        : count_groups<Tile>(&gated_rnn_chip_forward<Tile>, limits, &groups);
      })));
  if (groups == 0) return cudaSuccess;
  plan->on_chip = true;
  plan->exchanges_in_memory = kExchangesInMemory;
  int64_t best = 0;
  for (const int rows : ChipRows<Use>::kChoices) {
    const int64_t at_once = int64_t{groups} * rows;
    const int64_t waves = (params.layout.sequences + at_once - 1) / at_once;
    const int64_t cost = waves * (kStepAlone + rows);
    if (best == 0 || cost < best) {
      best = cost;
      plan->rows = rows;
    }
  }
  if constexpr (kExchangesInMemory) {
    return with_chip_rows<Use>(plan->rows, [&]<class Tile>() {
      plan->workspace_bytes = groups * Tile::Exchange::kBytes;
      return cudaSuccess;
    });
  }
  return cudaSuccess;
}

template <int kWidth, bool kIs16Bit, bool kExchangesInMemory>
cudaError_t ChipFamily<kWidth, kIs16Bit, kExchangesInMemory>::forward(const GatedRnnParams& params,
                                                                      cudaStream_t stream) {
  using Use = ChipUse<kWidth, kIs16Bit, kExchangesInMemory>;
  return with_chip_rows<Use>(params.plan.rows, [&]<class Tile>() {
    return launch_chip<Tile>(&gated_rnn_chip_forward<Tile>, params, stream);
  });
}

template <int kWidth, bool kIs16Bit, bool kExchangesInMemory>
cudaError_t ChipFamily<kWidth, kIs16Bit, kExchangesInMemory>::backward(
    const GatedRnnBackwardParams& params, cudaStream_t stream) {
  using Use = ChipUse<kWidth, kIs16Bit, kExchangesInMemory>;
  return with_chip_rows<Use>(params.forward.plan.rows, [&]<class Tile>() {
    return launch_chip<Tile>(&gated_rnn_chip_backward<Tile>, params, stream);
  });
}

}  // namespace tidegate::kernels::rnn
