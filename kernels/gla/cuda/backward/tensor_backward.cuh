#pragma once

// The gradients of one chunk of 64 tokens of one head, from its inputs, its factors and the states
// at its two ends. A block of threads has a chunk and a head, and K / 16 warps, rounded up to a
// multiple of four:
//
//   load       do, v, the factors Q and K, decays; S_start and D_end asked for     all warps
//   factors    K up to the chunk's end; Q and K across its halves                   a K-slice each
//   scores     A between sub-chunks; dA = do v^T                     a pair of sub-chunks at a time
//   dv         K_end D_end + A^T do                                                 a V-slice each
//   sums       S_start do^T, D_end v^T; to the halves, to the sub-chunks            a K-slice each
//   gradients  within the sub-chunks, level by level: dq, dk, the gate's            a K-slice each
//
// One __syncthreads between phases that share tiles, none inside a phase. Each phase finds the
// thread's place anew (ChunkPlace). docs/numerics_ops.md has the sums: nothing is divided by a
// decay and no term cancels another.

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/gla/cuda/backward/chunk_factors.cuh"
#include "kernels/gla/cuda/backward/chunk_scores.cuh"
#include "kernels/gla/cuda/backward/chunk_sums.cuh"
#include "kernels/gla/cuda/backward/state_pass.cuh"
#include "kernels/gla/cuda/backward/sub_chunk_gradients.cuh"
#include "kernels/gla/gla_cuda.h"

namespace tidegate::kernels::gla {

/// The first of the tokens, and of the channels, that a lane has in the last phase.
__device__ inline int first_lane_token(const ChunkPlace& at) { return at.lane % 4 * kLaneTokens; }
__device__ inline int lane_channel(const ChunkPlace& at) {
  return at.warp * kSlice + at.lane / 4 * kLaneChannels;
}

/// Leaves the sums in shared memory, where the lane finds them again.
__device__ inline void store_sums(const ChunkPlace& at, const ChunkShared& sh,
                                  const ChunkSums& sums) {
#pragma unroll
  for (int b = 0; b < kSubChunks; ++b) {
    float4* to = sh.sums(at.warp, b, at.lane);
    const float (&x)[2][4] = sums.before[b];
    const float (&y)[2][4] = sums.after[b];
    to[0] = make_float4(x[0][0], x[0][1], x[0][2], x[0][3]);
    to[32] = make_float4(x[1][0], x[1][1], x[1][2], x[1][3]);
    to[64] = make_float4(y[0][0], y[0][1], y[0][2], y[0][3]);
    to[96] = make_float4(y[1][0], y[1][1], y[1][2], y[1][3]);
    *sh.through_sums(at.warp, b, at.lane) = make_float2(sums.through[b][0], sums.through[b][1]);
  }
}

/// From a token's gradients to those of what is in memory: the slopes of q's activation and of the
/// gate. With logits, `gamma_sums` gains k (dL/df - dk), which is (1 - gamma) dgamma.
template <GateKind kKind>
__device__ inline void apply_slopes(const GradientInputs& x, const LaneSlopes<kLaneTokens>& slopes,
                                    bool live, int i, TokenGradients& g,
                                    float (&gamma_sums)[kLaneChannels]) {
  const float exists = live ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) {
    g.q[i][j] *= slopes.q[i][j];
    if constexpr (kKind == GateKind::kLogit) {
      g.f[i][j] = x.k[i][j] * (g.f[i][j] - g.k[i][j]);
      gamma_sums[j] = fmaf(exists, g.f[i][j], gamma_sums[j]);
      g.f[i][j] *= slopes.opening[i][j];
    } else {
      g.f[i][j] *= x.f[i][j];
    }
  }
}

/// A lane's channels of some tokens, the first at `to`, of which `live` exist.
template <class T>
__device__ inline void store_tokens(const NearRows& to, int live,
                                    const float (&x)[kLaneTokens][kLaneChannels]) {
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    if (i < live) {
      *reinterpret_cast<typename Pack<T, kLaneChannels>::Bits*>(to.row(i)) =
          pack<T, kLaneChannels>(x[i]).bits;
    }
  }
}

/// dq, dk and the gate's gradient of a lane's tokens and channels.
template <class T, GateKind kKind>
__device__ inline void store_token_gradients(const GlaParams& p, const ChunkPlace& at, int token,
                                             int channel, const TokenGradients& g) {
  const bool wide_gate = p.gate.dtype == DType::kFloat32;
  const auto place = [&](const NearRows& rows, int bytes) {
    return NearRows(rows.row(token) + channel * bytes, rows.stride);
  };
  const int live = at.tokens - token;
  store_tokens<T>(place(at.rows.dq, 2), live, g.q);
  if constexpr (kKind == GateKind::kLogDecay) {
    store_tokens<T>(place(at.rows.dk, 2), live, g.k);
  }
  if (p.gate_per_head) {
    return;
  }
  if (wide_gate) {
    store_tokens<float>(place(at.rows.dgate, 4), live, g.f);
  } else {
    store_tokens<T>(place(at.rows.dgate, 2), live, g.f);
  }
}

/// One gate a head: the sums over the K-slice of a lane's tokens, from those over its own channels.
__device__ inline void store_head_sums(const ChunkShared& sh, int slice, int token, int lane,
                                       float (&sums)[kLaneTokens]) {
#pragma unroll
  for (float& sum : sums) {
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
  }
  if (lane < 4) {
    *reinterpret_cast<float4*>(sh.head_sums(slice) + token) =
        make_float4(sums[0], sums[1], sums[2], sums[3]);
  }
}

/// The warp's part of the chunk's row of partial sums of dgamma, from what its lanes have summed
/// up.
__device__ inline void store_gamma_sums(const ChunkBackward& a, const ChunkPlace& at,
                                        const float (&gamma)[kLaneChannels],
                                        const float (&gamma_sums)[kLaneChannels]) {
  const float even = quad_sum(gamma_sums[0]), odd = quad_sum(gamma_sums[1]);
  const int j = at.lane % 4;
  if (j < kLaneChannels) {
    partial_sums(a, at)[lane_channel(at) + j] =
        (j == 0 ? even : odd) / (1.0f - (j == 0 ? gamma[0] : gamma[1]));
  }
}

/// The gradients of this warp's K-slice, a sub-chunk at a time; the first one's inputs are under
/// way.
template <class T, GateKind kKind>
__device__ inline void store_gradients(const ChunkBackward& a, const ChunkPlace& place,
                                       const ChunkShared& sh,
                                       InputLoader<T, kKind, kLaneTokens>& inputs) {
  const GlaParams& p = a.backward.forward;
  float gamma[kLaneChannels], gamma_sums[kLaneChannels] = {};
  load_lane_gamma(p, place.head(), lane_channel(place), gamma);
#pragma unroll 1
  for (int b = 0; b < kSubChunks && b * kSubChunk < place.rows.tokens; ++b) {
    const ChunkPlace at = place.again();
    const int channel = lane_channel(at);
    const int token = b * kSubChunk + first_lane_token(at);
    GradientInputs x;
    LaneSlopes<kLaneTokens> slopes;
    inputs.get(gamma, at.tokens - token, x, slopes);
    TokenGradients g;
    compute_token_gradients(x, sh, at.warp, b, at.lane, g);
    if (b + 1 < kSubChunks) {
      inputs.move_to(token + kSubChunk, channel);
      inputs.load();
    }
    float of_head[kLaneTokens];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      apply_slopes<kKind>(x, slopes, token + i < at.tokens, i, g, gamma_sums);
      of_head[i] = g.f[i][0] + g.f[i][1];
    }
    store_token_gradients<T, kKind>(p, at, token, channel, g);
    if (p.gate_per_head) {
      store_head_sums(sh, at.warp, token, at.lane, of_head);
    }
  }
  if (kKind == GateKind::kLogit && a.backward.dgamma_partial != nullptr) {
    store_gamma_sums(a, place.again(), gamma, gamma_sums);
  }
}

/// One gate a head: the sum of its gradients over the channels, a thread a token.
template <class T>
__device__ inline void store_head_gate_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                                 const ChunkShared& sh) {
  for (int token = at.thread(); token < at.tokens; token += at.threads()) {
    float sum = 0;
#pragma unroll 1
    for (int s = 0; s < at.key_slices; ++s) {
      sum += sh.head_sums(s)[token];
    }
    char* to = at.rows.dgate.row(token);
    if (a.backward.dgate.dtype == DType::kFloat32) {
      *reinterpret_cast<float*>(to) = sum;
    } else {
      *reinterpret_cast<T*>(to) = narrow<T>(sum);
    }
  }
}

/// The chunk's inputs into shared memory, and the first of D_end on their way.
template <class T>
__device__ inline void load_inputs(const ChunkBackward& a, const ChunkPlace& at,
                                   const ChunkShared& sh, StateGradientFetch& gradients) {
  copy_inputs(a, at, sh);
  if (at.warp < at.value_slices) {
    gradients.load(a, at, 0, at.warp);
  }
  prefetch_inputs(a, at);
  wait_for_copies<0>();
  finish_rows<T>(sh.d_o, InputActivation::kNone, at.tokens, at.columns(), at.threads());
  finish_rows<T>(sh.values, a.backward.forward.v_activation, at.tokens, at.columns(), at.threads());
}

/// kDims: K and V, where they are the same and the compiler shall know them, which saves a tenth of
/// the instructions and every spilled register; 0: any.
template <class T, GateKind kKind, int kDims>
__global__ void __launch_bounds__(kMaxKeySlices * 32, 1)
    chunk_backward_kernel(const __grid_constant__ ChunkBackward a) {
  extern __shared__ __align__(16) char memory[];
  const GlaParams& p = a.backward.forward;
  const int64_t key_dim = kDims > 0 ? kDims : p.key_dim;
  const int64_t value_dim = kDims > 0 ? kDims : p.value_dim;
  const ChunkShared sh(memory, key_dim, value_dim);
  wait_for_kernels_before();
  sh.rows().find(a, static_cast<int>(threadIdx.x));
  __syncthreads();
  const auto here = [&] { return ChunkPlace(key_dim, value_dim, sh.rows()); };
  if (sh.rows().tokens == 0) {
    clear_partial_sums(a, here());
    return;
  }

  StateGradientFetch gradients;
  load_inputs<T>(a, here(), sh, gradients);
  __syncthreads();
  compute_half_factors(here(), sh);
  __syncthreads();
  compute_all_scores(here(), sh);
  __syncthreads();
  BoundaryFetch boundaries(a, here());  // on their way during dv
  store_value_gradients<T>(a, here(), sh, gradients);

  ChunkSums sums;
  InputLoader<T, kKind, kLaneTokens> inputs(p, sh.rows());
  if (here().has_slice()) {
    accumulate_boundaries(here(), sh, boundaries, sums);
    descend_to_sub_chunks(here(), sh, sums);
    inputs.move_to(first_lane_token(here()), lane_channel(here()));
    inputs.load();
  }
  __syncthreads();  // rows and tiles give way to the sums
  if (here().has_slice()) {
    store_sums(here(), sh, sums);
    store_gradients<T, kKind>(a, here(), sh, inputs);
  }
  if (p.gate_per_head) {
    __syncthreads();
    store_head_gate_gradients<T>(a, here(), sh);
  }
}

// ---- The launches of the three kernels ----
//
// All of the backward pass, compiled as a unit a data type (units.cmake).

template <class T>
cudaError_t TensorBackwardUnit<T>::make_factors(const ChunkBackward& work, cudaStream_t stream) {
  const GlaParams& p = work.backward.forward;
  const bool wide = 1 << work.factors.piece_bits >= kTileBytes / 2;
  const auto launch = [&]<GateKind kKind>() {
    const auto kernel =
        wide ? &chunk_factors_kernel<T, kKind, true> : &chunk_factors_kernel<T, kKind, false>;
    return launch_unless_empty(kernel, work.chunks.count * p.heads, dim3(kSubChunks * 32), 0,
                               stream, work);
  };
  return p.gate_kind == GateKind::kLogit ? launch.template operator()<GateKind::kLogit>()
                                         : launch.template operator()<GateKind::kLogDecay>();
}

template <class T>
cudaError_t TensorBackwardUnit<T>::scan_states(const StatePass& pass, cudaStream_t stream) {
  const GlaParams& p = pass.params;
  const int bytes = StatePassShared(p.key_dim, p.value_dim).bytes();
  constexpr auto* kKernel = &state_pass_kernel<T>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  const auto threads = static_cast<unsigned>(p.key_dim / kSlice * 32);
  const int64_t blocks = pass.segments.count * p.heads * pass.column_tiles() * kDirections;
  if (blocks > std::numeric_limits<int>::max()) {
    return cudaErrorInvalidConfiguration;
  }
  return launch_early<kKernel>(dim3(static_cast<unsigned>(blocks)), dim3(threads), bytes, stream,
                               pass);
}

template <class T>
cudaError_t TensorBackwardUnit<T>::chunks(const ChunkBackward& work, cudaStream_t stream) {
  const GlaParams& p = work.backward.forward;
  const int bytes = ChunkShared::bytes(p.key_dim, p.value_dim);
  const auto threads = static_cast<unsigned>(chunk_warps(p.key_dim) * 32);
  const auto launch = [&]<GateKind kKind, int kDims>() {
    constexpr auto* kKernel = &chunk_backward_kernel<T, kKind, kDims>;
    TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
    return launch_early<kKernel>(dim3(static_cast<unsigned>(work.chunks.count * p.heads)),
                                 dim3(threads), bytes, stream, work);
  };
  const auto launch_sizes = [&]<GateKind kKind>() {
    constexpr int kDims = 128;  // by far the most frequent
    return p.key_dim == kDims && p.value_dim == kDims ? launch.template operator()<kKind, kDims>()
                                                      : launch.template operator()<kKind, 0>();
  };
  return p.gate_kind == GateKind::kLogit ? launch_sizes.template operator()<GateKind::kLogit>()
                                         : launch_sizes.template operator()<GateKind::kLogDecay>();
}

}  // namespace tidegate::kernels::gla
