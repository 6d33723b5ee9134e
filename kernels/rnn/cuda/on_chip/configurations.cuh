#pragma once

// Every configuration of the kernels that keep the matrix on the chip, and why it is that one.

#include <array>

#include "kernels/rnn/cuda/on_chip/fma_matrix.cuh"
#include "kernels/rnn/cuda/on_chip/mma_matrix.cuh"

namespace tidegate::kernels::rnn {

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

/// Numbers of sequences to choose from. In between, what costs least where the device holds a few
/// clusters less than there would have to be.
template <class Use>
struct OnChipVectors {
  static constexpr std::array kChoices = {1, 2, 4};
};
template <bool kIs16Bit, bool kExchangesInMemory>
struct OnChipVectors<OnChipUse<512, kIs16Bit, kExchangesInMemory>> {
  static constexpr std::array kChoices = {2, 4, 5, 8};  // a column of an mma each
};

// By FFMA: as many lanes a row as leave each thread at most 128 weights in registers.
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

// By tensor cores, eight blocks.
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

}  // namespace tidegate::kernels::rnn
