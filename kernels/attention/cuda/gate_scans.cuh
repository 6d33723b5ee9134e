#pragma once

// Sums of gates over time, and the way back from gradients of scores to gradients of gates: two
// scans over time in float64. Time is divided into chunks that run at the same time: chunks are
// added up first, then every chunk is scanned by itself, from the totals before it, so sums have a
// fixed order. Over at most four chunks of keys one launch does both: a block adds up the chunks
// before its own (whole_gate_scan_kernel). Both steps are parts of blocks of kGateChunk threads,
// which may share a launch with other work; scan_gates and gate_gradients launch a scan by itself
// (forgetting_attention_cuda.cu).

#include "kernels/attention/forgetting_attention_cuda.h"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::attention {

constexpr int kGateChunk = 256;  // tokens, and threads of a block that takes them
constexpr int kGateWarps = kGateChunk / 32;

/// What a token adds to c.
__device__ inline double log_gate(const ForgettingAttentionParams& p, const Sequence& keys,
                                  int token, int head) {
  if (token == 0) {
    return 0;
  }
  const double x = load_any_element<double>(
      p.log_f.data, p.log_f.dtype, element_offset(p.log_f, keys.batch, keys.start + token, head));
  return x < kLeastLogGate ? kLeastLogGate : x;
}

/// c from log f, forwards.
struct GateSumScan {
  static constexpr bool kReverse = false;
  ForgettingAttentionParams p;
  double* c;
  unsigned* counter = nullptr;  // of a launch that follows, to be zero by then

  __device__ void begin() const {
    if (counter != nullptr) {
      *counter = 0;
    }
  }

  __device__ double load(const Sequence& keys, int token, int head) const {
    return log_gate(p, keys, token, head);
  }
  __device__ void store(const Sequence& keys, int token, int head, double x) const {
    c[(keys.batch * p.heads + head) * p.key_layout.time + keys.start + token] = x;
  }
};

/// dlog f from the sums of dS, backwards.
template <class Real>
struct GateGradientScan {
  static constexpr bool kReverse = true;
  ForgettingAttentionParams p;
  HeadSeries dlog_f;
  const Real* row_sums;
  const Real* column_sums;

  __device__ void begin() const {}
  __device__ double load(const Sequence& keys, int token, int head) const {
    const Sequence queries = find_sequence(p.layout, keys.index);
    const int64_t row = (keys.batch * p.heads + head);
    const int query = token - (keys.length - queries.length);
    const Real added = query < 0 ? Real(0) : row_sums[row * p.layout.time + queries.start + query];
    return static_cast<double>(added) -
           static_cast<double>(column_sums[row * p.key_layout.time + keys.start + token]);
  }
  __device__ void store(const Sequence& keys, int token, int head, double x) const {
    store_any_element(dlog_f.data, dlog_f.dtype,
                      element_offset(dlog_f, keys.batch, keys.start + token, head),
                      token == 0 ? 0.0 : x);
  }
};

/// The sum over the block, for all threads.
__device__ inline double block_sum(double x, double (&shared)[kGateWarps]) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32] = x;
  }
  __syncthreads();
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kGateWarps; ++i) {
    sum += shared[i];
  }
  return sum;
}

/// `start` and the sum of x over the block's threads up to this one.
__device__ inline double block_scan(double x, double start, double (&shared)[kGateWarps]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double below = __shfl_up_sync(0xffffffffu, x, step);
    x += lane >= step ? below : 0.0;
  }
  __syncthreads();
  if (lane == 31) {
    shared[warp] = x;
  }
  __syncthreads();
  for (int i = 0; i < warp; ++i) {
    start += shared[i];
  }
  return start + x;
}

/// The thread's token in the order of the scan, or none.
template <class Scan>
__device__ inline int scanned_token(const TimeTile& chunk) {
  const int at = chunk.first + static_cast<int>(threadIdx.x);
  if (static_cast<int>(threadIdx.x) >= chunk.tokens) {
    return -1;
  }
  return Scan::kReverse ? chunk.sequence.length - 1 - at : at;
}

/// A scan and its chunks, of all heads.
template <class Scan>
struct GateChunks {
  Scan scan;
  double* totals;  // [Hq, tiles.count]
  TimeTiles tiles;

  GateChunks(const Scan& scan, double* totals)
      : scan(scan), totals(totals), tiles(time_tiles(scan.p.key_layout, kGateChunk)) {}

  __host__ __device__ unsigned blocks() const {
    return static_cast<unsigned>(tiles.count * scan.p.heads);
  }

  /// Whether sequences have so few chunks that a block adds up those before its own by itself, in
  /// less time than a launch takes.
  [[nodiscard]] bool adds_up_alone() const {
    constexpr int64_t kFewChunks = 4;
    return scan.p.key_layout.time <= kFewChunks * kGateChunk;
  }

  /// Block `block`'s part of the totals.
  __device__ void add_up(unsigned block) const {
    __shared__ double shared[kGateWarps];
    const auto chunks = static_cast<unsigned>(tiles.count);
    const TimeTile chunk = find_time_tile(tiles, static_cast<int>(block % chunks));
    const int token = scanned_token<Scan>(chunk), head = static_cast<int>(block / chunks);
    const double total =
        block_sum(token < 0 ? 0.0 : scan.load(chunk.sequence, token, head), shared);
    if (threadIdx.x == 0) {
      totals[block] = total;
    }
  }

  /// Block `block`'s part of the scan. `kAlone`: totals are not there, and found here, in the same
  /// order of additions.
  template <bool kAlone = false>
  __device__ void scan_chunk(unsigned block) const {
    __shared__ double shared[kGateWarps];
    const auto chunks = static_cast<unsigned>(tiles.count);
    const TimeTile chunk = find_time_tile(tiles, static_cast<int>(block % chunks));
    if (chunk.tokens == 0) {
      return;
    }
    const int token = scanned_token<Scan>(chunk), head = static_cast<int>(block / chunks);
    double start = 0;
    if constexpr (kAlone) {
      for (int i = 0; i < chunk.index; ++i) {
        const int at = i * kGateChunk + static_cast<int>(threadIdx.x);
        const int before = Scan::kReverse ? chunk.sequence.length - 1 - at : at;
        const double total = block_sum(scan.load(chunk.sequence, before, head), shared);
        start = static_cast<int>(threadIdx.x) == i ? total : start;
      }
    } else {
      const double* const before = totals + block - chunk.index;
      for (int i = static_cast<int>(threadIdx.x); i < chunk.index; i += kGateChunk) {
        start += before[i];
      }
    }
    start = block_sum(start, shared);
    const double x = token < 0 ? 0.0 : scan.load(chunk.sequence, token, head);
    const double sum = block_scan(x, start, shared);
    if (token >= 0) {
      scan.store(chunk.sequence, token, head, sum);
    }
  }
};

template <class Scan>
__global__ void __launch_bounds__(kGateChunk)
    gate_totals_kernel(const __grid_constant__ GateChunks<Scan> chunks) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    chunks.scan.begin();
  }
  chunks.add_up(blockIdx.x);
}

template <class Scan>
__global__ void __launch_bounds__(kGateChunk)
    gate_scan_kernel(const __grid_constant__ GateChunks<Scan> chunks) {
  chunks.scan_chunk(blockIdx.x);
}

/// The whole scan, where a block adds up the chunks before its own.
template <class Scan>
__global__ void __launch_bounds__(kGateChunk)
    whole_gate_scan_kernel(const __grid_constant__ GateChunks<Scan> chunks) {
  let_next_kernel_begin();
  wait_for_kernels_before();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    chunks.scan.begin();
  }
  chunks.template scan_chunk<true>(blockIdx.x);
}

using GateGradientChunks = GateChunks<GateGradientScan<float>>;

/// Doubles for the totals of chunks of one scan.
int64_t gate_totals_count(const ForgettingAttentionParams& params);

/// Doubles that scan_gates needs: c, [B, Hq, Tk], then its scratch.
int64_t gate_sums_count(const ForgettingAttentionParams& params);

/// c_j = sum of log_f over a sequence's tokens 1 .. j, each at least kLeastLogGate. NaN stays.
/// `counter`: set to zero, where there is one.
cudaError_t scan_gates(const ForgettingAttentionParams& params, double* c, cudaStream_t stream,
                       unsigned* counter = nullptr);

/// dlog_f_u = sum over positions t >= u of (row sum of dS of the query at t, if there is one) -
/// (column sum of key t); zero for a sequence's first token. Sums are [B, Hq, Tq] and [B, Hq, Tk].
cudaError_t gate_gradients(const ForgettingAttentionBackwardParams& params, const double* row_sums,
                           const double* column_sums, double* totals, cudaStream_t stream);

}  // namespace tidegate::kernels::attention
