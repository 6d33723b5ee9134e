#pragma once

#include <array>

#include "kernels/common/cuda/device.h"
#include "kernels/rnn/cuda/chip_family.h"
#include "kernels/rnn/cuda/on_chip.cuh"

namespace tidegate::kernels {

/// How a matrix of up to kWidth columns lies in the threads: as many lanes a row as leave each
/// thread at most 128 weights in registers.
template <int kWidth, int kRows>
struct ChipTileOf;
template <int kRows>
struct ChipTileOf<128, kRows> {
  using Tile = ChipTile<4, 32, 2, 0, kRows, 1>;
};
template <int kRows>
struct ChipTileOf<256, kRows> {
  using Tile = ChipTile<8, 32, 4, 0, kRows, 2>;
};
template <int kRows>
struct ChipTileOf<512, kRows> {
  using Tile = ChipTile<16, 32, 4, 0, kRows, 8>;
};
template <int kRows>
struct ChipTileOf<1024, kRows> {
  using Tile = ChipTile<32, 32, 4, 4, kRows, 16>;
};

/// How many sequences can be walked side by side. In between, what costs least where the device
/// holds a few clusters less than there would have to be.
template <int kWidth>
struct ChipRows {
  static constexpr std::array kChoices = {1, 2, 4};
};
template <>
struct ChipRows<512> {
  static constexpr std::array kChoices = {1, 2, 4, 5, 8};
};

/// A step's time by the number of sequences side by side, to no scale: what a step takes without
/// any (the exchange, the sum over lanes, the gates), in units of what each adds.
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
    if constexpr (Tile::kCluster > kPortableCluster) {
      TIDEGATE_RETURN_IF_CUDA_ERROR(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
    const int64_t clusters = (sequences + Tile::kVectors - 1) / Tile::kVectors;
    config.gridDim = dim3(static_cast<unsigned>(clusters * Tile::kCluster));
    config.blockDim = dim3(kChipThreads);
    config.dynamicSmemBytes = Tile::kSharedBytes;
    config.stream = stream;
    if constexpr (Tile::kCluster > 1) {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = Tile::kCluster;
      attribute.val.clusterDim.y = 1;
      attribute.val.clusterDim.z = 1;
      config.attrs = &attribute;
      config.numAttrs = 1;
    }
    return cudaSuccess;
  }
};

template <class Tile, class Kernel>
cudaError_t count_clusters(Kernel kernel, const DeviceLimits& limits, int* clusters) {
  if constexpr (Tile::kCluster == 1) {
    *clusters = limits.multiprocessors;
    return cudaSuccess;
  } else {
    *clusters = 0;
    // Units for compute capability 9.0a hold the cluster kernels; others are empty.
    if (limits.major != 9 || limits.shared_bytes < Tile::kSharedBytes) return cudaSuccess;
    ChipLaunch<Tile> launch;
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch.prepare(kernel, Tile::kVectors, nullptr));
    return cudaOccupancyMaxActiveClusters(clusters, kernel, &launch.config);
  }
}

template <class Tile, class Kernel, class Params>
cudaError_t launch_chip(Kernel kernel, const Params& params, int64_t sequences,
                        cudaStream_t stream) {
  ChipLaunch<Tile> launch;
  TIDEGATE_RETURN_IF_CUDA_ERROR(launch.prepare(kernel, sequences, stream));
  return cudaLaunchKernelEx(&launch.config, kernel, params);
}

/// Calls visit<Tile>() with the tile for `rows` sequences, one of the choices.
template <int kWidth, int kChoice = 0, class Visit>
cudaError_t with_chip_rows(int rows, Visit visit) {
  using Rows = ChipRows<kWidth>;
  if constexpr (kChoice < static_cast<int>(Rows::kChoices.size())) {
    constexpr int kRows = Rows::kChoices[kChoice];
    if (rows == kRows) {
      return visit.template operator()<typename ChipTileOf<kWidth, kRows>::Tile>();
    }
    return with_chip_rows<kWidth, kChoice + 1>(rows, visit);
  }
  return cudaErrorInvalidValue;
}

template <int kWidth>
cudaError_t ChipFamily<kWidth>::plan(const GatedRnnParams& params, bool backward,
                                     GatedRnnPlan* plan) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  // All choices take a block's whole multiprocessor.
  int clusters = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR((with_chip_rows<kWidth>(4, [&]<class Tile>() {
    plan->cluster = Tile::kCluster;
    return backward ? count_clusters<Tile>(&gated_rnn_chip_backward<Tile>, limits, &clusters)
                    : count_clusters<Tile>(&gated_rnn_chip_forward<Tile>, limits, &clusters);
  })));
  if (clusters == 0) return cudaSuccess;
  plan->on_chip = true;
  int64_t best = 0;
  for (const int rows : ChipRows<kWidth>::kChoices) {
    const int64_t at_once = int64_t{clusters} * rows;
    const int64_t waves = (params.layout.sequences + at_once - 1) / at_once;
    const int64_t cost = waves * (kStepAlone + rows);
    if (best == 0 || cost < best) {
      best = cost;
      plan->rows = rows;
    }
  }
  return cudaSuccess;
}

template <int kWidth>
cudaError_t ChipFamily<kWidth>::forward(const GatedRnnParams& params, cudaStream_t stream) {
  return with_chip_rows<kWidth>(params.plan.rows, [&]<class Tile>() {
    return launch_chip<Tile>(&gated_rnn_chip_forward<Tile>, params, params.layout.sequences,
                             stream);
  });
}

template <int kWidth>
cudaError_t ChipFamily<kWidth>::backward(const GatedRnnBackwardParams& params,
                                         cudaStream_t stream) {
  return with_chip_rows<kWidth>(params.forward.plan.rows, [&]<class Tile>() {
    return launch_chip<Tile>(&gated_rnn_chip_backward<Tile>, params,
                             params.forward.layout.sequences, stream);
  });
}

}  // namespace tidegate::kernels
