// Decoding: how a cache is split over blocks, the launches, and putting the splits together.

#include <algorithm>
#include <cstddef>

#include "kernels/attention/attention_step_cuda.h"
#include "kernels/attention/cuda/decode/cluster_step_kernel.cuh"
#include "kernels/attention/cuda/decode/first_keys_kernel.cuh"
#include "kernels/attention/cuda/decode/step_kernel.cuh"
#include "kernels/attention/cuda/decode/tensor_step_kernel.cuh"
#include "kernels/attention/cuda/rows.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/attention/forgetting_attention_cuda.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/integers.h"

namespace tidegate::kernels::attention {
namespace {

static_assert(kLeastSplit % StepTile::kTile == 0 && kLeastSplit % TensorStepTile::kKeys == 0);

constexpr int kCombineParts = 4;
// Splits that are weighed at once, and partial results that a thread has under way.
constexpr int kCombinedAtOnce = 32, kAhead = kCombinedAtOnce / kCombineParts;

/// What a thread reads of kCombinedAtOnce splits: of one of them what weighs it, and its channel of
/// every fourth one.
template <class Real>
struct SplitPart {
  Real top, weight, ahead[kAhead];
  double gates;

  /// Reads the parts of the kCombinedAtOnce splits that end before split `newest`.
  __device__ void load(const Real* partials, int64_t newest, int64_t dim) {
    const int64_t stride = partial_numbers(dim), split = newest - 1 - threadIdx.x % 32;
    top = -static_cast<Real>(INFINITY);
    weight = 0;
    gates = 0;
    if (split >= 0) {
      const Real* const numbers = partials + split * stride + dim;
      top = numbers[0];
      weight = numbers[1];
      gates = static_cast<double>(numbers[2]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t from = newest - 1 - threadIdx.y - i * kCombineParts;
      ahead[i] = from >= 0 && threadIdx.x < dim ? partials[from * stride + threadIdx.x] : Real(0);
    }
  }
};

/// o of one query head, from the newest split to the oldest: a split's bias is the sum of the gates
/// of all newer splits. A lane weighs a split, each thread sums one channel of every fourth split;
/// every warp weighs all of them, so that none waits for another. What the next splits have is
/// asked for while these are put together.
template <class E>
__global__ void __launch_bounds__(kCombineParts* StepTile::kMaxDim)
    combine_kernel(const ForgettingAttentionStepParams p) {
  using Real = typename Register<E>::type;
  let_next_kernel_begin();
  wait_for_kernels_before();
  const int64_t head = blockIdx.x, batch = blockIdx.y;
  const int64_t dim = p.head_dim;
  __shared__ Real parts[kCombineParts][StepTile::kMaxDim];
  const int lane = threadIdx.x % 32, part = threadIdx.y;
  const auto d = static_cast<int64_t>(threadIdx.x);
  const Real* const partials = static_cast<const Real*>(p.workspace) +
                               (batch * p.heads + head) * p.plan.splits * partial_numbers(dim);
  Real maximum = -static_cast<Real>(INFINITY), total = 0, sum = 0;
  double gates = 0;
  int64_t newest = Splits(p, batch, head / (p.heads / p.key_heads)).used();
  SplitPart<Real> next;
  next.load(partials, newest, dim);
  for (; newest > 0; newest -= kCombinedAtOnce) {
    const SplitPart<Real> now = next;
    if (newest > kCombinedAtOnce) next.load(partials, newest - kCombinedAtOnce, dim);
    const bool exists = newest - 1 - lane >= 0;
    double through = now.gates;
#pragma unroll
    for (int s = 1; s < 32; s *= 2) {
      const double newer = __shfl_up_sync(~0u, through, s);
      through += lane >= s ? newer : 0.0;
    }
    const double newer = __shfl_up_sync(~0u, through, 1);
    const double bias = gates + (lane == 0 ? 0.0 : newer);
    const Real top = static_cast<Real>(static_cast<double>(now.top) + bias);
    const Real best = larger(maximum, warp_max(top));
    const Real against = best == -static_cast<Real>(INFINITY) ? Real(0) : best;
    const Real old = exponential(maximum - against);
    const Real factor = exists ? exponential(top - against) : Real(0);
    total = fused(total, old, warp_sum(factor * now.weight));
    sum *= old;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      sum = fused(__shfl_sync(~0u, factor, part + i * kCombineParts), now.ahead[i], sum);
    }
    maximum = best;
    gates += __shfl_sync(~0u, through, 31);
  }
  parts[part][d] = sum;
  __syncthreads();
  if (part == 0 && d < dim) {
    for (int other = 1; other < kCombineParts; ++other) {
      sum += parts[other][d];
    }
    AttentionRows<E>(p.o, batch, 0, head).first[d] =
        narrow<E>(total == Real(0) ? Real(0) : sum / total);
  }
}

/// Less than the passes over sequences ask for: q and o are read and written an element at a time.
bool fits_tensor_cores(const ForgettingAttentionStepParams& p) {
  return is_16_bit(p.q.dtype) && p.head_dim % 8 == 0 && rows_aligned(p.k, 16) &&
         rows_aligned(p.v, 16);
}

/// Finds as many splits as fill the device a few times, of 128 keys or more where the cache is
/// full; of 64 where the device would otherwise be half empty, since a warp takes its keys one tile
/// after another.
cudaError_t count_splits(const ForgettingAttentionStepParams& p, bool warps, int64_t* splits) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int64_t blocks = std::max<int64_t>(1, p.layout.batch * p.key_heads);
  const int64_t of_device = (warps ? 32 : 8) * limits.multiprocessors;
  const int64_t wanted = (of_device + blocks - 1) / blocks;
  const bool is_short = blocks * ceil_div(p.capacity, 128) < 4 * limits.multiprocessors;
  const int64_t keys = warps && is_short ? kLeastSplit : 2 * kLeastSplit;
  *splits = std::max<int64_t>(1, std::min(wanted, ceil_div(p.capacity, keys)));
  return cudaSuccess;
}

/// Blocks of a cluster that share a key/value head; zero where more splits are wanted than a
/// cluster has warps: of long caches, many small blocks keep more keys under way.
cudaError_t cluster_blocks(const ForgettingAttentionStepParams& p, int* blocks) {
  bool can = false;
  TIDEGATE_RETURN_IF_CUDA_ERROR((can_cluster<&cluster_step_kernel<__nv_bfloat16, 128>>(&can)));
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  *blocks = 0;
  if (!can) return cudaSuccess;
  constexpr int kMost = ClusterStepTile::kMostBlocks, kWarps = ClusterStepTile::kWarps;
  const int64_t pairs = p.layout.batch * p.key_heads, chip = limits.multiprocessors;
  const int64_t keys = p.window > 0 ? std::min(p.window, p.capacity) : p.capacity;
  if (pairs < 3 * chip && keys > kMost * kWarps * 2 * kLeastSplit) return cudaSuccess;
  // Enough of them for the chip, and some more, so that one loads keys while another one puts its
  // results together, where there are keys for that.
  const auto want_more = [&](int64_t now) {
    const int64_t of_warp = keys / (2 * now * kWarps);
    return pairs * now < chip / 2 ? of_warp * 2 > TensorStepTile::kKeys
                                  : pairs * now < 3 * chip && of_warp >= kLeastSplit;
  };
  // Pruning leaves some heads far more keys than others: of those, a multiprocessor alone would be
  // the last.
  *blocks = p.prune > 0 && keys >= kMost * kWarps * kLeastSplit ? 2 : 1;
  while (*blocks < kMost && want_more(*blocks)) *blocks *= 2;
  return cudaSuccess;
}

template <class E, int kVec>
cudaError_t launch_step(Step step, int shared_bytes, cudaStream_t stream) {
  constexpr auto* kKernel = &step_kernel<E, kVec>;
  const ForgettingAttentionStepParams& p = step.params;
  // A row takes as few lanes as hold it: the others take other rows.
  step.lanes_a_row = 1;
  while (step.lanes_a_row < 32 && step.lanes_a_row * StepTile::kChannelsPerLane < p.head_dim) {
    step.lanes_a_row *= 2;
  }
  const auto row_bytes = static_cast<int>(p.head_dim * static_cast<int64_t>(sizeof(E)));
  step.tile = StepTile::kTile;
  while (step.tile * row_bytes > StepTile::kTileBytes) {
    step.tile /= 2;
  }
  step.tile_bytes = (step.tile * row_bytes + 15) / 16 * 16;
  constexpr int kStatic =
      2 * (StepTile::kTile + 1) * StepTile::kHeads * static_cast<int>(sizeof(double));
  constexpr int kMost = StepTile::kMostStages * 2 * StepTile::kTileBytes;
  step.stages = kMost + kStatic <= shared_bytes ? StepTile::kMostStages : 2;
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      allow_shared_bytes<kKernel>(step.stages * 2 * StepTile::kTileBytes));
  constexpr int kSums =
      StepTile::kWarps * StepTile::kMaxDim * static_cast<int>(sizeof(typename Register<E>::type));
  const int bytes = std::max(step.stages * 2 * step.tile_bytes, kSums);
  const dim3 grid(static_cast<unsigned>(p.plan.splits), static_cast<unsigned>(p.key_heads),
                  static_cast<unsigned>(p.layout.batch));
  kKernel<<<grid, StepTile::kThreads, bytes, stream>>>(step);
  return cudaGetLastError();
}

template <class E>
cudaError_t combine(const ForgettingAttentionStepParams& p, cudaStream_t stream) {
  const dim3 heads(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.layout.batch));
  const dim3 block(static_cast<unsigned>((p.head_dim + 31) / 32 * 32), kCombineParts);
  return launch_in_chain<&combine_kernel<E>>(heads, block, 0, stream, p);
}

}  // namespace

cudaError_t attention_step_plan(const ForgettingAttentionStepParams& params,
                                ForgettingAttentionPlan* plan) {
  const bool tensor_cores = params.path != AttentionPath::kPlain && fits_tensor_cores(params);
  if (params.path == AttentionPath::kTensorCore && !tensor_cores) {
    return cudaErrorNotSupported;
  }
  plan->path = tensor_cores ? AttentionPath::kTensorCore : AttentionPath::kPlain;
  if (tensor_cores) {
    int blocks = 0;
    TIDEGATE_RETURN_IF_CUDA_ERROR(cluster_blocks(params, &blocks));
    if (blocks > 0) {
      plan->in_clusters = true;
      plan->splits = blocks;
      plan->workspace_bytes = StepWorkspace(params, 0).bytes;
      return cudaSuccess;
    }
  }
  TIDEGATE_RETURN_IF_CUDA_ERROR(count_splits(params, tensor_cores, &plan->splits));
  const int64_t partials = params.layout.batch * params.heads * plan->splits *
                           partial_numbers(params.head_dim) *
                           element_size(state_dtype(params.q.dtype));
  plan->workspace_bytes = StepWorkspace(params, partials).bytes;
  return cudaSuccess;
}

cudaError_t attention_step(const ForgettingAttentionStepParams& params, cudaStream_t stream) {
  return attention_step(params, /*cache_is_settled=*/false, stream);
}

cudaError_t attention_step(const ForgettingAttentionStepParams& given, bool cache_is_settled,
                           cudaStream_t stream) {
  Step step;
  step.params = given;
  ForgettingAttentionStepParams& params = step.params;
  if (params.prune > 0) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_first_keys(params, stream));
    params.first_keys = static_cast<const int32_t*>(params.workspace);
  }
  params.workspace =
      static_cast<std::byte*>(params.workspace) + StepWorkspace(params, 0).partials_at;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  return dispatch_real(params.q.dtype, [&]<class E>() {
    constexpr int kVec = 16 / sizeof(E);
    if constexpr (sizeof(E) == 2) {
      if (params.plan.path == AttentionPath::kTensorCore) {
        if (params.plan.in_clusters) {
          return launch_cluster_step<E>(params, static_cast<int>(params.plan.splits), stream);
        }
        TIDEGATE_RETURN_IF_CUDA_ERROR(launch_tensor_step<E>(params, cache_is_settled, stream));
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
