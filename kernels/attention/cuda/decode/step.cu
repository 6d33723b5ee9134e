#include <algorithm>

#include "kernels/attention/cuda/decode/splits.cuh"
#include "kernels/attention/cuda/decode/tensor_step_kernel.cuh"
#include "kernels/attention/cuda/paths.h"
#include "kernels/attention/cuda/rows.cuh"
#include "kernels/common/cuda/alignment.h"
#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/dispatch.h"

namespace tidegate::kernels::attention {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kOwn = 8;            // numbers of a row that a lane holds
constexpr int kHeads = 4;          // query heads that read a key together
constexpr int kTile = 64;          // keys that are scores in shared memory at a time, at most
constexpr int kPerLane = 2;        // of them, for each lane of the warp that weighs them
constexpr int kTileBytes = 16384;  // of keys, and of values, in a stage
constexpr int kMostStages = 3;
constexpr int kMaxDim = static_cast<int>(kMaxAttentionHeadDim);
static_assert(kTile == 32 * kPerLane && kLeastPart % kTile == 0);

struct Step {
  ForgettingAttentionStepParams params = {};
  int lanes_a_row = 0;  // that share a row, a power of two
  int tile = 0;         // keys of a tile, at most kTile
  int tile_bytes = 0;   // of keys, and of values, a multiple of 16
  int stages = 0;       // tiles under way or in use
};

/// How a lane's kOwn numbers of a row lie: packs of kVec, kOwn / kVec of them.
template <class E, int kVec>
struct RowPacks {
  using Real = typename Register<E>::type;
  using Bits = typename Pack<E, kVec>::Bits;
  static constexpr int kPacks = kOwn / kVec;
  Pack<E, kVec> packs[kPacks];

  /// Where pack n of a lane begins.
  __device__ static int channel(int n, int lane, int lanes) { return (lane + n * lanes) * kVec; }

  __device__ void load(const E* row, int lane, int lanes, int dim) {
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
      const int d = channel(n, lane, lanes);
      packs[n] = {};
      if (d < dim) {
        packs[n].bits = *reinterpret_cast<const Bits*>(row + d);
      }
    }
  }
  /// The lane's part of a row, on its way to shared memory: only this lane reads it there.
  __device__ static void copy(E* to, const E* row, int lane, int lanes, int dim) {
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
      const int d = channel(n, lane, lanes);
      if (d < dim) {
        copy_async<kVec* static_cast<int>(sizeof(E))>(to + d, row + d);
      }
    }
  }
  __device__ Real get(int i) const { return packs[i / kVec].get(i % kVec); }
};

template <class E, int kVec>
__device__ int channel_of(int own, int lane, int lanes) {
  return RowPacks<E, kVec>::channel(own / kVec, lane, lanes) + own % kVec;
}

/// Sums dots over the lanes of a row and stores them at `scores`, one a head. Each exchange halves
/// the heads that a lane still adds up, as long as there are lanes for that.
template <class Real>
__device__ void store_sums(const Real (&dots)[kHeads], int lane, int lanes, bool exists,
                           Real* scores) {
  static_assert(kHeads == 4);
  if (lanes >= 4) {
    const bool high = (lane & (lanes / 2)) != 0, odd = (lane & (lanes / 4)) != 0;
    const Real a =
        (high ? dots[2] : dots[0]) + __shfl_xor_sync(~0u, high ? dots[0] : dots[2], lanes / 2);
    const Real b =
        (high ? dots[3] : dots[1]) + __shfl_xor_sync(~0u, high ? dots[1] : dots[3], lanes / 2);
    Real sum = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, lanes / 4);
    for (int s = lanes / 8; s > 0; s /= 2) {
      sum += __shfl_xor_sync(~0u, sum, s);
    }
    if ((lane & (lanes / 4 - 1)) == 0 && exists) {
      scores[2 * high + odd] = sum;
    }
    return;
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    Real sum = dots[h];
    if (lanes == 2) {
      sum += __shfl_xor_sync(~0u, sum, 1);
    }
    if (lane == 0 && exists) {
      scores[h] = sum;
    }
  }
}

/// What a warp knows of the head that it weighs, the same in all of its lanes.
template <class Real>
struct HeadState {
  Real maximum = -static_cast<Real>(INFINITY), total = 0;
  double gates = 0;  // from the newest key of the split back

  /// Gates of a lane's keys in the tile [first, last), from the newest back; zero before it.
  __device__ static void load_gates(const AttentionRows<const Real>& log_f, int64_t first,
                                    int64_t last, int own, Real (&gates)[kPerLane]) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int64_t j = last - 1 - kPerLane * own - i;
      gates[i] = j >= first ? *log_f.row(j) : Real(0);
    }
  }

  /// Scores of the tile's `count` keys become weights against the largest score so far; returns
  /// the factor that earlier weights shrink by. `log_f`: of the lane's keys, from the newest back.
  __device__ Real weigh(Real (*scores)[kHeads], int head, int count, int own,
                        const Real (&log_f)[kPerLane]) {
    double gate[kPerLane], sum_of_lane = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      gate[i] = static_cast<double>(log_f[i]);
      gate[i] = gate[i] < kLeastLogGate ? kLeastLogGate : gate[i];
      sum_of_lane += gate[i];
    }
    double through = sum_of_lane;  // of this lane's keys and all after them
#pragma unroll
    for (int s = 1; s < 32; s *= 2) {
      const double newer = __shfl_up_sync(~0u, through, s);
      through += own >= s ? newer : 0.0;
    }
    double after = __shfl_up_sync(~0u, through, 1);  // of the keys after this lane's
    after = gates + (own == 0 ? 0.0 : after);
    Real score[kPerLane], top = maximum;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int j = count - 1 - kPerLane * own - i;
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
    for (int i = 0; i < kPerLane; ++i) {
      const int j = count - 1 - kPerLane * own - i;
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

/// A block takes one split of one head of keys, for up to kHeads of its query heads at a time.
/// Tiles of keys and values are copied to shared memory step.stages - 1 tiles ahead, each number by
/// the lane that will read it; scores and weights are what the block exchanges, in two buffers.
template <class E, int kVec>
__global__ void __launch_bounds__(kThreads, sizeof(E) == 8 ? 1 : 2) step_kernel(const Step step) {
  using Real = typename Register<E>::type;
  using Packs = RowPacks<E, kVec>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ __align__(16) Real scores[2][kTile][kHeads];
  __shared__ Real shrink[2][kHeads];
  const ForgettingAttentionStepParams& p = step.params;
  const int warp = threadIdx.x / 32, own = threadIdx.x % 32, lanes = step.lanes_a_row;
  const int lane = own % lanes, rows_a_block = kThreads / lanes;
  const int first_row = static_cast<int>(threadIdx.x) / lanes;  // of a tile, that this lane shares
  const auto dim = static_cast<int>(p.head_dim);
  const int64_t batch = blockIdx.z, key_head = blockIdx.y, split = blockIdx.x;
  const Splits splits(p, batch);
  const int64_t begin = splits.begin(split), end = splits.begin(split + 1);
  const int64_t group = p.heads / p.key_heads;
  const auto tiles = static_cast<int>((end - begin + step.tile - 1) / step.tile);
  const AttentionRows<const E> keys(p.k, batch, 0, key_head), values(p.v, batch, 0, key_head);

  const auto keys_at = [&](int tile) {
    return reinterpret_cast<E*>(shared + tile % step.stages * 2 * step.tile_bytes);
  };
  const auto values_at = [&](int tile) {
    return reinterpret_cast<E*>(shared + (tile % step.stages * 2 + 1) * step.tile_bytes);
  };
  const auto copy_tile = [&](int tile) {
    if (tile < tiles) {
      const int64_t last = end - int64_t{tile} * step.tile, first = max(begin, last - step.tile);
      const auto count = static_cast<int>(last - first);
      for (int j = first_row; j < count; j += rows_a_block) {
        Packs::copy(keys_at(tile) + j * dim, keys.row(first + j), lane, lanes, dim);
      }
      for (int j = first_row; j < count; j += rows_a_block) {
        Packs::copy(values_at(tile) + j * dim, values.row(first + j), lane, lanes, dim);
      }
    }
    commit_copies();
  };

  for (int64_t first_head = key_head * group; first_head < (key_head + 1) * group;
       first_head += kHeads) {
    const int heads = static_cast<int>(min(int64_t{kHeads}, (key_head + 1) * group - first_head));
    for (int tile = 0; tile < step.stages - 1; ++tile) {
      copy_tile(tile);
    }
    Real query[kHeads][kOwn], sums[kHeads][kOwn] = {};
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const E* q = AttentionRows<const E>(p.q, batch, 0, first_head + min(h, heads - 1)).first;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int d = channel_of<E, kVec>(i, lane, lanes);
        query[h][i] =
            d < dim ? static_cast<Real>(p.scale) * static_cast<Real>(widen(q[d])) : Real(0);
      }
    }
    HeadState<Real> state;  // of head `warp`, where there is one
    const AttentionRows<const Real> log_f(p.log_f, batch, 0, first_head + min(warp, heads - 1));
    Real gates[kPerLane] = {};
    if (warp < heads) {
      state.load_gates(log_f, max(begin, end - step.tile), end, own, gates);
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const int64_t last = end - int64_t{tile} * step.tile, first = max(begin, last - step.tile);
      const auto count = static_cast<int>(last - first);
      Real(*const weights)[kHeads] = scores[tile % 2];
      if (step.stages > 2) {
        wait_for_copies<kMostStages - 2>();
      } else {
        wait_for_copies<0>();
      }
      const E* const key_rows = keys_at(tile);
      for (int j = first_row; j - first_row < count; j += rows_a_block) {  // all lanes of a warp
        Packs key = {};
        if (j < count) {
          key.load(key_rows + j * dim, lane, lanes, dim);
        }
        Real dots[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          dots[h] = 0;
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            dots[h] = fused(query[h][i], key.get(i), dots[h]);
          }
        }
        store_sums(dots, lane, lanes, j < count, weights[min(j, count - 1)]);
      }
      __syncthreads();
      copy_tile(tile + step.stages - 1);  // where the tile before this one was
      if (warp < heads) {
        const Real factor = state.weigh(weights, warp, count, own, gates);
        state.load_gates(log_f, max(begin, first - step.tile), first, own, gates);
        if (own == 0) {
          shrink[tile % 2][warp] = factor;
        }
      }
      __syncthreads();
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const Real factor = h < heads ? shrink[tile % 2][h] : Real(0);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          sums[h][i] *= factor;
        }
      }
      const E* const value_rows = values_at(tile);
      for (int j = first_row; j < count; j += rows_a_block) {
        Packs value;
        value.load(value_rows + j * dim, lane, lanes, dim);
        Real weight[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          weight[h] = weights[j][h];
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            sums[h][i] = fused(weight[h], value.get(i), sums[h][i]);
          }
        }
      }
    }

    wait_for_copies<0>();
    __syncthreads();  // the stages are free: the warps' sums meet there
    Real* const rows = reinterpret_cast<Real*>(shared);
    const int64_t stride = partial_numbers(p.head_dim);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      Real* const partial = static_cast<Real*>(p.workspace) +
                            ((batch * p.heads + first_head + h) * gridDim.x + split) * stride;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        Real sum = sums[h][i];
        for (int s = lanes; s < 32; s *= 2) {
          sum += __shfl_xor_sync(~0u, sum, s);
        }
        const int d = channel_of<E, kVec>(i, lane, lanes);
        if (own < lanes && d < dim) {
          rows[warp * kMaxDim + d] = sum;
        }
      }
      if (warp == h && own == 0) {
        partial[dim] = state.maximum;
        partial[dim + 1] = state.total;
        partial[dim + 2] = static_cast<Real>(state.gates);
      }
      __syncthreads();
      for (int d = static_cast<int>(threadIdx.x); d < dim; d += kThreads) {
        Real sum = 0;
        for (int w = 0; w < kWarps; ++w) {
          sum += rows[w * kMaxDim + d];
        }
        partial[d] = sum;
      }
      __syncthreads();
    }
  }
}

/// o of one query head: from the newest split to the oldest, between which and the query the gates
/// of all newer splits lie. A lane weighs a split, each thread sums one channel.
template <class E>
__global__ void __launch_bounds__(kMaxDim) combine_kernel(const ForgettingAttentionStepParams p) {
  using Real = typename Register<E>::type;
  const int64_t head = blockIdx.x, batch = blockIdx.y;
  const int64_t stride = partial_numbers(p.head_dim), dim = p.head_dim;
  const int own = threadIdx.x % 32;
  const auto d = static_cast<int64_t>(threadIdx.x);
  const Real* const partials =
      static_cast<const Real*>(p.workspace) + (batch * p.heads + head) * p.plan.splits * stride;
  double maximum = -INFINITY, total = 0, sum = 0, gates = 0;
  for (int64_t newest = Splits(p, batch).used(); newest > 0; newest -= 32) {
    const int64_t split = newest - 1 - own;
    double top = -INFINITY, weight = 0, through = 0;
    if (split >= 0) {
      const Real* const numbers = partials + split * stride + dim;
      top = static_cast<double>(numbers[0]);
      weight = static_cast<double>(numbers[1]);
      through = static_cast<double>(numbers[2]);
    }
#pragma unroll
    for (int s = 1; s < 32; s *= 2) {
      const double newer = __shfl_up_sync(~0u, through, s);
      through += own >= s ? newer : 0.0;
    }
    const double newer = __shfl_up_sync(~0u, through, 1);
    top += gates + (own == 0 ? 0.0 : newer);
    const double best = fmax(maximum, warp_max(top));
    const double against = best == -INFINITY ? 0.0 : best;
    const double old = exp(maximum - against), factor = split >= 0 ? exp(top - against) : 0.0;
    total = total * old + warp_sum(factor * weight);
    sum *= old;
    const int count = static_cast<int>(min(int64_t{32}, newest));
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const double share = __shfl_sync(~0u, factor, i);
      if (d < dim) {
        sum += share * static_cast<double>(partials[(newest - 1 - i) * stride + d]);
      }
    }
    maximum = best;
    gates += __shfl_sync(~0u, through, 31);
  }
  if (d < dim) {
    AttentionRows<E>(p.o, batch, 0, head).first[d] =
        narrow<E>(static_cast<Real>(total == 0 ? 0.0 : sum / total));
  }
}

bool fits_tensor_cores(const ForgettingAttentionStepParams& p) {
  return is_16_bit(p.q.dtype) && p.head_dim % 8 == 0 && rows_aligned(p.k, 16) &&
         rows_aligned(p.v, 16);
}

/// As many splits as fill the device a few times, of 128 keys or more where the cache is full.
cudaError_t count_splits(const ForgettingAttentionStepParams& p, bool warps, int64_t* splits) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int64_t blocks = std::max<int64_t>(1, p.layout.batch * p.key_heads);
  const int64_t of_device = (warps ? 32 : 8) * limits.multiprocessors;
  const int64_t wanted = (of_device + blocks - 1) / blocks;
  *splits = std::max<int64_t>(1, std::min(wanted, (p.capacity + 127) / 128));
  return cudaSuccess;
}

template <class E, int kVec>
cudaError_t launch_step(Step step, int shared_bytes, cudaStream_t stream) {
  constexpr auto* kKernel = &step_kernel<E, kVec>;
  const ForgettingAttentionStepParams& p = step.params;
  // As few lanes as hold a row: the others take other rows.
  step.lanes_a_row = 1;
  while (step.lanes_a_row < 32 && step.lanes_a_row * kOwn < p.head_dim) {
    step.lanes_a_row *= 2;
  }
  const auto row_bytes = static_cast<int>(p.head_dim * static_cast<int64_t>(sizeof(E)));
  step.tile = kTile;
  while (step.tile * row_bytes > kTileBytes) {
    step.tile /= 2;
  }
  step.tile_bytes = (step.tile * row_bytes + 15) / 16 * 16;
  constexpr int kStatic = 2 * (kTile + 1) * kHeads * static_cast<int>(sizeof(double));
  constexpr int kMost = kMostStages * 2 * kTileBytes;
  step.stages = kMost + kStatic <= shared_bytes ? kMostStages : 2;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(step.stages * 2 * kTileBytes));
  constexpr int kSums = kWarps * kMaxDim * static_cast<int>(sizeof(typename Register<E>::type));
  const int bytes = std::max(step.stages * 2 * step.tile_bytes, kSums);
  const dim3 grid(static_cast<unsigned>(p.plan.splits), static_cast<unsigned>(p.key_heads),
                  static_cast<unsigned>(p.layout.batch));
  kKernel<<<grid, kThreads, bytes, stream>>>(step);
  return cudaGetLastError();
}

template <class E>
cudaError_t combine(const ForgettingAttentionStepParams& p, cudaStream_t stream) {
  const dim3 heads(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.layout.batch));
  combine_kernel<E><<<heads, static_cast<unsigned>((p.head_dim + 31) / 32 * 32), 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t attention_step_plan(const ForgettingAttentionStepParams& params,
                                ForgettingAttentionPlan* plan) {
  const bool tensor_cores = params.path != AttentionPath::kPlain && fits_tensor_cores(params);
  if (params.path == AttentionPath::kTensorCore && !tensor_cores) {
    return cudaErrorNotSupported;
  }
  plan->path = tensor_cores ? AttentionPath::kTensorCore : AttentionPath::kPlain;
  TIDEGATE_RETURN_IF_CUDA_ERROR(count_splits(params, tensor_cores, &plan->splits));
  plan->workspace_bytes = params.layout.batch * params.heads * plan->splits *
                          partial_numbers(params.head_dim) *
                          element_size(state_dtype(params.q.dtype));
  return cudaSuccess;
}

cudaError_t attention_step(const ForgettingAttentionStepParams& params, cudaStream_t stream) {
  Step step;
  step.params = params;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  return dispatch_real(params.q.dtype, [&]<class E>() {
    constexpr int kVec = 16 / sizeof(E);
    if constexpr (sizeof(E) == 2) {
      if (params.plan.path == AttentionPath::kTensorCore) {
        TIDEGATE_RETURN_IF_CUDA_ERROR(launch_tensor_step<E>(params, stream));
        return combine<E>(params, stream);
      }
    }
    const bool whole =
        params.head_dim % kVec == 0 && rows_aligned(params.k, 16) && rows_aligned(params.v, 16);
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        (whole ? launch_step<E, kVec> : launch_step<E, 1>)(step, limits.shared_bytes, stream));
    return combine<E>(params, stream);
  });
}

}  // namespace tidegate::kernels::attention
