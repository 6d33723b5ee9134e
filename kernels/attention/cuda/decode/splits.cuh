#pragma once

// What the kernels of a decoding step share: how a cache is split, what a split leaves behind, and
// the online softmax over the tiles of a split. Tiles come from the newest back, and so do the
// gates: a key's bias is the sum of the gates of all newer keys, in float64.

#include "kernels/attention/cuda/rows.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::attention {

constexpr int kLeastSplit = 64;  // keys of a split, a multiple of every kernel's tile
static_assert(kLeastSplit % StepTile::kTile == 0 && kLeastSplit % TensorStepTile::kKeys == 0);

/// A partial result: o times its sum, then maximum, sum, and the sum of the split's gates.
__host__ __device__ constexpr int64_t partial_numbers(int64_t head_dim) { return head_dim + 3; }

/// Where the splits of one sequence lie: as equal as tiles allow, over the keys that it really has.
struct Splits {
  int64_t oldest, length;
  int64_t keys;  // of a split

  __device__ Splits(const ForgettingAttentionStepParams& p, int64_t batch) {
    length = max(int64_t{0}, min(int64_t{p.lengths[batch]}, p.capacity));
    oldest = p.window > 0 ? max(int64_t{0}, length - p.window) : 0;
    const int64_t equal = (length - oldest + p.plan.splits - 1) / p.plan.splits;
    keys = (equal + kLeastSplit - 1) / kLeastSplit * kLeastSplit;
  }
  __device__ int64_t begin(int64_t split) const { return min(length, oldest + split * keys); }
  __device__ int64_t used() const { return keys == 0 ? 0 : (length - oldest + keys - 1) / keys; }
};

/// What a warp knows of the head that it weighs, the same in all of its lanes.
template <class Real>
struct SplitSoftmax {
  Real maximum = -static_cast<Real>(INFINITY), total = 0;
  double gates = 0;  // from the newest key of the split back

  /// Gates of a lane's keys in the tile [first, last), from the newest back; zero before it.
  __device__ static void load_gates(const AttentionRows<const Real>& log_f, int64_t first,
                                    int64_t last, int lane, Real (&gates)[StepTile::kKeysPerLane]) {
#pragma unroll
    for (int i = 0; i < StepTile::kKeysPerLane; ++i) {
      const int64_t j = last - 1 - StepTile::kKeysPerLane * lane - i;
      gates[i] = j >= first ? *log_f.row(j) : Real(0);
    }
  }

  /// Scores of the tile's `count` keys become weights against the largest score so far; returns
  /// the factor that earlier weights shrink by. `log_f`: of the lane's keys, from the newest back.
  __device__ Real weigh(Real (*scores)[StepTile::kHeads], int head, int count, int lane,
                        const Real (&log_f)[StepTile::kKeysPerLane]) {
    double gate[StepTile::kKeysPerLane], sum_of_lane = 0;
#pragma unroll
    for (int i = 0; i < StepTile::kKeysPerLane; ++i) {
      gate[i] = static_cast<double>(log_f[i]);
      gate[i] = gate[i] < kLeastLogGate ? kLeastLogGate : gate[i];
      sum_of_lane += gate[i];
    }
    double through = sum_of_lane;  // of this lane's keys and all after them
#pragma unroll
    for (int s = 1; s < 32; s *= 2) {
      const double newer = __shfl_up_sync(~0u, through, s);
      through += lane >= s ? newer : 0.0;
    }
    double after = __shfl_up_sync(~0u, through, 1);  // of the keys after this lane's
    after = gates + (lane == 0 ? 0.0 : after);
    Real score[StepTile::kKeysPerLane], top = maximum;
#pragma unroll
    for (int i = 0; i < StepTile::kKeysPerLane; ++i) {
      const int j = count - 1 - StepTile::kKeysPerLane * lane - i;
      if (j >= 0) {
        score[i] = static_cast<Real>(static_cast<double>(scores[j][head]) + after);
        top = larger(top, score[i]);
      }
      after += gate[i];
    }
    gates += __shfl_sync(~0u, through, 31);
    top = warp_max(top);
    const Real against = top == -static_cast<Real>(INFINITY) ? Real(0) : top;
    Real sum = 0;
#pragma unroll
    for (int i = 0; i < StepTile::kKeysPerLane; ++i) {
      const int j = count - 1 - StepTile::kKeysPerLane * lane - i;
      if (j >= 0) {
        const Real weight = exponential(score[i] - against);
        scores[j][head] = weight;
        sum += weight;
      }
    }
    const Real factor = exponential(maximum - against);
    total = fused(total, factor, warp_sum(sum));
    maximum = top;
    return factor;
  }
};

/// The weights of a lane's four keys, of which the first `missing` do not exist, and what earlier
/// weights shrink by. Gates go from the newest token back: `gates` is their sum over the split's
/// newer tiles.
struct TensorStepSoftmax {
  float maximum = -INFINITY;
  float total = 0;  // of this lane's keys
  double gates = 0;

  __device__ float weigh(const float (&dots)[2][4], const float (&log_f)[4], double scale,
                         int missing, float (&weights)[4]) {
    const int c = threadIdx.x % 4;
    double after[4], sum = 0;  // of this lane's gates, newer ones first
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      after[i] = sum;
      const double gate = static_cast<double>(log_f[i]);
      sum += gate < kLeastLogGate ? kLeastLogGate : gate;
    }
    double through = sum;  // and of the lanes whose keys are newer
#pragma unroll
    for (int s = 1; s < 4; s *= 2) {
      const double newer = __shfl_down_sync(~0u, through, s, 4);
      through += c + s < 4 ? newer : 0.0;
    }
    const double newer = __shfl_down_sync(~0u, through, 1, 4);
    const double offset = gates + (c < 3 ? newer : 0.0);
    gates += __shfl_sync(~0u, through, 0, 4);
    float scores[4], top = maximum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double score = fma(static_cast<double>(dots[i / 2][i % 2]), scale, after[i] + offset);
      scores[i] = i >= missing ? static_cast<float>(score) : -INFINITY;
      top = fmaxf(top, scores[i]);
    }
    top = quad_max(top);
    const float against = top == -INFINITY ? 0.0f : top;
    const float factor = expf(maximum - against);
    maximum = top;
    total *= factor;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = expf(scores[i] - against);
      total += weights[i];
    }
    return factor;
  }
};

}  // namespace tidegate::kernels::attention
