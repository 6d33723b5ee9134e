#pragma once

// The step of decoding of 16-bit data: one token a sequence, bound by the way of a token through
// the kernel where there are few sequences, and by reading and writing the states where there are
// many.
//
// A block has 32 columns of one head's state. Eight lanes share a row of them, 16 bytes each; a
// thread has eight neighbouring rows at a time, all of which are on their way to shared memory at
// once with q, the gate and v: nothing is asked for after something else has come. Blocks are small
// and take few registers, so that a multiprocessor has many states under way.

#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/gla/cuda/plain/plain_scan.cuh"

namespace tidegate::kernels::gla {

struct TokenStepTile {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kVec = 4, kLanes = 8;  // columns of a thread; lanes that share a row
  static constexpr int kColumns = kVec * kLanes;
  static constexpr int kRows = 8;  // neighbouring rows that a thread has in flight
  static constexpr int kRowsAtOnce = kRows * kThreads / kLanes;
  static constexpr int kStaticBytes = kRows * kThreads * 16 + kWarps * kColumns * 4;
  // How many blocks share a multiprocessor where there are more than the device holds at once: they
  // ask for as much shared memory as limits them to it. With ten, as many as would have room, all
  // would read at first and all would write at last.
  static constexpr int kBlocksAtOnce = 8;
};

/// Where the token of a sequence and head lies.
template <class T>
__device__ inline const T* token_row(const HeadSeries& series, int64_t sequence, int64_t head) {
  return static_cast<const T*>(series.data) + sequence * series.stride_b + head * series.stride_h;
}

/// E: of q, k, v and o; Gate: of the gate. No __ldg: the kernel before may write them while this
/// one runs.
template <class E, class Gate, GateKind kKind>
__global__ void __launch_bounds__(TokenStepTile::kThreads, kKind == GateKind::kLogit ? 10 : 6)
    token_step_kernel(const __grid_constant__ GlaParams p, const int column_tiles,
                      const bool h0_is_settled, const bool prefetches) {
  using T = TokenStepTile;
  using Math = GateMath<float, false>;
  extern __shared__ __align__(16) float token[];
  __shared__ __align__(16) float sums[T::kWarps][T::kColumns];
  __shared__ __align__(16) float4 states[T::kRows][T::kThreads];  // each thread's own
  const auto key_dim = static_cast<int>(p.key_dim), value_dim = static_cast<int>(p.value_dim);
  const int padded = (key_dim + T::kRows - 1) / T::kRows * T::kRows;
  float *const query = token, *const key = token + padded, *const decay = key + padded;

  const int pair = static_cast<int>(blockIdx.x) / column_tiles;  // of sequence and head
  const int first_column = (static_cast<int>(blockIdx.x) - pair * column_tiles) * T::kColumns;
  const int sequence = pair / static_cast<int>(p.heads);
  const int head = pair - sequence * static_cast<int>(p.heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = first_column + lane % T::kLanes * T::kVec;
  const int first_row = (warp * (32 / T::kLanes) + lane / T::kLanes) * T::kRows;
  const bool exists = column < value_dim;
  const int64_t corner = static_cast<int64_t>(pair) * key_dim * value_dim;
  const float* const before = static_cast<const float*>(p.h0) + corner + column;
  float* const after = static_cast<float*>(p.h_final) + corner + column;
  let_next_kernel_begin();
  const auto ask = [&](int own) {
    const float* from = before + own * value_dim;
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
      const bool is_there = p.h0 != nullptr && exists && own + i < key_dim;
      copy_async_or_zero(&states[i][threadIdx.x], is_there ? from : before, is_there);
      from += value_dim;
    }
    commit_copies();
  };
  // While the kernel before makes q, the gate and v: the states, or into the second-level cache,
  // where that kernel may still write them.
  if (!h0_is_settled) {
    const float* const line = static_cast<const float*>(p.h0) + corner + first_column;
    for (int row = threadIdx.x; prefetches && row < key_dim; row += T::kThreads) {
      prefetch_line(line + row * value_dim);
    }
    wait_for_kernels_before();
  }
  ask(first_row);
  if (h0_is_settled) wait_for_kernels_before();

  const E* const queries = token_row<E>(p.q, sequence, head);
  const Gate* const gates = token_row<Gate>(p.gate, sequence, head);
  const float* const bounds =
      p.gamma == nullptr ? nullptr : static_cast<const float*>(p.gamma) + head * key_dim;
  constexpr bool is_logit = kKind == GateKind::kLogit;
  Pack<E, T::kVec> raw_value = {};
  if (exists) {
    raw_value.bits = *reinterpret_cast<const typename Pack<E, T::kVec>::Bits*>(
        token_row<E>(p.v, sequence, head) + column);
  }
  // The thread's first channel of the token.
  const int channel = threadIdx.x;
  const bool has_channel = channel < key_dim;
  float raw_query = 0.0f, raw_gate = 0.0f, raw_key = 0.0f, bound = 0.0f;
  const auto load_channel = [&](int at) {
    raw_query = widen(queries[at]);
    raw_gate = widen(gates[p.gate_per_head ? 0 : at]);
    if constexpr (is_logit) {
      bound = bounds == nullptr ? 0.0f : bounds[at];
    } else {
      raw_key = widen(token_row<E>(p.k, sequence, head)[at]);
    }
  };
  if (has_channel) load_channel(channel);

  float acc[T::kVec] = {}, value[T::kVec];
#pragma unroll 1
  for (int first = 0; first < key_dim; first += T::kRowsAtOnce) {
    const int own = first + first_row;
    if (first > 0) ask(own);
    if (first == 0) {
#pragma unroll 1
      for (int at = channel; at < padded; at += T::kThreads) {
        if (at >= key_dim) {
          query[at] = key[at] = decay[at] = 0.0f;
          continue;
        }
        if (at != channel) load_channel(at);
        LogitGate<float> gate;
        if constexpr (is_logit) {
          gate = logit_gate<Math>(raw_gate, bound, 1.0f - bound);
        } else {
          gate = {precise_decay(raw_gate), raw_key};
        }
        query[at] = static_cast<float>(p.scale) * activate<Math>(p.q_activation, raw_query);
        key[at] = gate.key;
        decay[at] = gate.decay;
      }
#pragma unroll
      for (int v = 0; v < T::kVec; ++v) {
        value[v] = activate<Math>(p.v_activation, raw_value.get(v));
      }
      __syncthreads();
    }
    wait_for_copies<0>();
    if (!exists || own >= key_dim) continue;
    float* to = after + own * value_dim;
#pragma unroll 1
    for (int half = 0; half < T::kRows; half += 4) {
      const float4 q = *reinterpret_cast<const float4*>(query + own + half);
      const float4 k = *reinterpret_cast<const float4*>(key + own + half);
      const float4 f = *reinterpret_cast<const float4*>(decay + own + half);
      const float qs[4] = {q.x, q.y, q.z, q.w}, ks[4] = {k.x, k.y, k.z, k.w},
                  fs[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 state = states[half + i][threadIdx.x];
        float s[T::kVec] = {state.x, state.y, state.z, state.w};
#pragma unroll
        for (int v = 0; v < T::kVec; ++v) {
          s[v] = fmaf(fs[i], s[v], ks[i] * value[v]);
          acc[v] = fmaf(qs[i], s[v], acc[v]);
        }
        if (p.h_final != nullptr && own + half + i < key_dim) {
          __stcs(reinterpret_cast<float4*>(to), make_float4(s[0], s[1], s[2], s[3]));
        }
        to += value_dim;
      }
    }
  }

  // Over the rows of a warp, then over the warps.
#pragma unroll
  for (int v = 0; v < T::kVec; ++v) {
#pragma unroll
    for (int distance = 16; distance >= T::kLanes; distance /= 2) {
      acc[v] += __shfl_xor_sync(~0u, acc[v], distance);
    }
  }
  if (lane < T::kLanes) {
    *reinterpret_cast<float4*>(&sums[warp][lane * T::kVec]) =
        make_float4(acc[0], acc[1], acc[2], acc[3]);
  }
  __syncthreads();
  const int out = static_cast<int>(threadIdx.x);
  if (out < T::kColumns && first_column + out < value_dim) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) sum += sums[w][out];
    E* const o = static_cast<E*>(p.o.data) + sequence * p.o.stride_b +
                 static_cast<int64_t>(head) * p.o.stride_h;
    o[first_column + out] = narrow<E>(sum);
  }
}

/// 16-bit data, one token of each sequence, rows in packs.
inline bool token_step_fits(const GlaParams& p) {
  const HeadSeries& v = p.v;
  return is_16_bit(p.q.dtype) && p.layout.time == 1 && p.layout.offsets == nullptr &&
         (p.gate.dtype == p.q.dtype || p.gate.dtype == DType::kFloat32) &&
         p.value_dim % TokenStepTile::kVec == 0 && is_aligned(p.h0, 16) &&
         is_aligned(p.h_final, 16) && is_aligned(v.data, 8) &&
         v.stride_b % TokenStepTile::kVec == 0 && v.stride_h % TokenStepTile::kVec == 0 &&
         p.layout.sequences * p.heads * ceil_div(p.value_dim, int64_t{TokenStepTile::kColumns}) <=
             std::numeric_limits<int>::max();
}

template <class E, class Gate, GateKind kKind>
cudaError_t launch_token_step(const GlaParams& p, bool h0_is_settled, cudaStream_t stream) {
  using T = TokenStepTile;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int64_t tiles = ceil_div(p.value_dim, int64_t{T::kColumns});
  const int64_t blocks = p.layout.sequences * p.heads * tiles;
  const int64_t padded = ceil_div(p.key_dim, int64_t{T::kRows}) * T::kRows;
  // Of many blocks' states, the memory is busy anyway.
  const bool prefetches = p.h0 != nullptr && blocks <= 2 * int64_t{limits.multiprocessors};
  int64_t bytes = 3 * padded * static_cast<int64_t>(sizeof(float));
  if (limits.major >= 9 && blocks > T::kBlocksAtOnce * int64_t{limits.multiprocessors}) {
    constexpr int kOfDriver = 1024, kSpare = 128;
    const int64_t share = limits.shared_bytes / T::kBlocksAtOnce;
    bytes = std::max(bytes, (share - kOfDriver - kSpare - T::kStaticBytes) / 16 * 16);
  }
  return launch_in_chain<&token_step_kernel<E, Gate, kKind>>(
      dim3(static_cast<unsigned>(blocks)), dim3(T::kThreads), static_cast<int>(bytes), stream, p,
      static_cast<int>(tiles), h0_is_settled, prefetches);
}

inline cudaError_t launch_token_step(const GlaParams& p, bool h0_is_settled, cudaStream_t stream) {
  const auto launch = [&]<class E, class Gate>() {
    return p.gate_kind == GateKind::kLogit
               ? launch_token_step<E, Gate, GateKind::kLogit>(p, h0_is_settled, stream)
               : launch_token_step<E, Gate, GateKind::kLogDecay>(p, h0_is_settled, stream);
  };
  return dispatch_16_bit(p.q.dtype, [&]<class E>() {
    return p.gate.dtype == DType::kFloat32 ? launch.template operator()<E, float>()
                                           : launch.template operator()<E, E>();
  });
}

}  // namespace tidegate::kernels::gla
