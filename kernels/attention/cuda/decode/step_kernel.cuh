#pragma once

// A decoding step on CUDA cores: any dtype, any D, rows of any alignment.
//
// A block takes one split of one key/value head, for up to kHeads of its query heads at a time, and
// iterates over tiles of keys from the newest back. A row of K or V is shared by as few lanes as
// hold it, kChannelsPerLane channels each; the other lanes take other rows.
//
//   scores = q . k    one warp a head turns them into weights    o = o * shrink + weights . V
//
// Tiles are copied to shared memory step.stages - 1 ahead, each number by the lane that will read
// it, so copies need no barrier. Two barriers a tile are for what the block exchanges: the scores,
// and the weights that one warp a head makes of them.

#include "kernels/attention/cuda/rows.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::attention {

/// What a launch is told.
struct Step {
  ForgettingAttentionStepParams params = {};
  int lanes_a_row = 0;  // that share a row, a power of two
  int tile = 0;         // keys of a tile, at most StepTile::kTile
  int tile_bytes = 0;   // of keys, and of values, a multiple of 16
  int stages = 0;       // tiles under way or in use
};

/// How a lane's StepTile::kChannelsPerLane numbers of a row lie: packs of kVec,
/// StepTile::kChannelsPerLane / kVec of them.
template <class E, int kVec>
struct RowPacks {
  using Real = typename Register<E>::type;
  using Bits = typename Pack<E, kVec>::Bits;
  static constexpr int kPacks = StepTile::kChannelsPerLane / kVec;
  Pack<E, kVec> packs[kPacks];

  /// Where pack n of a lane begins.
  __device__ static int channel(int n, int row_lane, int lanes) {
    return (row_lane + n * lanes) * kVec;
  }

  __device__ void load(const E* row, int row_lane, int lanes, int dim) {
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
      const int d = channel(n, row_lane, lanes);
      packs[n] = {};
      if (d < dim) {
        packs[n].bits = *reinterpret_cast<const Bits*>(row + d);
      }
    }
  }
  /// The lane's part of a row, on its way to shared memory: only this lane reads it there.
  __device__ static void copy(E* to, const E* row, int row_lane, int lanes, int dim) {
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
      const int d = channel(n, row_lane, lanes);
      if (d < dim) {
        copy_async<kVec* static_cast<int>(sizeof(E))>(to + d, row + d);
      }
    }
  }
  __device__ Real get(int i) const { return packs[i / kVec].get(i % kVec); }
};

template <class E, int kVec>
__device__ int channel_of(int i, int row_lane, int lanes) {
  return RowPacks<E, kVec>::channel(i / kVec, row_lane, lanes) + i % kVec;
}

/// Sums dots over the lanes of a row and stores them at `scores`, one a head. Each exchange halves
/// the heads that a lane still adds up, as long as there are lanes for that.
template <class Real>
__device__ void store_sums(const Real (&dots)[StepTile::kHeads], int row_lane, int lanes,
                           bool exists, Real* scores) {
  static_assert(StepTile::kHeads == 4);
  if (lanes >= 4) {
    const bool high = (row_lane & (lanes / 2)) != 0, odd = (row_lane & (lanes / 4)) != 0;
    const Real a =
        (high ? dots[2] : dots[0]) + __shfl_xor_sync(~0u, high ? dots[0] : dots[2], lanes / 2);
    const Real b =
        (high ? dots[3] : dots[1]) + __shfl_xor_sync(~0u, high ? dots[1] : dots[3], lanes / 2);
    Real sum = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, lanes / 4);
    for (int s = lanes / 8; s > 0; s /= 2) {
      sum += __shfl_xor_sync(~0u, sum, s);
    }
    if ((row_lane & (lanes / 4 - 1)) == 0 && exists) {
      scores[2 * high + odd] = sum;
    }
    return;
  }
#pragma unroll
  for (int h = 0; h < StepTile::kHeads; ++h) {
    Real sum = dots[h];
    if (lanes == 2) {
      sum += __shfl_xor_sync(~0u, sum, 1);
    }
    if (row_lane == 0 && exists) {
      scores[h] = sum;
    }
  }
}

// ---- The online softmax over the tiles of a split ----
//
// Tiles come from the newest back, and so do the gates: a key's bias is the sum of the gates of all
// newer keys, in float64.

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

// ---- The kernel ----

/// Where a block works: one split of one key/value head, in tiles from the newest key back.
template <class E, int kVec>
struct StepBlock {
  using Packs = RowPacks<E, kVec>;

  const Step& step;
  const ForgettingAttentionStepParams& p;
  unsigned char* shared;
  int warp, lane;               // of the block, of the warp
  int lanes, row_lane;          // lanes that share a row, and which of them
  int rows_a_block, first_row;  // rows that the block takes at once; this lane's first of a tile
  int dim;
  int64_t batch, key_head, split, group;
  int64_t begin, end;  // keys of the split
  int tiles;
  AttentionRows<const E> keys, values;

  __device__ __forceinline__ StepBlock(const Step& work, unsigned char* smem)
      : step(work),
        p(work.params),
        shared(smem),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        lanes(work.lanes_a_row),
        row_lane(lane % lanes),
        rows_a_block(StepTile::kThreads / lanes),
        first_row(static_cast<int>(threadIdx.x) / lanes),
        dim(static_cast<int>(p.head_dim)),
        batch(blockIdx.z),
        key_head(blockIdx.y),
        split(blockIdx.x),
        group(p.heads / p.key_heads),
        keys(p.k, batch, 0, key_head),
        values(p.v, batch, 0, key_head) {
    const Splits splits(p, batch, key_head);
    begin = splits.begin(split);
    end = splits.begin(split + 1);
    tiles = static_cast<int>((end - begin + step.tile - 1) / step.tile);
  }

  /// A tile's keys are [first_key, last_key).
  __device__ int64_t last_key(int tile) const { return end - int64_t{tile} * step.tile; }
  __device__ int64_t first_key(int tile) const { return max(begin, last_key(tile) - step.tile); }

  __device__ E* keys_at(int tile) const {
    return reinterpret_cast<E*>(shared + tile % step.stages * 2 * step.tile_bytes);
  }
  __device__ E* values_at(int tile) const {
    return reinterpret_cast<E*>(shared + (tile % step.stages * 2 + 1) * step.tile_bytes);
  }

  /// Starts the copies of a tile, each number by the lane that will read it; one group of copies.
  __device__ __forceinline__ void load_stage(int tile) const {
    if (tile < tiles) {
      const int64_t first = first_key(tile);
      const auto count = static_cast<int>(last_key(tile) - first);
      for (int j = first_row; j < count; j += rows_a_block) {
        Packs::copy(keys_at(tile) + j * dim, keys.row(first + j), row_lane, lanes, dim);
      }
      for (int j = first_row; j < count; j += rows_a_block) {
        Packs::copy(values_at(tile) + j * dim, values.row(first + j), row_lane, lanes, dim);
      }
    }
    commit_copies();
  }
  __device__ __forceinline__ void wait_for_stage() const {
    if (step.stages > 2) {
      wait_for_copies<StepTile::kMostStages - 2>();
    } else {
      wait_for_copies<0>();
    }
  }
};

/// A lane's share of up to StepTile::kHeads query heads: its channels of the queries and of the
/// outputs.
template <class E, int kVec>
struct StepHeads {
  using Real = typename Register<E>::type;
  using Packs = RowPacks<E, kVec>;
  using Weights =
      Real (*)[StepTile::kHeads];  // [StepTile::kTile][StepTile::kHeads] in shared memory

  int64_t first_head;
  int heads;
  Real query[StepTile::kHeads][StepTile::kChannelsPerLane],
      sums[StepTile::kHeads][StepTile::kChannelsPerLane] = {};

  __device__ __forceinline__ StepHeads(const StepBlock<E, kVec>& at, int64_t first)
      : first_head(first),
        heads(static_cast<int>(
            min(int64_t{StepTile::kHeads}, (at.key_head + 1) * at.group - first_head))) {}

  __device__ __forceinline__ void load_queries(const StepBlock<E, kVec>& at) {
#pragma unroll
    for (int h = 0; h < StepTile::kHeads; ++h) {
      const E* q =
          AttentionRows<const E>(at.p.q, at.batch, 0, first_head + min(h, heads - 1)).first;
#pragma unroll
      for (int i = 0; i < StepTile::kChannelsPerLane; ++i) {
        const int d = channel_of<E, kVec>(i, at.row_lane, at.lanes);
        query[h][i] =
            d < at.dim ? static_cast<Real>(at.p.scale) * static_cast<Real>(widen(q[d])) : Real(0);
      }
    }
  }

  /// q . k of the tile's `count` keys, into shared memory.
  __device__ __forceinline__ void compute_scores(const StepBlock<E, kVec>& at, const E* keys,
                                                 int count, Weights scores) const {
    for (int j = at.first_row; j - at.first_row < count; j += at.rows_a_block) {  // whole warps
      Packs key = {};
      if (j < count) {
        key.load(keys + j * at.dim, at.row_lane, at.lanes, at.dim);
      }
      Real dots[StepTile::kHeads];
#pragma unroll
      for (int h = 0; h < StepTile::kHeads; ++h) {
        dots[h] = 0;
#pragma unroll
        for (int i = 0; i < StepTile::kChannelsPerLane; ++i) {
          dots[h] = fused(query[h][i], key.get(i), dots[h]);
        }
      }
      store_sums(dots, at.row_lane, at.lanes, j < count, scores[min(j, count - 1)]);
    }
  }

  __device__ __forceinline__ void rescale(const Real (&factors)[StepTile::kHeads]) {
#pragma unroll
    for (int h = 0; h < StepTile::kHeads; ++h) {
      const Real factor = h < heads ? factors[h] : Real(0);
#pragma unroll
      for (int i = 0; i < StepTile::kChannelsPerLane; ++i) {
        sums[h][i] *= factor;
      }
    }
  }

  __device__ __forceinline__ void accumulate_pv(const StepBlock<E, kVec>& at, const E* values,
                                                int count, Weights weights) {
    for (int j = at.first_row; j < count; j += at.rows_a_block) {
      Packs value;
      value.load(values + j * at.dim, at.row_lane, at.lanes, at.dim);
      Real weight[StepTile::kHeads];
#pragma unroll
      for (int h = 0; h < StepTile::kHeads; ++h) {
        weight[h] = weights[j][h];
      }
#pragma unroll
      for (int h = 0; h < StepTile::kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < StepTile::kChannelsPerLane; ++i) {
          sums[h][i] = fused(weight[h], value.get(i), sums[h][i]);
        }
      }
    }
  }

  /// The split's partial results: sums over the lanes that hold a channel, then over the warps, in
  /// shared memory that no tile needs any more.
  __device__ __forceinline__ void store_partials(const StepBlock<E, kVec>& at,
                                                 const SplitSoftmax<Real>& state) const {
    Real* const rows = reinterpret_cast<Real*>(at.shared);
    const int64_t stride = partial_numbers(at.p.head_dim);
#pragma unroll
    for (int h = 0; h < StepTile::kHeads; ++h) {
      if (h >= heads) break;
      Real* const partial =
          static_cast<Real*>(at.p.workspace) +
          ((at.batch * at.p.heads + first_head + h) * gridDim.x + at.split) * stride;
#pragma unroll
      for (int i = 0; i < StepTile::kChannelsPerLane; ++i) {
        Real sum = sums[h][i];
        for (int s = at.lanes; s < 32; s *= 2) {
          sum += __shfl_xor_sync(~0u, sum, s);
        }
        const int d = channel_of<E, kVec>(i, at.row_lane, at.lanes);
        if (at.lane < at.lanes && d < at.dim) {
          rows[at.warp * StepTile::kMaxDim + d] = sum;
        }
      }
      if (at.warp == h && at.lane == 0) {
        partial[at.dim] = state.maximum;
        partial[at.dim + 1] = state.total;
        partial[at.dim + 2] = static_cast<Real>(state.gates);
      }
      __syncthreads();
      for (int d = static_cast<int>(threadIdx.x); d < at.dim; d += StepTile::kThreads) {
        Real sum = 0;
        for (int w = 0; w < StepTile::kWarps; ++w) {
          sum += rows[w * StepTile::kMaxDim + d];
        }
        partial[d] = sum;
      }
      __syncthreads();
    }
  }
};

template <class E, int kVec>
__global__ void __launch_bounds__(StepTile::kThreads, sizeof(E) == 8 ? 1 : 2)
    step_kernel(const Step step) {
  using Real = typename Register<E>::type;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ __align__(16) Real scores[2][StepTile::kTile][StepTile::kHeads];
  __shared__ Real shrink[2][StepTile::kHeads];
  const StepBlock<E, kVec> at(step, shared);
  for (int64_t first_head = at.key_head * at.group; first_head < (at.key_head + 1) * at.group;
       first_head += StepTile::kHeads) {
    for (int tile = 0; tile < step.stages - 1; ++tile) {
      at.load_stage(tile);
    }
    StepHeads<E, kVec> heads(at, first_head);
    heads.load_queries(at);
    SplitSoftmax<Real> state;  // of head `at.warp`, where there is one
    const bool weighs = at.warp < heads.heads;
    const AttentionRows<const Real> log_f(at.p.log_f, at.batch, 0,
                                          first_head + min(at.warp, heads.heads - 1));
    Real gates[StepTile::kKeysPerLane] = {};
    if (weighs) {
      state.load_gates(log_f, at.first_key(0), at.end, at.lane, gates);
    }
    for (int tile = 0; tile < at.tiles; ++tile) {
      const int64_t first = at.first_key(tile);
      const auto count = static_cast<int>(at.last_key(tile) - first);
      Real(*const weights)[StepTile::kHeads] = scores[tile % 2];
      at.wait_for_stage();
      heads.compute_scores(at, at.keys_at(tile), count, weights);
      __syncthreads();                        // the scores are there
      at.load_stage(tile + step.stages - 1);  // where the tile before this one was
      if (weighs) {
        const Real factor = state.weigh(weights, at.warp, count, at.lane, gates);
        state.load_gates(log_f, max(at.begin, first - step.tile), first, at.lane, gates);
        if (at.lane == 0) {
          shrink[tile % 2][at.warp] = factor;
        }
      }
      __syncthreads();  // the weights are there
      heads.rescale(shrink[tile % 2]);
      heads.accumulate_pv(at, at.values_at(tile), count, weights);
    }
    wait_for_copies<0>();
    __syncthreads();  // the stages are free: the warps' sums meet there
    heads.store_partials(at, state);
  }
}

}  // namespace tidegate::kernels::attention
