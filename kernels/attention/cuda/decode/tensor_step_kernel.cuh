#pragma once

// A decoding step of 16-bit data on tensor cores.
//
// A warp takes a split of one key/value head alone, for eight of its query heads at a time. Its
// keys and values come 16 at a time into a ring of its own, kStages - 1 tiles ahead, so that no
// warp waits for another: there is no barrier but the warp's own, before a stage is loaded again.
//
//   dots = q . k (m16n8k16, half of whose rows are zero)      weights = softmax so far
//   sums += weights . V
//
// The rows of the second product are query heads: eight with weights rounded to 16 bits, and the
// same eight with what the rounding has left, which keeps the weights' digits at no cost.

#include "kernels/attention/cuda/rows.cuh"
#include "kernels/attention/cuda/smem_tiles.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::attention {

/// Key of a tile that lies in row r of shared memory: lane c of four then holds the scores of keys
/// 4c .. 4c + 3, and its weights are the operand that rows 2c, 2c + 1, 2c + 8, 2c + 9 of V want.
__device__ inline int step_key_of_row(int r) { return (r & 6) * 2 + (r & 1) + (r >> 3) * 2; }

/// What rounding to E leaves of a number.
template <class E>
__device__ inline float rounded_off(float x) {
  return x - static_cast<float>(widen(narrow<E>(x)));
}

// ---- The online softmax over the tiles of a split ----
//
// Tiles come from the newest back, and so do the gates: a key's bias is the sum of the gates of all
// newer keys, in float64.

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

// ---- The kernel ----

/// Where a warp works: one split of one key/value head, in tiles from the newest key back.
template <class E, int kDim, int kRingStages = TensorStepTile::kStages>
struct TensorStepWarp {
  using Tile = Tile16Bit<kDim>;
  static constexpr int kKeys = TensorStepTile::kKeys, kStages = kRingStages;
  static constexpr int kTileBytes = Tile::bytes(kKeys);
  static constexpr int kRingBytes = kStages * 2 * kTileBytes;
  static constexpr int kGateBytes = kStages * 32 * 4 * 4;

  const ForgettingAttentionStepParams& p;
  unsigned ring;  // kStages tiles of keys and values
  float* gates;   // kStages times four of each lane
  int lane, row, c, dim;
  int64_t batch, key_head;
  int64_t begin, end;  // keys of the split
  int tiles;
  int64_t group;
  AttentionRows<const E> keys, values;

  /// Takes keys [first, last) of sequence blockIdx.z and head blockIdx.y.
  __device__ __forceinline__ TensorStepWarp(const ForgettingAttentionStepParams& params,
                                            unsigned ring, float* gates, int64_t first,
                                            int64_t last)
      : p(params),
        ring(ring),
        gates(gates),
        lane(threadIdx.x % 32),
        row(lane / 4),
        c(lane % 4),
        dim(static_cast<int>(p.head_dim)),
        batch(blockIdx.z),
        key_head(blockIdx.y),
        group(p.heads / p.key_heads),
        keys(p.k, batch, 0, key_head),
        values(p.v, batch, 0, key_head) {
    take(first, last);
  }

  __device__ __forceinline__ void take(int64_t first, int64_t last) {
    begin = first;
    end = last;
    tiles = static_cast<int>((last - first + kKeys - 1) / kKeys);
  }

  /// The oldest key of a tile, which may lie before `begin`.
  __device__ int64_t first_key(int tile) const { return end - (tile + int64_t{1}) * kKeys; }
  __device__ unsigned stage(int tile) const { return ring + tile % kStages * 2 * kTileBytes; }

  /// Starts the copies of a tile, one group of them.
  __device__ __forceinline__ void load_stage(int tile) const {
    constexpr int kRowsAtOnce = 32 / Tile::kPieces;  // that the warp copies
    if (tile < tiles) {
      const int64_t first = first_key(tile);
      const unsigned to = stage(tile);
      const int piece = lane % Tile::kPieces;
#pragma unroll
      for (int i = 0; i < kKeys; i += kRowsAtOnce) {
        const int r = i + lane / Tile::kPieces;
        const int64_t j = first + step_key_of_row(r);
        const bool exists = j >= begin && piece * 8 < dim;
        const int64_t at = exists ? j * keys.step + piece * 8 : 0;
        copy_async_or_zero(to + Tile::offset(r, piece), keys.first + at, exists);
        const int64_t value_at = exists ? j * values.step + piece * 8 : 0;
        copy_async_or_zero(to + kTileBytes + Tile::offset(r, piece), values.first + value_at,
                           exists);
      }
    }
    commit_copies();
  }
};

/// A lane's share of up to eight query heads: head `head` with the other three lanes of its row.
template <class E, int kDim, int kStages = TensorStepTile::kStages>
struct TensorStepHead {
  using Warp = TensorStepWarp<E, kDim, kStages>;
  static constexpr int kSteps = kDim / 16;

  int64_t head;
  bool used;
  AttentionRows<const float> log_f;
  uint32_t query[kSteps][2];
  float sums[2 * kSteps][4] = {};  // [0..1]: of rounded weights, [2..3]: of the remainders

  __device__ __forceinline__ TensorStepHead(const Warp& at, int64_t first_head)
      : head(first_head + at.row),
        used(head < (at.key_head + 1) * at.group),
        log_f(at.p.log_f, at.batch, 0, used ? head : first_head) {}

  __device__ __forceinline__ void load_queries(const Warp& at) {
    const AttentionRows<const E> queries(at.p.q, at.batch, 0, used ? head : head - at.row);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = 16 * s + 8 * half + 2 * at.c;
        E pair[2] = {narrow<E>(0.0f), narrow<E>(0.0f)};
        if (used && d < at.dim) {
          pair[0] = queries.first[d];
          pair[1] = queries.first[d + 1];
        }
        memcpy(&query[s][half], pair, sizeof(pair));
      }
    }
  }

  /// The gates of the lane's keys of a tile come with it: from device memory, where one tile is too
  /// short for their way.
  __device__ __forceinline__ void copy_gates(const Warp& at, int tile) const {
    float* const to = gates_of(at, tile);
    const int64_t first = at.first_key(tile) + 4 * at.c;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (used && tile < at.tiles && first + i >= at.begin) {
        copy_async<4>(to + i, log_f.row(first + i));
      } else {
        to[i] = 0.0f;
      }
    }
  }
  __device__ __forceinline__ float* gates_of(const Warp& at, int tile) const {
    return at.gates + (tile % Warp::kStages * 32 + at.lane) * 4;
  }

  /// dots = q . k of the lane's four keys.
  __device__ __forceinline__ void compute_scores(const Warp& at, unsigned stage,
                                                 float (&dots)[2][4]) const {
    const auto keys = OperandReader<kDim>::b(stage, at.lane);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint32_t m[4];
      keys.load(m, 0, s);
      const uint32_t a[4] = {query[s][0], 0, query[s][1], 0};
      mma<E>(dots[0], a, m[0], m[1]);
      mma<E>(dots[1], a, m[2], m[3]);
    }
  }

  /// Keys before `begin` come first in a lane's four: those that exist are the last ones.
  __device__ int missing_keys(const Warp& at, int tile) const {
    const int64_t oldest = at.first_key(tile) + 4 * at.c;
    return static_cast<int>(max(int64_t{0}, min(int64_t{4}, at.begin - oldest)));
  }

  __device__ __forceinline__ void rescale(float factor) {
    if (__any_sync(~0u, factor != 1.0f)) {
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[n][i] *= factor;
        }
      }
    }
  }

  __device__ __forceinline__ void accumulate_pv(const Warp& at, unsigned stage,
                                                const float (&weights)[4]) {
    const uint32_t a[4] = {pack_pair<E>(weights[0], weights[1]),
                           pack_pair<E>(rounded_off<E>(weights[0]), rounded_off<E>(weights[1])),
                           pack_pair<E>(weights[2], weights[3]),
                           pack_pair<E>(rounded_off<E>(weights[2]), rounded_off<E>(weights[3]))};
    const auto values = OperandReader<kDim>::b_transposed(stage + Warp::kTileBytes, at.lane);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint32_t m[4];
      values.transposed(m, 0, s);
      mma<E>(sums[2 * s], a, m[0], m[1]);
      mma<E>(sums[2 * s + 1], a, m[2], m[3]);
    }
  }

  __device__ __forceinline__ void store_partial(const Warp& at,
                                                const TensorStepSoftmax& softmax) const {
    const float total = quad_sum(softmax.total);
    if (used) {
      float* const partial =
          static_cast<float*>(at.p.workspace) +
          ((at.batch * at.p.heads + head) * gridDim.x + blockIdx.x) * partial_numbers(at.dim);
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        const int d = 8 * n + 2 * at.c;
        if (d < at.dim) {
          partial[d] = sums[n][0] + sums[n][2];
          partial[d + 1] = sums[n][1] + sums[n][3];
        }
      }
      if (at.c == 0) {
        partial[at.dim] = softmax.maximum;
        partial[at.dim + 1] = total;
        partial[at.dim + 2] = static_cast<float>(softmax.gates);
      }
    }
  }
};

/// Asks for the first tiles.
template <class E, int kDim, int kStages>
__device__ __forceinline__ void begin_tiles(const TensorStepWarp<E, kDim, kStages>& at,
                                            const TensorStepHead<E, kDim, kStages>& head) {
  for (int tile = 0; tile < kStages - 1; ++tile) {
    head.copy_gates(at, tile);
    at.load_stage(tile);
  }
}

/// The warp's keys, for the query heads from `first_head` on. begin_tiles() has been called.
template <class E, int kDim, int kStages>
__device__ __forceinline__ void step_through(const TensorStepWarp<E, kDim, kStages>& at,
                                             TensorStepHead<E, kDim, kStages>& head,
                                             TensorStepSoftmax& softmax) {
  for (int tile = 0; tile < at.tiles; ++tile) {
    wait_for_copies<kStages - 2>();
    __syncwarp();  // every lane has waited, and has read the tile before this one
    head.copy_gates(at, tile + kStages - 1);
    at.load_stage(tile + kStages - 1);
    float dots[2][4] = {}, weights[4];
    head.compute_scores(at, at.stage(tile), dots);
    const float4 four = *reinterpret_cast<const float4*>(head.gates_of(at, tile));
    const float gates[4] = {four.x, four.y, four.z, four.w};
    const float factor =
        softmax.weigh(dots, gates, at.p.scale, head.missing_keys(at, tile), weights);
    head.rescale(factor);
    head.accumulate_pv(at, at.stage(tile), weights);
  }
  wait_for_copies<0>();
  __syncwarp();
}

/// The keys of a split, by a sequence's length as it is now.
struct SplitKeys {
  int64_t begin, end, length;

  __device__ SplitKeys(const ForgettingAttentionStepParams& p, int32_t tokens) {
    const Splits splits(p, blockIdx.z, blockIdx.y, tokens);
    begin = splits.begin(blockIdx.x);
    end = splits.begin(blockIdx.x + 1);
    length = splits.length;
  }
};

/// cache_is_settled: no kernel that may still run writes keys, values and gates but those of the
/// last token, or lengths but to count it.
template <class E, int kDim, int kStages>
__global__ void __launch_bounds__(32)
    tensor_step_kernel(const __grid_constant__ ForgettingAttentionStepParams p,
                       const bool cache_is_settled) {
  extern __shared__ __align__(128) unsigned char ring[];
  let_next_kernel_begin();
  using Warp = TensorStepWarp<E, kDim, kStages>;
  using Head = TensorStepHead<E, kDim, kStages>;
  // Where keys are pruned, the kernel before says where splits lie. Elsewhere the length is that
  // before the last token or after it. Whichever it is, the first tiles of a split far from the end
  // are those of before: far enough that no line of the first-level cache, which gates come
  // through, holds a gate that is yet to be written.
  constexpr int64_t kFar = 32;
  const int32_t* const length = p.lengths + blockIdx.z;
  int64_t begin = 0, end = 0;
  if (cache_is_settled && p.first_keys == nullptr) {
    const SplitKeys before(p, *const_cast<const volatile int32_t*>(length));
    if (before.end + kFar <= before.length) {
      begin = before.begin;
      end = before.end;
    }
  }
  Warp at(p, shared_address(ring), reinterpret_cast<float*>(ring + Warp::kRingBytes), begin, end);
  if (begin < end) begin_tiles(at, Head(at, at.key_head * at.group));
  wait_for_kernels_before();
  const SplitKeys keys(p, *length);
  bool has_begun = begin < end && keys.begin == begin && keys.end == end;
  if (!has_begun) {
    wait_for_copies<0>();
    __syncwarp();
    at.take(keys.begin, keys.end);
  }
  for (int64_t first_head = at.key_head * at.group; first_head < (at.key_head + 1) * at.group;
       first_head += TensorStepTile::kHeads) {
    Head head(at, first_head);
    if (!has_begun) begin_tiles(at, head);
    has_begun = false;
    head.load_queries(at);
    TensorStepSoftmax softmax;
    step_through(at, head, softmax);
    head.store_partial(at, softmax);
  }
}

template <class E, int kDim, int kStages>
cudaError_t launch_tensor_step(const ForgettingAttentionStepParams& p, bool cache_is_settled,
                               cudaStream_t stream) {
  using Warp = TensorStepWarp<E, kDim, kStages>;
  constexpr int kBytes = Warp::kRingBytes + Warp::kGateBytes;
  constexpr auto* kKernel = &tensor_step_kernel<E, kDim, kStages>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(kBytes));
  const dim3 grid(static_cast<unsigned>(p.plan.splits), static_cast<unsigned>(p.key_heads),
                  static_cast<unsigned>(p.layout.batch));
  return launch_in_chain<kKernel>(grid, dim3(32), kBytes, stream, p, cache_is_settled);
}

template <class E, int kDim>
cudaError_t launch_tensor_step(const ForgettingAttentionStepParams& p, bool cache_is_settled,
                               cudaStream_t stream) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  // Where warps are few, each has more of its keys and values under way.
  constexpr int kFewStages = 6, kFewWarps = 4, kBytes = kFewWarps * kFewStages * 9 * 1024;
  const int64_t warps = p.plan.splits * p.key_heads * p.layout.batch;
  const bool are_few = kDim <= 128 && warps <= kFewWarps * int64_t{limits.multiprocessors} &&
                       kBytes <= limits.shared_bytes;
  if (are_few) return launch_tensor_step<E, kDim, kFewStages>(p, cache_is_settled, stream);
  return launch_tensor_step<E, kDim, TensorStepTile::kStages>(p, cache_is_settled, stream);
}

template <class E>
cudaError_t launch_tensor_step(const ForgettingAttentionStepParams& p, bool cache_is_settled,
                               cudaStream_t stream) {
  return p.head_dim <= 64    ? launch_tensor_step<E, 64>(p, cache_is_settled, stream)
         : p.head_dim <= 128 ? launch_tensor_step<E, 128>(p, cache_is_settled, stream)
                             : launch_tensor_step<E, 256>(p, cache_is_settled, stream);
}

}  // namespace tidegate::kernels::attention
