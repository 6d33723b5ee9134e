#pragma once

// What a unit of the kernels that keep the matrix on the chip compiles: every configuration, and
// why it is that one, with the plan and the launches.

#include <algorithm>
#include <array>
#include <type_traits>

#include "kernels/common/cuda/device.h"
#include "kernels/rnn/cuda/on_chip/fma_matrix.cuh"
#include "kernels/rnn/cuda/on_chip/mma_matrix.cuh"
#include "kernels/rnn/cuda/on_chip/scan.cuh"
#include "kernels/rnn/rnn_cuda.h"

namespace tidegate::kernels::rnn {

// ---- Configurations ----

/// What a family of kernels is for: D up to kWidth, whether the matrix is of 16-bit numbers, and
/// whether its blocks exchange through memory instead of being a cluster.
template <int kWidth_, bool kIs16Bit_, bool kExchangesInMemory_>
struct OnChipUse {
  static constexpr int kWidth = kWidth_;
  static constexpr bool kIs16Bit = kIs16Bit_;
  static constexpr bool kExchangesInMemory = kExchangesInMemory_;
};

/// The tile of a use, and how many sequences (vectors) it may take side by side. A block always has
/// a multiprocessor to itself.
template <class Use, int kVectors>
struct OnChipTile;

/// Numbers of sequences to choose from. 5 stands beside 4 and 8 for devices that hold a few
/// clusters less than there would have to be: where an H200 holds fewer than 16 clusters of 8
/// blocks, 64 sequences take one wave of 5 instead of two of 4.
template <class Use>
struct OnChipVectors {
  static constexpr std::array kChoices = {1, 2, 4};
};
template <bool kIs16Bit, bool kExchangesInMemory>
struct OnChipVectors<OnChipUse<512, kIs16Bit, kExchangesInMemory>> {
  static constexpr std::array kChoices = {2, 4, 5, 8};  // at most 8: each is a column of an mma
};

// Tiles for FFMA: a row has as many lanes as leave each thread at most 128 weights in registers.
//
//                            lanes  columns  rows in    rows in         blocks
//                            a row  a lane   registers  shared memory

// One block: nothing has to be exchanged.
template <int kVectors>
struct OnChipTile<OnChipUse<128, false, false>, kVectors> {
  using Tile = FmaTile<4, 32, 2, 0, kVectors, 1>;
};
// Two blocks of a cluster, 128 weights a thread.
template <int kVectors>
struct OnChipTile<OnChipUse<256, false, false>, kVectors> {
  using Tile = FmaTile<8, 32, 4, 0, kVectors, 2>;
};
// The largest cluster, of 16 blocks, has registers for half of the matrix; the other half lies in
// shared memory.
template <int kVectors>
struct OnChipTile<OnChipUse<1024, false, false>, kVectors> {
  using Tile = FmaTile<32, 32, 4, 4, kVectors, 16>;
};

// Tiles for tensor cores, of eight blocks.
//
//                            f16 numbers of an element, warps that share columns

// In a cluster. A 16-bit matrix takes half the registers, which leaves room for 64 columns a warp
// at a time: half as many sums of half as many rows. With a matrix of floats that spills.
template <bool kIs16Bit, int kVectors>
struct OnChipTile<OnChipUse<512, kIs16Bit, false>, kVectors> {
  using Tile = MmaTile<kVectors, kIs16Bit ? 1 : 2, kIs16Bit ? 2 : 1, ClusterExchange>;
};
// Through memory, where receiving costs most: parts of 32 columns, so that a warp polls few words.
template <bool kIs16Bit, int kVectors>
struct OnChipTile<OnChipUse<512, kIs16Bit, true>, kVectors> {
  using Tile = MmaTile<kVectors, kIs16Bit ? 1 : 2, 1, MemoryExchange>;
};

/// Calls visit<Tile>() with the tile for `vectors` sequences, one of the choices.
template <class Use, int kChoice = 0, class Visit>
cudaError_t with_on_chip_tile(int vectors, Visit visit) {
  constexpr auto& kChoices = OnChipVectors<Use>::kChoices;
  if constexpr (kChoice < static_cast<int>(kChoices.size())) {
    if (vectors == kChoices[kChoice]) {
      return visit.template operator()<typename OnChipTile<Use, kChoices[kChoice]>::Tile>();
    }
    return with_on_chip_tile<Use, kChoice + 1>(vectors, visit);
  }
  return cudaErrorInvalidValue;
}

// ---- Plans and launches ----
//
// The plan says how many sequences a block (or the blocks that share a matrix) takes side by side,
// which chooses the tile; the launch takes both from there.

/// A model of a step's time: kStepAlone (the exchange, the sums over lanes or warps, the gates) +
/// the sequences side by side, in units of what one more of them adds.
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
  // With every choice a block fills its multiprocessor, so as many groups fit: the last is asked
  // for all of them.
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
  for (const int vectors : OnChipVectors<Use>::kChoices) {
    const int64_t at_once = int64_t{groups} * vectors;
    const int64_t waves = (params.layout.sequences + at_once - 1) / at_once;
    const int64_t cost = waves * (kStepAlone + vectors);
    if (best == 0 || cost < best) {
      best = cost;
      plan->vectors = vectors;
    }
  }
  if constexpr (kExchangesInMemory) {
    return with_on_chip_tile<Use>(plan->vectors, [&]<class Tile>() {
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
  return with_on_chip_tile<Use>(params.plan.vectors, [&]<class Tile>() {
    return launch_on_chip<Tile>(&gated_rnn_on_chip_forward<Tile>, params, stream);
  });
}

template <int kWidth, bool kIs16Bit, bool kExchangesInMemory>
cudaError_t OnChipFamily<kWidth, kIs16Bit, kExchangesInMemory>::backward(
    const GatedRnnBackwardParams& params, cudaStream_t stream) {
  using Use = OnChipUse<kWidth, kIs16Bit, kExchangesInMemory>;
  return with_on_chip_tile<Use>(params.forward.plan.vectors, [&]<class Tile>() {
    return launch_on_chip<Tile>(&gated_rnn_on_chip_backward<Tile>, params, stream);
  });
}

}  // namespace tidegate::kernels::rnn
