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
// One __syncthreads between phases that share tiles, none inside a phase. docs/numerics.md derives
// the sums: nothing is divided by a decay and no term cancels another.

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

/// Leaves the sums in shared memory, where the lane finds them again.
__device__ inline void store_sums(const ChunkPlace& at, const ChunkShared& sh,
                                  const ChunkSums& sums, const float (&through)[kSubChunks][4]) {
#pragma unroll
  for (int b = 0; b < kSubChunks; ++b) {
    float4* to = sh.sums(at.warp, b, at.lane);
    const float (&x)[2][4] = sums.before[b];
    const float (&y)[2][4] = sums.after[b];
    to[0] = make_float4(x[0][0], x[0][1], x[0][2], x[0][3]);
    to[32] = make_float4(x[1][0], x[1][1], x[1][2], x[1][3]);
    to[64] = make_float4(y[0][0], y[0][1], y[0][2], y[0][3]);
    to[96] = make_float4(y[1][0], y[1][1], y[1][2], y[1][3]);
    to[128] = make_float4(through[b][0], through[b][1], through[b][2], through[b][3]);
  }
}

/// Four adjacent channels of a token, in the data's type.
template <class T>
__device__ inline void store_four(char* to, const float (&x)[4]) {
  const float low[2] = {x[0], x[1]}, high[2] = {x[2], x[3]};
  *reinterpret_cast<uint2*>(to) = make_uint2(pack<T, 2>(low).bits, pack<T, 2>(high).bits);
}

/// From a sub-chunk's gradients to those of what is in memory: the slopes of q's activation and of
/// the gate. With logits, `gamma_sums` gains k (dL/df - dk), which is (1 - gamma) dgamma.
template <GateKind kKind>
__device__ inline void apply_slopes(const Quad& x, const QuadSlopes& slopes, bool live, int i,
                                    TokenGradients& g, float4& gamma_sums) {
  const float exists = live ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    g.q[i][j] *= slopes.q[i][j];
    if constexpr (kKind == GateKind::kLogit) {
      g.f[i][j] = x.k[i][j] * (g.f[i][j] - g.k[i][j]);
      (&gamma_sums.x)[j] = fmaf(exists, g.f[i][j], (&gamma_sums.x)[j]);
      g.f[i][j] *= slopes.opening[i][j];
    } else {
      g.f[i][j] *= x.f[i][j];
    }
  }
}

/// dq, dk and the gate's gradient of one token and the lane's four channels.
template <class T, GateKind kKind>
__device__ inline void store_token(const GlaParams& p, const ChunkPlace& at, int token, int channel,
                                   bool wide_gate, const float (&dq)[4], const float (&dk)[4],
                                   const float (&dgate)[4]) {
  store_four<T>(at.rows.dq.row(token) + channel * 2, dq);
  if constexpr (kKind == GateKind::kLogDecay) {
    store_four<T>(at.rows.dk.row(token) + channel * 2, dk);
  }
  if (!p.gate_per_head) {
    char* to = at.rows.dgate.row(token);
    if (wide_gate) {
      *reinterpret_cast<float4*>(to + channel * 4) =
          make_float4(dgate[0], dgate[1], dgate[2], dgate[3]);
    } else {
      store_four<T>(to + channel * 2, dgate);
    }
  }
}

/// The warp's row of partial sums of dgamma, from what its lanes have summed up.
__device__ inline void store_gamma_sums(const ChunkBackward& a, const ChunkPlace& at,
                                        const float4* gamma_sums, int channel) {
  const GlaParams& p = a.backward.forward;
  const int r = at.lane / 4, c = at.lane % 4;
  __syncwarp();
  if (r < 4) {  // lane 4j + c adds up channel j of the lanes with this c
    float sum = 0;
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      sum += reinterpret_cast<const float*>(gamma_sums - at.lane + row * 4 + c)[r];
    }
    const float bound = p.gamma == nullptr
                            ? 0.0f
                            : static_cast<const float*>(p.gamma)[at.head * p.key_dim + channel + r];
    partial_sums(a, at)[channel + r] = sum / (1.0f - bound);
  }
}

/// The gradients of this warp's K-slice, a sub-chunk at a time; the first one's inputs are under
/// way.
template <class T, GateKind kKind>
__device__ inline void store_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                       const ChunkShared& sh, QuadInputs<T, kKind>& inputs) {
  const GlaParams& p = a.backward.forward;
  const int r = at.lane / 4, c = at.lane % 4, channel = at.warp * kSlice + 4 * c;
  const bool wide_gate = p.gate.dtype == DType::kFloat32;
  float gamma[4];
  load_lane_gamma(p, at.head, channel, gamma);
  // Kept where the first sub-chunk's sums have been.
  float4* gamma_sums = sh.sums(at.warp, 0, at.lane);
#pragma unroll 1
  for (int b = 0; b < kSubChunks && b * kSubChunk < at.tokens; ++b) {
    const int token = b * kSubChunk + 2 * r;
    Quad x;
    QuadSlopes slopes;
    inputs.get(gamma, at.tokens - token, x, slopes);
    TokenGradients g;
    compute_token_gradients(x, sh.sums(at.warp, b, at.lane), sh, b, at.lane, g);
    if (b + 1 < kSubChunks) {
      inputs.move_to(token + kSubChunk);
      inputs.load(channel);
    }
    float4 sum = b == 0 ? make_float4(0, 0, 0, 0) : *gamma_sums;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool live = token + i < at.tokens;
      apply_slopes<kKind>(x, slopes, live, i, g, sum);
      if (p.gate_per_head) {
        const float of_head = quad_sum(g.f[i][0] + g.f[i][1] + g.f[i][2] + g.f[i][3]);
        if (c == 0) {
          sh.head_sums(at.warp)[token + i] = of_head;
        }
      }
      if (live) {
        store_token<T, kKind>(p, at, token + i, channel, wide_gate, g.q[i], g.k[i], g.f[i]);
      }
    }
    if constexpr (kKind == GateKind::kLogit) {
      *gamma_sums = sum;
    }
  }
  if (kKind == GateKind::kLogit && a.backward.dgamma_partial != nullptr) {
    store_gamma_sums(a, at, gamma_sums, channel);
  }
}

/// One gate a head: the sum of its gradients over the channels, a thread a token.
template <class T>
__device__ inline void store_head_gate_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                                 const ChunkShared& sh) {
  for (int token = static_cast<int>(threadIdx.x); token < at.tokens;
       token += static_cast<int>(blockDim.x)) {
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

template <class T, GateKind kKind>
__global__ void __launch_bounds__(kMaxKeySlices * 32, 1)
    chunk_backward_kernel(const __grid_constant__ ChunkBackward a) {
  extern __shared__ __align__(16) char memory[];
  const GlaParams& p = a.backward.forward;
  const ChunkShared sh(memory, p.key_dim, p.value_dim);
  ChunkRows& rows = sh.rows();
  wait_for_kernels_before();
  const auto index = static_cast<int>(blockIdx.x), heads = static_cast<int>(p.heads);
  const int chunk = index / heads, head = index % heads;
  if (threadIdx.x < 32) {
    rows.find(a, chunk, head, static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  const ChunkPlace at(p, chunk, head, rows);
  if (at.tokens == 0) {
    clear_partial_sums(a, at);
    return;
  }

  // Load.
  const auto columns = static_cast<int>(p.value_dim);
  copy_inputs(a, at, sh);
  StateGradientFetch gradients;
  if (at.warp < at.value_slices) {
    gradients.load(a, at, 0, at.warp);
  }
  prefetch_inputs(a, at);
  wait_for_copies<0>();
  finish_rows<T>(sh.d_o, InputActivation::kNone, at.tokens, columns);
  finish_rows<T>(sh.values, p.v_activation, at.tokens, columns);
  __syncthreads();

  // Factors and scores.
  compute_half_factors(at, sh);
  __syncthreads();
  compute_all_scores(at, sh);
  __syncthreads();

  // dv, while the first states for the sums are on their way.
  BoundaryFetch boundaries(a, at);
  store_value_gradients<T>(a, at, sh, gradients);

  // Sums at the chunk's boundaries, handed on to the sub-chunks.
  ChunkSums sums;
  float through[kSubChunks][4];
  QuadInputs<T, kKind> inputs(p, rows);
  if (at.warp < at.key_slices) {
    float chunk_through[4];
    if (has_one_column_tile(at)) {
      accumulate_boundaries<true>(at, sh, boundaries, sums, chunk_through);
    } else {
      accumulate_boundaries<false>(at, sh, boundaries, sums, chunk_through);
    }
    descend_to_sub_chunks(at, sh, sums, chunk_through, through);
    inputs.move_to(at.lane / 4 * 2);
    inputs.load(at.warp * kSlice + at.lane % 4 * 4);
  }
  __syncthreads();  // rows and tiles give way to the sums

  // Gradients within the sub-chunks.
  if (at.warp < at.key_slices) {
    store_sums(at, sh, sums, through);
    store_gradients<T, kKind>(a, at, sh, inputs);
  }
  if (p.gate_per_head) {
    __syncthreads();
    store_head_gate_gradients<T>(a, at, sh);
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
  const auto launch = [&]<GateKind kKind>() {
    constexpr auto* kKernel = &chunk_backward_kernel<T, kKind>;
    TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
    return launch_early<kKernel>(dim3(static_cast<unsigned>(work.chunks.count * p.heads)),
                                 dim3(threads), bytes, stream, work);
  };
  return p.gate_kind == GateKind::kLogit ? launch.template operator()<GateKind::kLogit>()
                                         : launch.template operator()<GateKind::kLogDecay>();
}

}  // namespace tidegate::kernels::gla
