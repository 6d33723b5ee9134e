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
#include "kernels/gla/token_step_cuda.h"

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

/// Which head and columns a block has, and which of them a thread.
struct TokenStepPlace {
  using T = TokenStepTile;
  int pair;  // of sequence and head
  int first_column, sequence, head;
  int warp, lane, column, first_row;  // of the thread
  bool exists;                        // its columns
  int64_t corner;                     // of the head's state

  __device__ __forceinline__ TokenStepPlace(const GlaParams& p, int column_tiles)
      : pair(static_cast<int>(blockIdx.x) / column_tiles),
        first_column((static_cast<int>(blockIdx.x) - pair * column_tiles) * T::kColumns),
        sequence(pair / static_cast<int>(p.heads)),
        head(pair - sequence * static_cast<int>(p.heads)),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        column(first_column + lane % T::kLanes * T::kVec),
        first_row((warp * (32 / T::kLanes) + lane / T::kLanes) * T::kRows),
        exists(column < static_cast<int>(p.value_dim)),
        corner(static_cast<int64_t>(pair) * static_cast<int>(p.key_dim) *
               static_cast<int>(p.value_dim)) {}
};

using TokenStepStates = float4[TokenStepTile::kRows][TokenStepTile::kThreads];

/// Has the thread's kRows rows of the state from `row` on copied to its place in `states`.
__device__ __forceinline__ void copy_states(const GlaParams& p, const TokenStepPlace& at, int row,
                                            TokenStepStates& states) {
  const auto key_dim = static_cast<int>(p.key_dim), value_dim = static_cast<int>(p.value_dim);
  const float* const before = static_cast<const float*>(p.h0) + at.corner + at.column;
  const float* from = before + row * value_dim;
#pragma unroll
  for (int i = 0; i < TokenStepTile::kRows; ++i) {
    const bool is_there = p.h0 != nullptr && at.exists && row + i < key_dim;
    copy_async_or_zero(&states[i][threadIdx.x], is_there ? from : before, is_there);
    from += value_dim;
  }
  commit_copies();
}

/// Begins to bring the states of two later blocks into the second-level cache, which read them when
/// a multiprocessor has room: of as many blocks as it has room for at once (`wave`) the first half
/// does so for as many again.
__device__ __forceinline__ void prefetch_later_states(const GlaParams& p, int column_tiles,
                                                      int wave) {
  using T = TokenStepTile;
  const auto key_dim = static_cast<int>(p.key_dim), value_dim = static_cast<int>(p.value_dim);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int after = 2 * static_cast<int>(blockIdx.x) + i, block = wave + after;
    if (after >= wave || block >= static_cast<int>(gridDim.x)) return;
    const int pair = block / column_tiles;
    const float* const corner = static_cast<const float*>(p.h0) +
                                static_cast<int64_t>(pair) * key_dim * value_dim +
                                (block - pair * column_tiles) * T::kColumns;
#pragma unroll 1
    for (int row = threadIdx.x; row < key_dim; row += T::kThreads) {
      prefetch_line(corner + row * value_dim);
    }
  }
}

/// One channel of the token, as it lies in memory.
template <class E, class Gate, GateKind kKind>
struct TokenChannel {
  float query = 0.0f, gate = 0.0f, key = 0.0f, bound = 0.0f;

  __device__ __forceinline__ void load(const GlaParams& p, const TokenStepPlace& at, int channel) {
    query = widen(token_row<E>(p.q, at.sequence, at.head)[channel]);
    gate = widen(token_row<Gate>(p.gate, at.sequence, at.head)[p.gate_per_head ? 0 : channel]);
    if constexpr (kKind == GateKind::kLogit) {
      const auto key_dim = static_cast<int>(p.key_dim);
      bound = p.gamma == nullptr ? 0.0f
                                 : static_cast<const float*>(p.gamma)[at.head * key_dim + channel];
    } else {
      key = widen(token_row<E>(p.k, at.sequence, at.head)[channel]);
    }
  }

  __device__ __forceinline__ LogitGate<float> key_and_decay() const {
    if constexpr (kKind == GateKind::kLogit) {
      return logit_gate<GateMath<float, false>>(gate, bound, 1.0f - bound);
    } else {
      return {precise_decay(gate), key};
    }
  }
};

/// The token in shared memory, in fp32: `padded` queries, as many keys and decays, of which those
/// past key_dim are zero. `own`: the thread's first channel, which is there already.
template <class E, class Gate, GateKind kKind>
__device__ __forceinline__ void make_token(const GlaParams& p, const TokenStepPlace& at, int padded,
                                           TokenChannel<E, Gate, kKind> own, float* query,
                                           float* key, float* decay) {
  const auto key_dim = static_cast<int>(p.key_dim);
  const int first = threadIdx.x;
#pragma unroll 1
  for (int channel = first; channel < padded; channel += TokenStepTile::kThreads) {
    if (channel >= key_dim) {
      query[channel] = key[channel] = decay[channel] = 0.0f;
      continue;
    }
    if (channel != first) own.load(p, at, channel);
    const LogitGate<float> gate = own.key_and_decay();
    query[channel] =
        static_cast<float>(p.scale) * activate<GateMath<float, false>>(p.q_activation, own.query);
    key[channel] = gate.key;
    decay[channel] = gate.decay;
  }
}

/// What tokens that a state lacks do to it, in shared memory, the oldest first: [token][padded]
/// keys and decays, [token][kColumns] values of the block's columns.
struct PendingInBlock {
  float *key, *decay, *value;
  int count, padded;

  static constexpr int bytes(int count, int padded) {
    return count * (2 * padded + TokenStepTile::kColumns) * static_cast<int>(sizeof(float));
  }
  __device__ __forceinline__ PendingInBlock(float* shared, int count, int padded)
      : key(shared),
        decay(shared + count * padded),
        value(shared + 2 * count * padded),
        count(count),
        padded(padded) {}

  /// One channel of the tokens, and of the first threads one column.
  struct Raw {
    float gate[PendingTokens::kMost], value[PendingTokens::kMost], bound;
  };
  template <class E>
  __device__ __forceinline__ void load(const GlaParams& p, const PendingTokens& tokens,
                                       const TokenStepPlace& at, int channel, Raw& raw) const {
    const auto key_dim = static_cast<int>(p.key_dim);
    const int column = at.first_column + channel;
    const bool has_column = channel < TokenStepTile::kColumns && column < p.value_dim;
    raw.bound = p.gamma == nullptr || channel >= key_dim
                    ? 0.0f
                    : static_cast<const float*>(p.gamma)[at.head * key_dim + channel];
#pragma unroll
    for (int t = 0; t < PendingTokens::kMost; ++t) {
      raw.gate[t] = raw.value[t] = 0.0f;
      if (t < count && channel < key_dim) {
        raw.gate[t] = widen(token_row<E>(tokens.gate[t], at.sequence, at.head)[channel]);
      }
      if (t < count && has_column) {
        raw.value[t] = widen(token_row<E>(tokens.v[t], at.sequence, at.head)[column]);
      }
    }
  }
  __device__ __forceinline__ void store(const GlaParams& p, int channel, const Raw& raw) const {
    if (channel >= padded) return;
#pragma unroll
    for (int t = 0; t < PendingTokens::kMost; ++t) {
      if (t >= count) break;
      LogitGate<float> gate =
          logit_gate<GateMath<float, false>>(raw.gate[t], raw.bound, 1.0f - raw.bound);
      if (channel >= static_cast<int>(p.key_dim)) gate = {0.0f, 0.0f};
      key[t * padded + channel] = gate.key;
      decay[t * padded + channel] = gate.decay;
      if (channel < TokenStepTile::kColumns) {
        value[t * TokenStepTile::kColumns + channel] =
            activate<GateMath<float, false>>(p.v_activation, raw.value[t]);
      }
    }
  }
  template <class E>
  __device__ __forceinline__ void make(const GlaParams& p, const PendingTokens& tokens,
                                       const TokenStepPlace& at, const Raw& first) const {
    store(p, static_cast<int>(threadIdx.x), first);
#pragma unroll 1
    for (int channel = static_cast<int>(threadIdx.x) + TokenStepTile::kThreads; channel < padded;
         channel += TokenStepTile::kThreads) {
      Raw raw;
      load<E>(p, tokens, at, channel, raw);
      store(p, channel, raw);
    }
  }

  /// Four rows of the thread's columns become what the tokens make of them: as step_rows() would
  /// have written them.
  __device__ __forceinline__ void step_four(int row, const TokenStepPlace& at,
                                            float (&s)[4][TokenStepTile::kVec]) const {
    const float *k_row = key + row, *f_row = decay + row,
                *v_row = value + (at.column - at.first_column);
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const float4 k = *reinterpret_cast<const float4*>(k_row);
      const float4 f = *reinterpret_cast<const float4*>(f_row);
      const float4 v = *reinterpret_cast<const float4*>(v_row);
      const float ks[4] = {k.x, k.y, k.z, k.w}, fs[4] = {f.x, f.y, f.z, f.w},
                  vs[TokenStepTile::kVec] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int c = 0; c < TokenStepTile::kVec; ++c) {
          s[i][c] = fmaf(fs[i], s[i][c], ks[i] * vs[c]);
        }
      }
      k_row += padded;
      f_row += padded;
      v_row += TokenStepTile::kColumns;
    }
  }
};

/// S = decay S + key value in the thread's rows from `row` on, which it writes; adds its part of
/// query S to `acc`.
template <bool kPending>
__device__ __forceinline__ void step_rows(const GlaParams& p, const TokenStepPlace& at, int row,
                                          const PendingInBlock& pending, const float* query,
                                          const float* key, const float* decay,
                                          const float (&value)[TokenStepTile::kVec],
                                          const TokenStepStates& states,
                                          float (&acc)[TokenStepTile::kVec]) {
  using T = TokenStepTile;
  const auto key_dim = static_cast<int>(p.key_dim), value_dim = static_cast<int>(p.value_dim);
  float* to = static_cast<float*>(p.h_final) + at.corner + at.column + row * value_dim;
#pragma unroll 1
  for (int half = 0; half < T::kRows; half += 4) {
    float s[4][T::kVec];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 state = states[half + i][threadIdx.x];
      s[i][0] = state.x;
      s[i][1] = state.y;
      s[i][2] = state.z;
      s[i][3] = state.w;
    }
    if constexpr (kPending) pending.step_four(row + half, at, s);
    const float4 q = *reinterpret_cast<const float4*>(query + row + half);
    const float4 k = *reinterpret_cast<const float4*>(key + row + half);
    const float4 f = *reinterpret_cast<const float4*>(decay + row + half);
    const float qs[4] = {q.x, q.y, q.z, q.w}, ks[4] = {k.x, k.y, k.z, k.w},
                fs[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int v = 0; v < T::kVec; ++v) {
        s[i][v] = fmaf(fs[i], s[i][v], ks[i] * value[v]);
        acc[v] = fmaf(qs[i], s[i][v], acc[v]);
      }
      if (p.h_final != nullptr && row + half + i < key_dim) {
        __stcs(reinterpret_cast<float4*>(to), make_float4(s[i][0], s[i][1], s[i][2], s[i][3]));
      }
      to += value_dim;
    }
  }
}

/// Adds `acc` up over the rows of a warp, then over the warps, and writes the outputs.
template <class E>
__device__ __forceinline__ void write_token(
    const GlaParams& p, const TokenStepPlace& at, float (&acc)[TokenStepTile::kVec],
    float (&sums)[TokenStepTile::kWarps][TokenStepTile::kColumns]) {
  using T = TokenStepTile;
#pragma unroll
  for (int v = 0; v < T::kVec; ++v) {
#pragma unroll
    for (int distance = 16; distance >= T::kLanes; distance /= 2) {
      acc[v] += __shfl_xor_sync(~0u, acc[v], distance);
    }
  }
  if (at.lane < T::kLanes) {
    *reinterpret_cast<float4*>(&sums[at.warp][at.lane * T::kVec]) =
        make_float4(acc[0], acc[1], acc[2], acc[3]);
  }
  __syncthreads();
  const int out = static_cast<int>(threadIdx.x);
  if (out < T::kColumns && at.first_column + out < static_cast<int>(p.value_dim)) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) sum += sums[w][out];
    E* const o = static_cast<E*>(p.o.data) + at.sequence * p.o.stride_b +
                 static_cast<int64_t>(at.head) * p.o.stride_h;
    o[at.first_column + out] = narrow<E>(sum);
  }
}

/// How a launch goes about its states.
struct TokenStepLaunch {
  int column_tiles;
  bool h0_is_settled, prefetches;
  int wave;
};

/// Blocks that registers leave room for on a multiprocessor.
constexpr int token_step_blocks(GateKind kind, bool pending) {
  return kind != GateKind::kLogit ? 6 : pending ? TokenStepTile::kBlocksAtOnce : 10;
}

/// E: of q, k, v and o; Gate: of the gate. No __ldg: the kernel before may write them while this
/// one runs. kPending: there are tokens that h0 lacks.
template <class E, class Gate, GateKind kKind, bool kPending>
__global__ void __launch_bounds__(TokenStepTile::kThreads, token_step_blocks(kKind, kPending))
    token_step_kernel(const __grid_constant__ GlaParams p, const TokenStepLaunch launch,
                      const __grid_constant__ PendingTokens tokens) {
  using T = TokenStepTile;
  extern __shared__ __align__(16) float token[];
  __shared__ __align__(16) float sums[T::kWarps][T::kColumns];
  __shared__ __align__(16) TokenStepStates states;  // each thread's own
  const auto key_dim = static_cast<int>(p.key_dim), value_dim = static_cast<int>(p.value_dim);
  const int padded = (key_dim + T::kRows - 1) / T::kRows * T::kRows;
  float *const query = token, *const key = token + padded, *const decay = key + padded;
  const TokenStepPlace at(p, launch.column_tiles);
  const PendingInBlock pending(decay + padded, tokens.count, padded);
  let_next_kernel_begin();
  // While the kernel before makes q, the gate and v: the states, or into the second-level cache,
  // where that kernel may still write them.
  if (!launch.h0_is_settled) {
    const float* const line = static_cast<const float*>(p.h0) + at.corner + at.first_column;
    for (int row = threadIdx.x; launch.prefetches && row < key_dim; row += T::kThreads) {
      prefetch_line(line + row * value_dim);
    }
    wait_for_kernels_before();
  }
  PendingInBlock::Raw raw;
  if constexpr (kPending) pending.load<E>(p, tokens, at, threadIdx.x, raw);
  copy_states(p, at, at.first_row, states);
  if (launch.h0_is_settled) {
    if (launch.wave > 0) prefetch_later_states(p, launch.column_tiles, launch.wave);
    if constexpr (kPending) pending.make<E>(p, tokens, at, raw);
    wait_for_kernels_before();
  }

  Pack<E, T::kVec> raw_value = {};
  if (at.exists) {
    raw_value.bits = *reinterpret_cast<const typename Pack<E, T::kVec>::Bits*>(
        token_row<E>(p.v, at.sequence, at.head) + at.column);
  }
  TokenChannel<E, Gate, kKind> channel;
  if (static_cast<int>(threadIdx.x) < key_dim) channel.load(p, at, threadIdx.x);

  float acc[T::kVec] = {}, value[T::kVec];
#pragma unroll 1
  for (int first = 0; first < key_dim; first += T::kRowsAtOnce) {
    const int row = first + at.first_row;
    if (first > 0) copy_states(p, at, row, states);
    if (first == 0) {
      make_token(p, at, padded, channel, query, key, decay);
#pragma unroll
      for (int v = 0; v < T::kVec; ++v) {
        value[v] = activate<GateMath<float, false>>(p.v_activation, raw_value.get(v));
      }
      __syncthreads();
    }
    wait_for_copies<0>();
    if (!at.exists || row >= key_dim) continue;
    step_rows<kPending>(p, at, row, pending, query, key, decay, value, states, acc);
  }
  write_token<E>(p, at, acc, sums);
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

/// Whether there are more blocks than the device holds at once.
inline bool are_many_states(const GlaParams& p, const DeviceLimits& limits) {
  const int64_t tiles = ceil_div(p.value_dim, int64_t{TokenStepTile::kColumns});
  return limits.major >= 9 && p.layout.sequences * p.heads * tiles >
                                  TokenStepTile::kBlocksAtOnce * int64_t{limits.multiprocessors};
}

template <class E, class Gate, GateKind kKind, bool kPending = false>
cudaError_t launch_token_step(const GlaParams& p, const TokenStepOptions& options,
                              cudaStream_t stream) {
  using T = TokenStepTile;
  constexpr auto* kKernel = &token_step_kernel<E, Gate, kKind, kPending>;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int64_t tiles = ceil_div(p.value_dim, int64_t{T::kColumns});
  const int64_t blocks = p.layout.sequences * p.heads * tiles;
  const int64_t padded = ceil_div(p.key_dim, int64_t{T::kRows}) * T::kRows;
  TokenStepLaunch launch = {static_cast<int>(tiles), options.h0_is_settled, false, 0};
  // With the states of many blocks the memory is busy anyway.
  launch.prefetches = p.h0 != nullptr && blocks <= 2 * int64_t{limits.multiprocessors};
  int64_t bytes = 3 * padded * static_cast<int64_t>(sizeof(float)) +
                  PendingInBlock::bytes(options.pending.count, static_cast<int>(padded));
  if (are_many_states(p, limits)) {
    // States that are only read are taken by as many blocks at once as have room.
    const int at_once =
        p.h_final != nullptr ? T::kBlocksAtOnce : token_step_blocks(kKind, kPending);
    if (p.h0 != nullptr) launch.wave = at_once * limits.multiprocessors;
    constexpr int kOfDriver = 1024, kSpare = 128;
    const int64_t share = limits.shared_bytes / at_once;
    bytes = std::max(bytes, (share - kOfDriver - kSpare - T::kStaticBytes) / 16 * 16);
  }
  return launch_in_chain<kKernel>(dim3(static_cast<unsigned>(blocks)), dim3(T::kThreads),
                                  static_cast<int>(bytes), stream, p, launch, options.pending);
}

inline cudaError_t launch_token_step(const GlaParams& p, const TokenStepOptions& options,
                                     cudaStream_t stream) {
  const auto launch = [&]<class E, class Gate>() {
    return p.gate_kind == GateKind::kLogit
               ? launch_token_step<E, Gate, GateKind::kLogit>(p, options, stream)
               : launch_token_step<E, Gate, GateKind::kLogDecay>(p, options, stream);
  };
  return dispatch_16_bit(p.q.dtype, [&]<class E>() {
    if (options.pending.count > 0) {
      return launch_token_step<E, E, GateKind::kLogit, true>(p, options, stream);
    }
    return p.gate.dtype == DType::kFloat32 ? launch.template operator()<E, float>()
                                           : launch.template operator()<E, E>();
  });
}

}  // namespace tidegate::kernels::gla
