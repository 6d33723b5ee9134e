// The launches of the plain kernels, and of the two kernels that one or two tokens take instead:
// token_step_kernel (token_step.cuh), and decode_kernel, below, for what that one does not take.

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/plain/plain_backward.cuh"
#include "kernels/gla/cuda/plain/plain_scan.cuh"
#include "kernels/gla/cuda/plain/token_step.cuh"
#include "kernels/gla/gla_cuda.h"
#include "kernels/gla/token_step_cuda.h"

namespace tidegate::kernels::gla {

// ---- One or two tokens ----
//
// As decoding has them: bound by reading and writing the state, once, in place
// if h_final is h0.
//
// A block of threads has all rows of 32 * kVec columns of one head's state; each of its eight warps
// takes every eighth row, and a thread kVec neighbouring columns of it, eight rows or more in
// flight. While the first of them are on their way, all threads prepare q, k and the decays in
// shared memory. Each warp adds up its own rows' part of the output; the warps' parts meet in
// shared memory.

constexpr int kStepWarps = 8;
/// Rows of the state that a thread has in flight. Of single floats, as few blocks have them, as
/// many as make a head's 128 rows at once.
template <class Real, int kVec>
constexpr int kStepRowsInFlight = kVec == 1 && sizeof(Real) == 4 ? 16 : 8;

/// q, k and decays of the tokens, in shared memory: [token][K] each.
template <class Real>
struct StepTokens {
  Real *query, *key, *decay;

  __device__ StepTokens(char* shared, int key_dim)
      : query(reinterpret_cast<Real*>(shared)),
        key(query + kStepTokens * key_dim),
        decay(key + kStepTokens * key_dim) {}

  /// By all threads.
  __device__ void load(const PlainInputs<Real>& inputs, int tokens, int key_dim) const {
    for (int i = threadIdx.x; i < tokens * key_dim; i += 32 * kStepWarps) {
      const int step = i / key_dim, channel = i % key_dim;
      const LogitGate<Real> gate = inputs.gate(step, channel);
      query[i] = inputs.query(step, channel);
      key[i] = gate.key;
      decay[i] = gate.decay;
    }
  }

  /// One row of the state through the tokens, and its part of the outputs.
  template <int kVec>
  __device__ void advance(int row, int tokens, int key_dim, const Real (&value)[kStepTokens][kVec],
                          Real (&s)[kVec], Real (&acc)[kStepTokens][kVec]) const {
#pragma unroll
    for (int t = 0; t < kStepTokens; ++t) {
      if (t < tokens) {
        const Real f = decay[t * key_dim + row], k = key[t * key_dim + row];
        const Real q = query[t * key_dim + row];
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          s[v] = fused(f, s[v], k * value[t][v]);
          acc[t][v] = fused(q, s[v], acc[t][v]);
        }
      }
    }
  }
};

/// The values of a thread's columns; zero where they do not exist.
template <class Real, int kVec>
__device__ inline void load_step_values(const PlainInputs<Real>& inputs, int tokens, int column,
                                        bool exists, Real (&value)[kStepTokens][kVec]) {
  for (int t = 0; t < tokens; ++t) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      if (t == 0) value[0][v] = exists ? inputs.value(0, column + v) : Real(0);
      if (t == 1) value[1][v] = exists ? inputs.value(1, column + v) : Real(0);
    }
  }
}

/// Adds up the warps' parts of a token's output, in their order, and stores it.
template <class Real, int kVec>
__device__ inline void store_step_output(const HeadRows& out, int t, int first_column,
                                         int value_dim, const Real (&acc)[kVec],
                                         Real (&sums)[kStepWarps][32 * kVec]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    sums[warp][lane * kVec + v] = acc[v];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * kVec; i += 32 * kStepWarps) {
    Real sum = 0;
    for (int w = 0; w < kStepWarps; ++w) {
      sum += sums[w][i];
    }
    if (first_column + i < value_dim) {
      out.store(t, first_column + i, sum);
    }
  }
}

/// Asks for the columns of a tile of the state, into the second-level cache, while the kernel
/// before makes q, k and v.
template <class Real, int kColumns>
__device__ inline void ask_for_state(const Real* corner, int key_dim, int value_dim,
                                     int first_column) {
  constexpr int kLine = 128 / sizeof(Real), kLines = (kColumns + kLine - 1) / kLine;
  for (int i = threadIdx.x; i < key_dim * kLines; i += 32 * kStepWarps) {
    const int right = i % kLines * kLine;
    if (first_column + right < value_dim) {
      prefetch_line(corner + static_cast<int64_t>(i / kLines) * value_dim + right);
    }
  }
}

/// A thread's columns of the state matrix before and after the step; a warp has every kStepWarps-th
/// row. Null where there is no such state, zero where the columns do not exist.
template <class Real, int kVec>
struct StepColumns {
  using Pack = Pack<Real, kVec>;
  static constexpr int kInFlight = kStepRowsInFlight<Real, kVec>;
  static constexpr int kRows = kStepWarps * kInFlight;  // of a block at a time

  const Real* before;
  Real* after;
  int key_dim, value_dim;
  bool exists;

  __device__ int row(int first, int i) const { return first + threadIdx.x / 32 + i * kStepWarps; }

  __device__ void load(int first, Pack (&state)[kInFlight]) const {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      state[i] = {};
      if (before != nullptr && exists && row(first, i) < key_dim) {
        state[i] = load_streaming<Real, kVec>(before + int64_t{row(first, i)} * value_dim);
      }
    }
  }

  /// Takes the rows through the tokens: their output into `acc`, the state after them to memory.
  __device__ void advance(int first, const Pack (&state)[kInFlight], const StepTokens<Real>& tokens,
                          int count, const Real (&value)[kStepTokens][kVec],
                          Real (&acc)[kStepTokens][kVec]) const {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = row(first, i);
      if (!exists || at >= key_dim) continue;
      Real s[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        s[v] = state[i].get(v);
      }
      tokens.advance(at, count, key_dim, value, s, acc);
      if (after != nullptr) {
        __stcs(reinterpret_cast<typename Pack::Bits*>(after + int64_t{at} * value_dim),
               pack<Real, kVec>(s).bits);
      }
    }
  }
};

/// Null stays null.
template <class Real>
__device__ inline Real* offset_unless_null(Real* first, int64_t offset) {
  return first == nullptr ? nullptr : first + offset;
}

template <class Real, int kVec>
__global__ void __launch_bounds__(32 * kStepWarps, 3) decode_kernel(const GlaParams p) {
  using Columns = StepColumns<Real, kVec>;
  constexpr int kColumns = 32 * kVec;
  extern __shared__ __align__(16) char shared[];
  const auto key_dim = static_cast<int>(p.key_dim), value_dim = static_cast<int>(p.value_dim);
  const StepTokens<Real> tokens(shared, key_dim);
  __shared__ Real sums[kStepWarps][kColumns];

  const int column_tiles = (value_dim + kColumns - 1) / kColumns;
  const int64_t pair = blockIdx.x / column_tiles;  // of sequence and head
  const int first_column = static_cast<int>(blockIdx.x % column_tiles) * kColumns;
  const int column = first_column + static_cast<int>(threadIdx.x % 32) * kVec;
  const int64_t state_at = pair * key_dim * value_dim;
  const Real* const h0 = offset_unless_null(static_cast<const Real*>(p.h0), state_at);
  let_next_kernel_begin();
  if (kVec == 1 && h0 != nullptr) {  // of many blocks' states, the memory is busy anyway
    ask_for_state<Real, kColumns>(h0 + first_column, key_dim, value_dim, first_column);
  }
  wait_for_kernels_before();
  const int64_t head = pair % p.heads;
  const Sequence seq = find_sequence(p.layout, pair / p.heads);
  const PlainInputs<Real> inputs(p, seq, p.layout.reverse, head);
  const HeadRows out(p.o, seq, p.layout.reverse, head);
  const Columns columns{offset_unless_null(h0, column),
                        offset_unless_null(static_cast<Real*>(p.h_final), state_at + column),
                        key_dim, value_dim, column < value_dim};

  Real acc[kStepTokens][kVec] = {}, value[kStepTokens][kVec] = {};
  load_step_values(inputs, seq.length, column, columns.exists, value);
  for (int first = 0; first < key_dim; first += Columns::kRows) {
    typename Columns::Pack state[Columns::kInFlight];
    columns.load(first, state);
    if (first == 0) {  // while the states are on their way
      tokens.load(inputs, seq.length, key_dim);
      __syncthreads();
    }
    columns.advance(first, state, tokens, seq.length, value, acc);
  }

#pragma unroll
  for (int t = 0; t < kStepTokens; ++t) {
    if (t >= seq.length) {
      return;
    }
    store_step_output(out, t, first_column, value_dim, acc[t], sums);
  }
}

// ---- Launches ----

namespace {

constexpr int kSharedBytes = 48 << 10;  // what every device gives without being asked
constexpr int kTileTime = 16;           // tokens that a block stages at once: more do not help

int tile_time(int bytes_per_token) {
  return std::clamp(kSharedBytes / bytes_per_token, 1, kTileTime);
}

template <class Real, bool kValueGradient>
cudaError_t launch_scan(PlainScan scan, cudaStream_t stream) {
  const GlaParams& p = scan.params;
  const int bytes = plain_scan_bytes_per_token<Real>(p.key_dim);
  scan.tile_time = tile_time(bytes);
  const int64_t blocks =
      p.layout.sequences * p.heads * ceil_div(p.value_dim, LaneSplit(p.key_dim).lines());
  return launch_unless_empty(&plain_scan_kernel<Real, kValueGradient>, blocks, dim3(kPlainThreads),
                             bytes * scan.tile_time, stream, scan);
}

int64_t step_blocks(const GlaParams& p, int vec) {
  return p.layout.sequences * p.heads * ceil_div(p.value_dim, 32 * vec);
}

template <class Real, int kVec>
cudaError_t launch_step(const GlaParams& p, cudaStream_t stream) {
  const int64_t blocks = step_blocks(p, kVec);
  const int bytes = 3 * kStepTokens * static_cast<int>(p.key_dim * sizeof(Real));
  if (blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  return launch_in_chain<&decode_kernel<Real, kVec>>(dim3(static_cast<unsigned>(blocks)),
                                                     dim3(32 * kStepWarps), bytes, stream, p);
}

/// By packs of 16 bytes, or by single numbers where the states are not aligned, and where packs
/// would leave most multiprocessors without a block: one that has 64 KB of a state to itself takes
/// three times as long as four that share it.
template <class Real>
cudaError_t launch_step(const GlaParams& p, cudaStream_t stream, bool is_aligned) {
  constexpr int kVec = 16 / sizeof(Real);
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  return is_aligned && step_blocks(p, kVec) * 2 > limits.multiprocessors
             ? launch_step<Real, kVec>(p, stream)
             : launch_step<Real, 1>(p, stream);
}

bool states_aligned(const GlaParams& p) {
  return p.value_dim * element_size(state_dtype(p.q.dtype)) % 16 == 0 && is_aligned(p.h0, 16) &&
         is_aligned(p.h_final, 16);
}

/// How the backward kernel divides its work, and with it the workspace: found for the plan and for
/// the launch by this type alone.
template <class Real>
struct PlainBackwardSchedule {
  PlainBackward work;
  int blocks = 0;
  int64_t state_bytes = 0, gate_bytes = 0;  // the parts of the workspace, in their order

  cudaError_t find(const GlaBackwardParams& params) {
    const GlaParams& p = params.forward;
    DeviceLimits limits;
    TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
    work.params = params;
    work.items = p.layout.sequences * p.heads * ceil_div(p.key_dim, LaneSplit(p.value_dim).lines());
    // Chunks as long as there are chunks: the fewest states to keep.
    const auto time = static_cast<int>(std::max<int64_t>(1, p.layout.time));
    work.chunk = static_cast<int>(std::ceil(std::sqrt(static_cast<double>(time))));
    work.kept = (time + work.chunk - 1) / work.chunk;
    work.tile_time = tile_time(plain_backward_bytes_per_token<Real>(p.value_dim));
    blocks = static_cast<int>(std::min<int64_t>(work.items, 4 * limits.multiprocessors));
    constexpr int64_t kBytes = sizeof(Real);
    state_bytes = int64_t{blocks} * (work.kept + work.chunk) * kPlainOwn * kPlainThreads * kBytes;
    gate_bytes =
        p.gate_per_head ? p.layout.batch * p.layout.time * p.heads * p.key_dim * kBytes : 0;
    return cudaSuccess;
  }

  int64_t workspace_bytes() const { return state_bytes + gate_bytes; }
  void assign(void* workspace) {
    work.states = workspace;
    work.gate_channels = static_cast<char*>(workspace) + state_bytes;
  }
};

template <class Real>
cudaError_t launch_gate_sum(const PlainBackward& work, cudaStream_t stream) {
  const GlaParams& p = work.params.forward;
  constexpr int kGatesPerBlock = kPlainThreads / 32;
  const int64_t gates = p.layout.batch * p.layout.time * p.heads;
  return launch_unless_empty(&plain_gate_sum_kernel<Real>, ceil_div(gates, kGatesPerBlock),
                             dim3(kPlainThreads), 0, stream, work);
}

template <class Real>
cudaError_t launch_backward(const GlaBackwardParams& params, cudaStream_t stream) {
  const GlaParams& p = params.forward;
  const PlainScan values = {p, params.d_o, params.dv, params.dh_final};
  TIDEGATE_RETURN_IF_CUDA_ERROR((launch_scan<Real, true>(values, stream)));

  PlainBackwardSchedule<Real> schedule;
  TIDEGATE_RETURN_IF_CUDA_ERROR(schedule.find(params));
  schedule.assign(p.workspace);
  const int bytes = schedule.work.tile_time * plain_backward_bytes_per_token<Real>(p.value_dim);
  TIDEGATE_RETURN_IF_CUDA_ERROR(launch_unless_empty(&plain_backward_kernel<Real>,
                                                    int64_t{schedule.blocks}, dim3(kPlainThreads),
                                                    bytes, stream, schedule.work));
  return p.gate_per_head ? launch_gate_sum<Real>(schedule.work, stream) : cudaSuccess;
}

}  // namespace

bool token_step_takes(const GlaParams& p) { return token_step_fits(p); }

cudaError_t token_step_defers(const GlaParams& p, bool* defers) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  *defers = token_step_fits(p) && p.gate_kind == GateKind::kLogit && p.gate.dtype == p.q.dtype &&
            p.h0 != nullptr && are_many_states(p, limits);
  return cudaSuccess;
}

cudaError_t token_step(const GlaParams& p, const TokenStepOptions& options, cudaStream_t stream) {
  return launch_token_step(p, options, stream);
}

cudaError_t gla_plain_forward(const GlaParams& p, cudaStream_t stream) {
  if (token_step_fits(p)) {
    return launch_token_step(p, TokenStepOptions{}, stream);
  }
  return dispatch_state(p.q.dtype, [&]<class Real>() {
    if (p.layout.time <= kStepTokens) {
      return launch_step<Real>(p, stream, states_aligned(p));
    }
    return launch_scan<Real, false>({p, {}, p.o, p.h0, p.h_final}, stream);
  });
}

cudaError_t gla_plain_backward_plan(const GlaBackwardParams& params, GlaPlan* plan) {
  return dispatch_state(params.forward.q.dtype, [&]<class Real>() {
    PlainBackwardSchedule<Real> schedule;
    TIDEGATE_RETURN_IF_CUDA_ERROR(schedule.find(params));
    plan->partials = params.forward.layout.sequences;
    plan->workspace_bytes = schedule.workspace_bytes();
    return cudaSuccess;
  });
}

cudaError_t sum_gate_channels(const GlaBackwardParams& params, void* channels,
                              cudaStream_t stream) {
  return dispatch_state(params.forward.q.dtype, [&]<class Real>() {
    return launch_gate_sum<Real>({.params = params, .gate_channels = channels}, stream);
  });
}

cudaError_t gla_plain_backward(const GlaBackwardParams& params, cudaStream_t stream) {
  return dispatch_state(params.forward.q.dtype,
                        [&]<class Real>() { return launch_backward<Real>(params, stream); });
}

}  // namespace tidegate::kernels::gla
