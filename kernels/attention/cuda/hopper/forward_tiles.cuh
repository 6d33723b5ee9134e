#pragma once

// The tiles of the Hopper forward kernel, with the reason beside each, and what a launch is told.
// Those of the backward kernels are in select.cuh.

#include "kernels/attention/cuda/hopper/select.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/hopper.cuh"
#include "kernels/common/cuda/tensor_map.h"

namespace tidegate::kernels::attention {

/// What a launch of the forward kernel is told.
struct HopperForwardWork {
  TensorAttention attention = {};
  CUtensorMap q = {}, k = {}, v = {};
  unsigned* next_item = nullptr;  // zero before: items taken besides each block's first
};

template <class Data>
struct HopperForwardUnit {
  /// Fills in the maps, and what of the work depends on tiles.
  static cudaError_t launch(const HopperForwardWork& work, cudaStream_t stream);
};

// Named barriers of a block (0 is __syncthreads').
constexpr int kTurnBarrier = 1;  // to 3: a math warpgroup's turn to issue products
constexpr int kMathBarrier = 4;

/// A row of the forward kernel's table.
struct HopperForwardTile {
  int dim;                  // D, padded
  int groups;               // math warpgroups, of 64 queries each
  int keys;                 // of a stage
  bool pack_early = false;  // weights have two places: packed before P V of the last tile has ended
};

template <class Data, HopperForwardTile kTile>
struct HopperForwardShape {
  using T = Data;
  static constexpr int kDim = kTile.dim;
  static constexpr int kRowTiles = 1;
  static constexpr int kGroups = kTile.groups;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kKeys = kTile.keys;
  static constexpr int kPart = kKeys;
  static constexpr bool kPackEarly = kTile.pack_early;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kQueryBytes = hopper::Panels<kRows>::bytes(kDim);
  static constexpr int kKeyBytes = hopper::Panels<kKeys>::bytes(kDim);
  // A multiprocessor has 65536 registers.
  static constexpr int kMathRegisters = kGroups == 3 ? 160 : 232;
  static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kOtherBytes = 4 * (kKeys + kRows) * int{sizeof(float)} + 512;
  // Items whose queries have a place. Where there is room for two, the second item's queries are
  // looked at (see ForwardRowGates::prune) and there when the first item ends. Above a head
  // dimension of 128 there is none, and one place is enough: it is free as soon as the item's last
  // scores are there, and the next queries are copied behind the next item's first keys while the
  // last P V, the division by the sums and the stores of o go on.
  static constexpr int kQueryStages =
      2 * kQueryBytes + 4 * kKeyBytes + kOtherBytes <= kHopperSharedBytes ? 2 : 1;
  static constexpr int kSharedBytes = kQueryStages * kQueryBytes + 4 * kKeyBytes + kOtherBytes;
  static_assert(kSharedBytes <= kHopperSharedBytes);
};

/// Calls f.template operator()<Shape>() with the shape of a head dimension.
template <class T, class F>
cudaError_t with_hopper_forward_shape(int64_t dim, const F& f) {
  // clang-format off
  //                                           dim groups keys
  // More is exponentials than products: the next scores begin as soon as the weights of these are
  // packed, which 96 keys leave registers for.
  using D64  = HopperForwardShape<T, HopperForwardTile{ 64, 3,  96, true}>;
  using D96  = HopperForwardShape<T, HopperForwardTile{ 96, 2, 128}>;
  using D128 = HopperForwardShape<T, HopperForwardTile{128, 2, 128}>;
  // Outputs of 96 and 128 registers leave room for fewer scores.
  using D192 = HopperForwardShape<T, HopperForwardTile{192, 2,  96}>;
  using D256 = HopperForwardShape<T, HopperForwardTile{256, 2,  64}>;
  return dim <= 64    ? f.template operator()<D64>()
         : dim <= 96  ? f.template operator()<D96>()
         : dim <= 128 ? f.template operator()<D128>()
         : dim <= 192 ? f.template operator()<D192>()
                      : f.template operator()<D256>();
  // clang-format on
}

}  // namespace tidegate::kernels::attention
