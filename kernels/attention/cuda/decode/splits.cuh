#pragma once

// What the kernels of a decoding step share: how a cache is split, and what a split leaves behind.

#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/attention/forgetting_attention.h"

namespace tidegate::kernels::attention {

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
