#pragma once

// Which tiles the forward pass takes, by head dimension.

#include "kernels/attention/cuda/smem_tiles.cuh"
#include "kernels/attention/cuda/work.cuh"

namespace tidegate::kernels::attention {

/// How a head dimension is cut: kWarps warps of 16 * kRowTiles queries; kKeys keys a copy, of which
/// kPart at a time are in registers; kBlocks blocks a multiprocessor; kKeep: queries and addresses
/// stay in registers, where there are enough.
template <class Data, int kHeadDim, int kRowTilesAWarp, int kWarpsABlock, int kKeysACopy,
          int kKeysAtOnce, int kBlocksPerSm, bool kKeepQueries = false>
struct ForwardShape {
  using T = Data;
  static constexpr int kDim = kHeadDim;
  static constexpr int kRowTiles = kRowTilesAWarp;
  static constexpr int kWarps = kWarpsABlock;
  static constexpr int kKeys = kKeysACopy;
  static constexpr int kPart = kKeysAtOnce;
  static constexpr int kBlocks = kBlocksPerSm;
  static constexpr bool kKeep = kKeepQueries;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarpRows * kWarps;
  static constexpr int kQueryBytes = HalfTile<kDim>::bytes(kRows);
  static constexpr int kKeyBytes = HalfTile<kDim>::bytes(kKeys);
  static constexpr int kStageBytes = 2 * kKeyBytes;  // keys, values
  static constexpr int kSharedBytes =
      kQueryBytes + 2 * kStageBytes + (2 * 2 * kKeys + 2 * kRows + 16) * int{sizeof(float)};
};

}  // namespace tidegate::kernels::attention
