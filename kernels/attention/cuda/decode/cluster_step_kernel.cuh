#pragma once

// The decoding step of 16-bit data in one launch: the blocks of a cluster share the keys of a
// key/value head, a warp a split of them (tensor_step_kernel.cuh), and put their partial results
// together in shared memory. Keys that are no kernel's result are asked for while the kernel before
// still runs.

#include "kernels/attention/cuda/decode/tensor_step_kernel.cuh"
#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/hopper.cuh"

namespace tidegate::kernels::attention {

struct ClusterStepTile {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kMostBlocks = 8;  // of a cluster
  static constexpr int kSplits = kWarps * kMostBlocks;
  static constexpr int kHeads = TensorStepTile::kHeads;
  static_assert(kSplits <= 32, "a lane weighs a split");
};

/// A store into the shared memory of a block of the cluster, seen after the next cluster_sync().
__device__ inline void store_in_block(unsigned address, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#endif
}

/// What the splits tell each other of their heads, from the oldest split on.
struct SplitSums {
  float maximum[ClusterStepTile::kSplits][ClusterStepTile::kHeads];
  float total[ClusterStepTile::kSplits][ClusterStepTile::kHeads];
  float gates[ClusterStepTile::kSplits][ClusterStepTile::kHeads];
};

/// The keys of a split.
struct ClusterSplit {
  int64_t begin, end;

  __device__ ClusterSplit(const ForgettingAttentionStepParams& p, int length_read, int split,
                          int splits) {
    const int64_t length = max(int64_t{0}, min(int64_t{length_read}, p.capacity));
    const int64_t oldest = oldest_key(p, blockIdx.z, blockIdx.y, length);
    const int64_t equal = (length - oldest + splits - 1) / splits;
    const int64_t keys =
        (equal + TensorStepTile::kKeys - 1) / TensorStepTile::kKeys * TensorStepTile::kKeys;
    begin = min(length, oldest + split * keys);
    end = min(length, begin + keys);
  }
};

/// What each split's sums count for in the result: a warp has every kWarps-th head, a lane a split,
/// the newest one first, whose bias is the sum of the gates of all newer splits.
__device__ inline void weigh_splits(const SplitSums& all, int splits, int heads,
                                    float (*shares)[ClusterStepTile::kHeads]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int head = warp; head < heads; head += ClusterStepTile::kWarps) {
    const int split = splits - 1 - lane;
    double top = -INFINITY, total = 0, through = 0;
    if (split >= 0) {
      top = static_cast<double>(all.maximum[split][head]);
      total = static_cast<double>(all.total[split][head]);
      through = static_cast<double>(all.gates[split][head]);
    }
#pragma unroll
    for (int s = 1; s < 32; s *= 2) {
      const double newer = __shfl_up_sync(~0u, through, s);
      through += lane >= s ? newer : 0.0;
    }
    const double newer = __shfl_up_sync(~0u, through, 1);
    top += lane == 0 ? 0.0 : newer;
    const double best = warp_max(top);
    const float factor = best == -INFINITY ? 0.0f : expf(static_cast<float>(top - best));
    const float sum = warp_sum(factor * static_cast<float>(total));
    if (split >= 0) shares[split][head] = sum == 0.0f ? 0.0f : factor / sum;
  }
}

/// Asks for a split's newest keys and values while the kernel before still runs. `length` may be
/// that before this token or after it: either will do. Where keys are pruned, that kernel says
/// which there are.
template <class E>
__device__ inline void ask_for_keys(const ForgettingAttentionStepParams& p, int length, int own,
                                    int splits) {
  if (p.first_keys != nullptr) return;
  const ClusterSplit split(p, length, own, splits);
  const AttentionRows<const E> keys(p.k, blockIdx.z, 0, blockIdx.y),
      values(p.v, blockIdx.z, 0, blockIdx.y);
  const int64_t last = min(split.end, split.begin + 64);
  const auto lines = static_cast<int>((p.head_dim * 2 + 127) / 128);
  for (int64_t i = threadIdx.x % 32; i < (last - split.begin) * lines; i += 32) {
    const int64_t key = split.end - 1 - i / lines, piece = i % lines * 64;
    prefetch_line(keys.row(key) + piece);
    prefetch_line(values.row(key) + piece);
  }
}

/// Tells every block of the cluster the split's maximum, total and gates: a lane of the four that
/// have a row tells every fourth block.
template <class Warp>
__device__ inline void tell_split_sums(const Warp& at, const TensorStepSoftmax& softmax,
                                       SplitSums& sums, int own, int blocks) {
  const float total = quad_sum(softmax.total);
  for (int to = at.c; to < blocks; to += 4) {
    store_in_block(address_in_block(shared_address(&sums.maximum[own][at.row]), to),
                   softmax.maximum);
    store_in_block(address_in_block(shared_address(&sums.total[own][at.row]), to), total);
    store_in_block(address_in_block(shared_address(&sums.gates[own][at.row]), to),
                   static_cast<float>(softmax.gates));
  }
}

/// The split's weighted sums of values, times its share in the result, into the warp's shared
/// memory.
template <class E, int kDim>
__device__ inline void store_weighted_values(const TensorStepWarp<E, kDim>& at,
                                             const TensorStepHead<E, kDim>& head, float share,
                                             float* own_sums) {
#pragma unroll
  for (int n = 0; n < 2 * TensorStepHead<E, kDim>::kSteps; ++n) {
    const int d = 8 * n + 2 * at.c;
    own_sums[at.row * kDim + d] = share * (head.sums[n][0] + head.sums[n][2]);
    own_sums[at.row * kDim + d + 1] = share * (head.sums[n][1] + head.sums[n][3]);
  }
}

/// Adds up the block's warps, which lie `kRingBytes` apart, and sends every channel's sum to the
/// block of the cluster that makes it: parts[from][head][channel of its `slice`].
template <int kDim, int kRingBytes>
__device__ inline void send_block_sums(const unsigned char* rings, float* parts, int heads, int dim,
                                       int slice) {
  using T = ClusterStepTile;
  for (int i = static_cast<int>(threadIdx.x); i < heads * kDim; i += T::kThreads) {
    const int h = i / kDim, d = i % kDim;
    if (d >= dim) continue;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) {
      sum += reinterpret_cast<const float*>(rings + w * kRingBytes)[i];
    }
    const int to = d / slice, from = static_cast<int>(blockIdx.x);
    float* const part = &parts[(from * T::kHeads + h) * slice + d % slice];
    store_in_block(address_in_block(shared_address(part), to), sum);
  }
}

/// Adds up what the blocks sent, in their order, and stores this block's slice of the result.
template <class E>
__device__ inline void store_slice(const ForgettingAttentionStepParams& p, const float* parts,
                                   int64_t first_head, int heads, int dim, int slice) {
  using T = ClusterStepTile;
  const int blocks = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  for (int i = static_cast<int>(threadIdx.x); i < heads * slice; i += T::kThreads) {
    const int h = i / slice, d = rank * slice + i % slice;
    if (d >= dim) continue;
    float sum = 0.0f;
    for (int from = 0; from < blocks; ++from) {
      sum += parts[(from * T::kHeads + h) * slice + i % slice];
    }
    AttentionRows<E>(p.o, blockIdx.z, 0, first_head + h).first[d] = narrow<E>(sum);
  }
}

template <class E, int kDim>
__global__ void __launch_bounds__(ClusterStepTile::kThreads)
    cluster_step_kernel(const __grid_constant__ ForgettingAttentionStepParams p) {
#if TIDEGATE_HOPPER_CODE  // elsewhere nobody launches it
  using T = ClusterStepTile;
  using Warp = TensorStepWarp<E, kDim>;
  constexpr int kRingBytes = Warp::kRingBytes;  // of a warp
  static_assert(kRingBytes >= T::kHeads * kDim * 4);
  extern __shared__ __align__(128) unsigned char rings[];
  __shared__ SplitSums sums;
  __shared__ float shares[T::kSplits][T::kHeads];
  __shared__ float parts[T::kHeads * kDim];  // [block][head][channel of the block's]
  let_next_kernel_begin();
  const int blocks = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  const int warp = threadIdx.x / 32;
  const int splits = blocks * T::kWarps, own = rank * T::kWarps + warp;
  const int64_t batch = blockIdx.z;
  ask_for_keys<E>(p, *const_cast<const volatile int32_t*>(p.lengths + batch), own, splits);
  cluster_sync();  // all blocks run
  wait_for_kernels_before();
  const ClusterSplit split(p, p.lengths[batch], own, splits);
  float* const gates =
      reinterpret_cast<float*>(rings + T::kWarps * kRingBytes + warp * Warp::kGateBytes);
  const Warp at(p, shared_address(rings + warp * kRingBytes), gates, split.begin, split.end);
  float* const own_sums = reinterpret_cast<float*>(rings + warp * kRingBytes);
  const int slice = (at.dim + blocks - 1) / blocks;  // channels that a block makes of the result
  const int64_t end_head = (at.key_head + 1) * at.group;
  for (int64_t first_head = at.key_head * at.group; first_head < end_head;
       first_head += T::kHeads) {
    const auto heads = static_cast<int>(min(int64_t{T::kHeads}, end_head - first_head));
    TensorStepHead<E, kDim> head(at, first_head);
    begin_tiles(at, head);
    head.load_queries(at);
    TensorStepSoftmax softmax;
    step_through(at, head, softmax);
    tell_split_sums(at, softmax, sums, own, blocks);
    cluster_sync();
    weigh_splits(sums, splits, heads, shares);
    __syncthreads();
    if (at.row < heads) store_weighted_values(at, head, shares[own][at.row], own_sums);
    __syncthreads();
    send_block_sums<kDim, kRingBytes>(rings, parts, heads, at.dim, slice);
    cluster_sync();
    store_slice<E>(p, parts, first_head, heads, at.dim, slice);
    // What has been read may be written again; and no block ends that others still write to.
    if (first_head + T::kHeads < end_head) cluster_sync();
  }
#endif
}

template <class E, int kDim>
cudaError_t launch_cluster_step(const ForgettingAttentionStepParams& p, int blocks,
                                cudaStream_t stream) {
  using T = ClusterStepTile;
  constexpr auto* kKernel = &cluster_step_kernel<E, kDim>;
  constexpr int kBytes =
      T::kWarps * (TensorStepWarp<E, kDim>::kRingBytes + TensorStepWarp<E, kDim>::kGateBytes);
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(kBytes));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.key_heads),
                  static_cast<unsigned>(p.layout.batch));
  switch (blocks) {
    case 1:
      return launch_in_chain<kKernel>(grid, dim3(T::kThreads), kBytes, stream, p);
    case 2:
      return launch_in_chain<kKernel, 2>(grid, dim3(T::kThreads), kBytes, stream, p);
    case 4:
      return launch_in_chain<kKernel, 4>(grid, dim3(T::kThreads), kBytes, stream, p);
    default:
      return launch_in_chain<kKernel, 8>(grid, dim3(T::kThreads), kBytes, stream, p);
  }
}

template <class E>
cudaError_t launch_cluster_step(const ForgettingAttentionStepParams& p, int blocks,
                                cudaStream_t stream) {
  return p.head_dim <= 64    ? launch_cluster_step<E, 64>(p, blocks, stream)
         : p.head_dim <= 128 ? launch_cluster_step<E, 128>(p, blocks, stream)
                             : launch_cluster_step<E, 256>(p, blocks, stream);
}

}  // namespace tidegate::kernels::attention
