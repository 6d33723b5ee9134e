#pragma once

// The plan of a scan and its launch. Every choice is made in the plan, once: which path a scan
// takes (sequential, single-block, multi-block), the tile configuration (by its regime), channels a
// thread, warps, and how many blocks share a sequence. The launch does as the plan says.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/integers.h"
#include "kernels/scan/cuda/engine/scan_kernel.cuh"
#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels::scan {

/// Whether all rows of the tensors can be accessed in packs of `vec` elements.
template <class Tensors>
bool packs_align(const Tensors& tensors, int64_t channels, int vec) {
  return channels % vec == 0 && std::all_of(tensors.begin(), tensors.end(), [&](const auto* t) {
           return t->data == nullptr || rows_aligned(*t, vec * element_size(t->dtype));
         });
}

template <class Op>
ScanChains chains_of(const SequenceLayout& layout, int64_t channels, int8_t sharing) {
  return ScanChains::of(layout.sequences, channels, kWarpSize * Op::kVec, sharing);
}

/// How many compute warps of a warp group have room, `most` or fewer.
template <class Op, ScanMode kMode>
int warps_that_fit(int most, const DeviceLimits& limits) {
  while (most > 1 && SharedLayout<Op, kMode>::bytes(most) > limits.shared_bytes) {
    --most;
  }
  return most;
}

/// How many blocks of a multi-block scan, with so many compute warps a warp group, the device holds
/// at once. The answer for device 0 is kept, by `warps`: most machines use no other, and on others
/// it is asked for every time.
template <class Op>
cudaError_t resident_blocks(int warps, const DeviceLimits& limits, int* blocks) {
  static SharedCount known[WarpGroupShape<Op>::kComputeWarps + 1];
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  int each = device == 0 ? known[warps].load() : 0;
  if (each == 0) {
    constexpr auto* kKernel = &scan_kernel<Op, ScanMode::kMultiBlock>;
    const int bytes = SharedLayout<Op, ScanMode::kMultiBlock>::bytes(warps);
    TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &each, kKernel, WarpGroupShape<Op>::kWarpGroups * (warps + 1) * kWarpSize, bytes));
    if (device == 0) {
      known[warps].store(each);
    }
  }
  *blocks = each * limits.multiprocessors;
  return cudaSuccess;
}

/// The work of a launch as the planner sees it.
struct ScanSize {
  int64_t chains;  // the blocks there are without splitting time
  int64_t chunks;  // of a sequence of mean length
};

template <class Op>
ScanSize scan_size(const SequenceLayout& layout, int64_t channels, int8_t sharing) {
  const int64_t sequences = std::max<int64_t>(1, layout.sequences);
  const int64_t length = layout.time * layout.batch / sequences;
  return {std::max<int64_t>(1, chains_of<Op>(layout, channels, sharing).count),
          std::max<int64_t>(1, ceil_div(length, Op::kSteps))};
}

/// The most warps of a single-block scan: the kMaxWarps warps for which an SM has registers are
/// shared among the blocks that it gets, four at least for each.
template <class Op>
int most_warps(const ScanSize& size, const DeviceLimits& limits) {
  const int64_t blocks_each = std::clamp<int64_t>(
      (size.chains + limits.multiprocessors - 1) / limits.multiprocessors, 1, kMaxWarps / 4);
  const auto most = static_cast<int>(std::clamp<int64_t>(size.chunks, 1, kMaxWarps / blocks_each));
  return warps_that_fit<Op, ScanMode::kSingleBlock>(most, limits);
}

/// How many warps a single-block scan has. Where rings hold all chunks of every sequence at once,
/// this many give each warp equally many chunks. With a few chunks more than warps, a state would
/// else pass all warps again, and each of them copy and decode a chunk that does not exist. (Packed
/// sequences may be longer than the mean.)
template <class Op>
int even_warps(const SequenceLayout& layout, int64_t chunks, int most) {
  const int64_t iterations = ceil_div(chunks, most);
  return layout.offsets == nullptr && iterations <= Op::kStages
             ? static_cast<int>(ceil_div(chunks, iterations))
             : most;
}

/// Plans as many blocks a sequence as the device holds, or fewer where these do with as many
/// iterations, and so few that each makes `iterations` of them, where the sequence is long enough.
/// Leaves the plan alone where the blocks do not fit.
template <class Op>
cudaError_t plan_multi_block(const ScanSize& size, const DeviceLimits& limits, int iterations,
                             ScanPlan* plan) {
  const int warps =
      warps_that_fit<Op, ScanMode::kMultiBlock>(WarpGroupShape<Op>::kComputeWarps, limits);
  int resident = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(resident_blocks<Op>(warps, limits, &resident));
  if (size.chains > resident) {
    return cudaSuccess;
  }
  // The steps of one block in one iteration: its warp groups' tiles together.
  const int64_t block_chunks = WarpGroupShape<Op>::kWarpGroups * warps;
  const int64_t block_tiles = ceil_div(size.chunks, block_chunks);
  const int64_t most = std::clamp<int64_t>(block_tiles / iterations, 1, resident / size.chains);
  const int64_t least_iterations = ceil_div(block_tiles, most);
  plan->split = TimeSplit::kMultiBlock;
  plan->blocks_per_sequence = static_cast<int>(ceil_div(block_tiles, least_iterations));
  plan->carry_group = carry_group_size<Op>(plan->blocks_per_sequence);
  plan->warps = static_cast<int16_t>(warps);
  plan->one_block_per_sm = false;
  plan->workspace_bytes = CarryWorkspace<Op>{size.chains, plan->blocks_per_sequence}.bytes();
  return cudaSuccess;
}

/// The Ops of one recurrence in the tile configurations of the three regimes.
template <class Recurrence, template <class> class Rowed>
struct OpsOfRegimes {
  template <Regime kRegime>
  using Op = typename Recurrence::template Op<Rowed, Recurrence::kVec, kRegime>;
  using SeveralBlocksPerSm = Op<Regime::kSeveralBlocksPerSm>;
  using OneBlockPerSm = Op<Regime::kOneBlockPerSm>;
  using MultiBlock = Op<Regime::kMultiBlock>;
};

/// Splits time when (sequences x channel tiles) alone would leave multiprocessors idle.
template <class Regimes>
cudaError_t plan_split(const SequenceLayout& layout, int64_t channels, TimeSplit request,
                       const DeviceLimits& limits, ScanPlan* plan) {
  using SeveralBlocksPerSm = typename Regimes::SeveralBlocksPerSm;
  using OneBlockPerSm = typename Regimes::OneBlockPerSm;
  using MultiBlock = typename Regimes::MultiBlock;
  if constexpr (kIsUnaligned<typename OneBlockPerSm::Data>) {
    plan->sharing = ScanChains::worth_sharing(layout, channels, kWarpSize * OneBlockPerSm::kVec,
                                              limits.multiprocessors);
  }
  const ScanSize size = scan_size<OneBlockPerSm>(layout, channels, plan->sharing);
  // With one block an SM there is one chain to wait for, and longer chunks make it shorter.
  plan->one_block_per_sm = size.chains <= limits.multiprocessors;
  const ScanSize short_chunks = scan_size<SeveralBlocksPerSm>(layout, channels, plan->sharing);
  const int most = plan->one_block_per_sm ? most_warps<OneBlockPerSm>(size, limits)
                                          : most_warps<SeveralBlocksPerSm>(short_chunks, limits);
  plan->warps = static_cast<int16_t>(
      plan->one_block_per_sm ? even_warps<OneBlockPerSm>(layout, size.chunks, most)
                             : even_warps<SeveralBlocksPerSm>(layout, short_chunks.chunks, most));
  // Less than two iterations leave nothing to share.
  const bool idle = size.chains * 2 <= limits.multiprocessors && size.chunks >= 2 * most;
  if (request == TimeSplit::kMultiBlock || (request == TimeSplit::kAuto && idle)) {
    const int iterations = request == TimeSplit::kMultiBlock ? 3 : 1;  // asked for: make some
    TIDEGATE_RETURN_IF_CUDA_ERROR(plan_multi_block<MultiBlock>(
        scan_size<MultiBlock>(layout, channels, plan->sharing), limits, iterations, plan));
  }
  const int warp_groups =
      plan->split == TimeSplit::kMultiBlock ? WarpGroupShape<MultiBlock>::kWarpGroups : 1;
  plan->partials = layout.sequences * plan->blocks_per_sequence * warp_groups;
  return cudaSuccess;
}

template <class Op>
cudaError_t launch_single_block(const typename Op::Params& params, const ScanLaunch& launch,
                                int64_t chains, int warps, cudaStream_t stream) {
  constexpr auto* kKernel = &scan_kernel<Op, ScanMode::kSingleBlock>;
  const int bytes = SharedLayout<Op, ScanMode::kSingleBlock>::bytes(warps);
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  return launch_unless_empty(kKernel, chains, warps * kWarpSize, bytes, stream, params, launch);
}

/// The blocks of a multi-block scan wait for each other, so they are launched together or not at
/// all (a cooperative launch).
template <class Op>
cudaError_t launch_multi_block(const typename Op::Params& params, const ScanLaunch& launch,
                               int64_t chains, int warps, cudaStream_t stream) {
  constexpr auto* kKernel = &scan_kernel<Op, ScanMode::kMultiBlock>;
  const int bytes = SharedLayout<Op, ScanMode::kMultiBlock>::bytes(warps);
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  const CarryWorkspace<Op> workspace = {chains, launch.blocks_per_sequence};
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(launch.carry_records, 0, workspace.bytes(), stream));  // before all epochs
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(chains * launch.blocks_per_sequence));
  config.blockDim = dim3(WarpGroupShape<Op>::kWarpGroups * (warps + 1) * kWarpSize);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kKernel, params, launch);
}

template <class Op>
cudaError_t launch_sequential(const typename Op::Params& params, cudaStream_t stream) {
  if constexpr (requires { Op::launch_sequential(params, stream); }) {
    return Op::launch_sequential(params, stream);  // a kernel of its own
  } else {
    constexpr int kThreads = 64;
    const auto& scan = recurrence_params(params);
    const ScanLaunch launch = {.channel_tiles = ceil_div(scan.channels, kThreads * Op::kVec)};
    const int64_t blocks = scan.layout.sequences * launch.channel_tiles;
    if (blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
    return launch_in_chain<&sequential_scan_kernel<Op>>(dim3(static_cast<unsigned>(blocks)),
                                                        dim3(kThreads), 0, stream, params, launch);
  }
}

/// Plans and launches one recurrence. `Recurrence` derives from this and has
///   Op<Rowed, kPack, kRegime>  the Op over packs of kPack channels, in the configuration of a
///                              regime; its elements are Rowed<T>, Aligned or Unaligned
///   kVec                       the pack that makes four bytes
///   tensors(params)            the tensors with a time axis
template <class Recurrence, class Params>
struct ScanRecurrence {
  /// The Op of the sequential scan. (A template, since Recurrence is not yet complete here.)
  template <class Of = Recurrence>
  using SequentialOp = typename Of::template Op<Aligned, 1, Regime::kSeveralBlocksPerSm>;

  static cudaError_t plan(const Params& params, ScanPlan* plan) {
    const auto& scan = recurrence_params(params);
    const SequenceLayout& layout = scan.layout;
    *plan = {};
    // A step or two leave nothing to divide, and a step may update its state in place. Both
    // directions have to agree: wkv4's saved states are natural logarithms in a sequential scan,
    // else binary.
    plan->sequential = sizeof(typename SequentialOp<>::Real) == 8 || layout.time <= 2;
    if (plan->sequential) {
      plan->partials = layout.sequences;
      return cudaSuccess;
    }
    DeviceLimits limits;
    TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
    const auto tensors = Recurrence::tensors(params);
    constexpr int kVec = Recurrence::kVec;
    const bool makes_a_tile = scan.channels >= kWarpSize * kVec;
    plan->wide_rows = makes_a_tile && packs_align(tensors, scan.channels, 4 * kVec);
    // Rows of a tile that are not aligned to 16 bytes are copied thread by thread in their aligned
    // form, which takes longer than their unaligned form does.
    using Wide = typename Recurrence::template Op<Aligned, kVec, Regime::kSeveralBlocksPerSm>;
    plan->unaligned_rows =
        kVec > 1 && (!packs_align(tensors, scan.channels, kVec) ||
                     (makes_a_tile && !plan->wide_rows && Ring<Wide>::kCanBeWide));
    return with_rows(*plan, [&]<template <class> class Rowed>() {
      using Regimes = OpsOfRegimes<Recurrence, Rowed>;
      return plan_split<Regimes>(layout, scan.channels, scan.time_split, limits, plan);
    });
  }

  static cudaError_t launch(const Params& params, cudaStream_t stream) {
    const auto& scan = recurrence_params(params);
    const ScanPlan& plan = scan.plan;
    if (scan.layout.sequences == 0 || scan.channels == 0) {
      return cudaSuccess;
    }
    if (plan.sequential) {
      return launch_sequential<SequentialOp<>>(params, stream);
    }
    return with_rows(plan, [&]<template <class> class Rowed>() {
      using Regimes = OpsOfRegimes<Recurrence, Rowed>;
      using SeveralBlocksPerSm = typename Regimes::SeveralBlocksPerSm;
      const ScanChains chains =
          chains_of<SeveralBlocksPerSm>(scan.layout, scan.channels, plan.sharing);
      const ScanLaunch launch = {.channel_tiles = chains.tiles,
                                 .blocks_per_sequence = plan.blocks_per_sequence,
                                 .carry_group = plan.carry_group,
                                 .wide_rows = plan.wide_rows,
                                 .sharing = chains.sharing,
                                 .carry_records = scan.workspace};
      if (plan.split == TimeSplit::kMultiBlock) {
        return launch_multi_block<typename Regimes::MultiBlock>(params, launch, chains.count,
                                                                plan.warps, stream);
      }
      return plan.one_block_per_sm ? launch_single_block<typename Regimes::OneBlockPerSm>(
                                         params, launch, chains.count, plan.warps, stream)
                                   : launch_single_block<SeveralBlocksPerSm>(
                                         params, launch, chains.count, plan.warps, stream);
    });
  }

 private:
  /// Calls `visit` with what the plan says of the rows as a template argument. Packs of one are
  /// always aligned. Double precision, which the sequential scan takes, has no other kernels.
  template <class Visit>
  static cudaError_t with_rows(const ScanPlan& plan, Visit visit) {
    if constexpr (sizeof(typename SequentialOp<>::Real) == 8) {
      return cudaErrorInvalidValue;
    } else if constexpr (Recurrence::kVec == 1) {
      return visit.template operator()<Aligned>();
    } else {
      return plan.unaligned_rows ? visit.template operator()<Unaligned>()
                                 : visit.template operator()<Aligned>();
    }
  }
};

}  // namespace tidegate::kernels::scan
