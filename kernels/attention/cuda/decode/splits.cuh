#pragma once

// What the kernels of a decoding step share: how a cache is split, and what a split leaves behind.

#include "kernels/attention/forgetting_attention.h"

namespace tidegate::kernels::attention {

/// Tiles of step_kernel.
struct StepTile {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kHeads = 4;            // query heads that read a key together
  static constexpr int kChannelsPerLane = 8;  // of a row: 16 bytes of 16-bit data
  static constexpr int kKeysPerLane = 2;      // of the warp that turns a tile's scores to weights
  static constexpr int kTile = 32 * kKeysPerLane;  // keys of a tile, at most
  static constexpr int kTileBytes = 16384;         // of keys, and of values, in a stage
  static constexpr int kMostStages = 3;            // 96 KB, where a block may have so much
  static constexpr int kMaxDim = static_cast<int>(kMaxAttentionHeadDim);
};

/// Tiles of tensor_step_kernel.
struct TensorStepTile {
  static constexpr int kKeys = 16;  // the inner dimension of one product with V
  static constexpr int kHeads = 8;  // half the rows of a product: the other half has the remainders
  static constexpr int kStages =
      3;  // four leave room for six warps instead of eight: 4.4 -> 3.9 TB/s
};

constexpr int kLeastPart = 64;  // keys of a split, a multiple of every kernel's tile
static_assert(kLeastPart % StepTile::kTile == 0 && kLeastPart % TensorStepTile::kKeys == 0);

/// A partial result: o times its sum, then maximum, sum, and the sum of the part's gates.
__host__ __device__ constexpr int64_t partial_numbers(int64_t head_dim) { return head_dim + 3; }

/// Where the splits of one sequence lie: as equal as tiles allow, over the keys that it really has.
struct Splits {
  int64_t oldest, length, part;

  __device__ Splits(const ForgettingAttentionStepParams& p, int64_t batch) {
    length = max(int64_t{0}, min(int64_t{p.lengths[batch]}, p.capacity));
    oldest = p.window > 0 ? max(int64_t{0}, length - p.window) : 0;
    const int64_t equal = (length - oldest + p.plan.splits - 1) / p.plan.splits;
    part = (equal + kLeastPart - 1) / kLeastPart * kLeastPart;
  }
  __device__ int64_t begin(int64_t split) const { return min(length, oldest + split * part); }
  __device__ int64_t used() const { return part == 0 ? 0 : (length - oldest + part - 1) / part; }
};

}  // namespace tidegate::kernels::attention
