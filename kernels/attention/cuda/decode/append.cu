// Before attention, a step of decoding prepares one token of each sequence: a warp has a head of q,
// k or v, and the blocks of a cluster have a sequence, as many as give each head a warp of its own.
// Nothing here is large; what counts is a token's way through it.

#include "kernels/attention/append_cuda.h"
#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::attention {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMostDim = 256;
constexpr int kOwn = kMostDim / 32;  // elements of a lane
constexpr int kMostBlocks = 4;       // of a sequence

template <class E>
__device__ float rounded(float x) {
  return widen(narrow<E>(x));
}

/// log sigmoid(x), exact in both tails.
__device__ float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(expf(-fabsf(x))); }

/// log(gamma + (1 - gamma) exp(log_gate)), from the smaller of the gate and its rest; where the sum
/// underflows, gamma is as good as zero.
__device__ float bounded(float log_gate, float gamma) {
  const float decay = expf(log_gate);
  const float rest = log_gate < -1.0f ? 1.0f - decay : -expm1f(log_gate);
  const float kept = gamma + (1.0f - gamma) * decay, lost = (1.0f - gamma) * rest;
  if (lost <= 0.5f) return log1pf(-lost);
  return kept < 1.17549435e-38f ? log_gate : logf(kept);
}

/// How far rotary positions turn a lane's elements with each token.
struct Turns {
  float speed[kOwn];

  __device__ Turns(float theta, int dim, int lane) {
    const int half = dim / 2;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = lane + 32 * i, pair = at < half ? at : at - half;
      speed[i] = theta != 0.0f && at < dim
                     ? powf(theta, static_cast<float>(pair) / -static_cast<float>(half))
                     : 0.0f;
    }
  }
};

/// A head of one token: its elements lane, lane + 32 and so on in a lane's registers.
template <class E>
struct Head {
  float x[kOwn];
  int dim, lane;

  __device__ Head(const E* from, int dim, int lane) : dim(dim), lane(lane) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = lane + 32 * i;
      x[i] = at < dim ? widen(from[at]) : 0.0f;
    }
  }

  /// a last + (1 - a) x, and last becomes x.
  __device__ void shift(float mix, E* last) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = lane + 32 * i;
      if (at >= dim) break;
      const float before = widen(last[at]);
      last[at] = narrow<E>(x[i]);
      x[i] = rounded<E>(x[i] + mix * (before - x[i]));
    }
  }

  __device__ void norm(const E* weight, float eps) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) square = fmaf(x[i], x[i], square);
    const float factor = rsqrtf(warp_sum(square) / static_cast<float>(dim) + eps);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = lane + 32 * i;
      if (at < dim) x[i] = rounded<E>(x[i] * factor * widen(weight[at]));
    }
  }

  /// Rotates by way of the warp's row of shared memory.
  __device__ void turn(float position, const Turns& turns, float* row) {
    const int half = dim / 2;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) row[lane + 32 * i] = x[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = lane + 32 * i;
      if (at >= dim) break;
      const bool is_low = at < half;
      const float angle = position * turns.speed[i], cos = cosf(angle), sin = sinf(angle);
      const float other = row[is_low ? at + half : at - half];
      x[i] = rounded<E>(is_low ? fmaf(x[i], cos, -(other * sin)) : fmaf(x[i], cos, other * sin));
    }
    __syncwarp();
  }

  __device__ void store(E* to) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = lane + 32 * i;
      if (at < dim) to[at] = narrow<E>(x[i]);
    }
  }
};

template <class E>
__device__ E* cache_row(const HeadSeries& cache, int64_t b, int64_t place, int64_t head) {
  return static_cast<E*>(const_cast<void*>(static_cast<const void*>(cache.data))) +
         b * cache.stride_b + place * cache.stride_t + head * cache.stride_h;
}

/// log_f of gate h of row b.
template <class E>
__device__ __forceinline__ float log_gate(const AttentionAppendParams& p, int64_t b, int64_t h) {
  float log_f = 0.0f;
  if (p.gate_bias != nullptr) {
    float logit = p.gate_bias[h];
    if (p.gate_logits != nullptr) {
      logit += widen(static_cast<const E*>(p.gate_logits)[b * p.stride_gate_logits + h]);
    }
    log_f = log_sigmoid(logit);
    if (p.gamma != nullptr) log_f = bounded(log_f, p.gamma[h]);
  }
  return log_f;
}

template <class E, int kBlocks>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ AttentionAppendParams p) {
  __shared__ float rows[kWarps][kMostDim];
  let_next_kernel_begin();
  const int64_t b = blockIdx.x / kBlocks;
  const int rank = static_cast<int>(blockIdx.x % kBlocks);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int dim = static_cast<int>(p.head_dim);
  const Turns turns(static_cast<float>(p.theta), dim, lane);
  wait_for_kernels_before();
  const int heads = static_cast<int>(p.heads), key_heads = static_cast<int>(p.key_heads);
  const int64_t place = p.lengths[b], position = p.seen[b];
  const bool has_room = place < p.capacity;
  const E* const projected = static_cast<const E*>(p.projected) + b * p.stride_projected;

  for (int h = rank * kWarps + warp; h < heads + 2 * key_heads; h += kBlocks * kWarps) {
    const bool is_q = h < heads, is_k = !is_q && h < heads + key_heads;
    const int own = is_q ? h : is_k ? h - heads : h - heads - key_heads;
    Head<E> head(projected + static_cast<int64_t>(h) * dim, dim, lane);
    if (!is_q && p.mixes != nullptr) {
      const E* const mixes = static_cast<const E*>(p.mixes) + b * p.stride_mixes;
      const float mix = 1.0f / (1.0f + expf(-widen(mixes[own + (is_k ? 0 : key_heads)])));
      E* const last = static_cast<E*>(is_k ? p.last_k : p.last_v);
      head.shift(mix, last + (b * key_heads + own) * dim);
    }
    if (is_q || is_k) {
      const E* const weight = static_cast<const E*>(is_q ? p.q_weight : p.k_weight);
      if (weight != nullptr) {
        head.norm(weight + (p.weights_a_head ? static_cast<int64_t>(own) * dim : 0),
                  static_cast<float>(p.eps));
      }
      if (p.theta != 0) head.turn(static_cast<float>(position), turns, rows[warp]);
    }
    if (is_q) {
      head.store(static_cast<E*>(p.q) + (b * heads + own) * dim);
    } else if (has_room) {
      head.store(cache_row<E>(is_k ? p.k : p.v, b, place, own));
    }
  }
  // The gates are the last block's, whose warps may have no head.
  for (int64_t h = threadIdx.x; rank == kBlocks - 1 && has_room && h < p.gate_heads;
       h += kThreads) {
    *cache_row<float>(p.log_f, b, place, h) = log_gate<E>(p, b, h);
  }
  // Everyone has read the counts.
  if constexpr (kBlocks > 1) {
    cluster_meet();
  } else {
    __syncthreads();
  }
  if (rank == 0 && threadIdx.x == 0) {
    p.lengths[b] += 1;
    p.seen[b] += 1;
  }
}

}  // namespace

cudaError_t attention_append_cuda(const AttentionAppendParams& p, cudaStream_t stream) {
  if (p.batch > std::numeric_limits<int>::max() / kMostBlocks || p.head_dim > kMostDim) {
    return cudaErrorInvalidConfiguration;
  }
  const int64_t wanted = p.heads + 2 * p.key_heads;  // warps
  const auto launch = [&]<class E, int kBlocks>() {
    const dim3 grid(static_cast<unsigned>(p.batch * kBlocks));
    return launch_in_chain<&append_kernel<E, kBlocks>, kBlocks>(grid, dim3(kThreads), 0, stream, p);
  };
  const auto choose = [&]<class E>() {
    bool can = false;
    TIDEGATE_RETURN_IF_CUDA_ERROR((can_cluster<&append_kernel<E, kMostBlocks>>(&can)));
    if (!can || wanted <= kWarps) return launch.template operator()<E, 1>();
    return wanted <= 2 * kWarps ? launch.template operator()<E, 2>()
                                : launch.template operator()<E, kMostBlocks>();
  };
  return p.dtype == DType::kFloat32 ? choose.template operator()<float>()
                                    : dispatch_16_bit(p.dtype, choose);
}

}  // namespace tidegate::kernels::attention
