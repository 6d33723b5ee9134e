// Two scans over time; see gate_sums.h. Each is two launches: totals of chunks of tokens, then
// every chunk by itself, from the totals before it.

#include "kernels/attention/cuda/gate_sums.h"

#include "kernels/common/cuda/cuts.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/numeric.cuh"

namespace tidegate::kernels {
namespace {

constexpr int kChunk = 256;  // tokens, and threads
constexpr int kWarps = kChunk / 32;

int64_t count_of(const ForgettingAttentionParams& p) {
  return p.key_layout.batch * p.heads * p.key_layout.time;
}

/// One element of a tensor of gates.
__device__ int64_t gate_offset(const HeadSeries& t, const Sequence& s, int token, int head) {
  return s.batch * t.stride_b + (s.start + token) * t.stride_t + head * t.stride_h;
}
__device__ double load_gate(const HeadSeries& t, int64_t at) {
  switch (t.dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(t.data)[at];
    case DType::kFloat64:
      return static_cast<const double*>(t.data)[at];
    case DType::kBFloat16:
      return widen(static_cast<const __nv_bfloat16*>(t.data)[at]);
    default:
      return widen(static_cast<const __half*>(t.data)[at]);
  }
}
__device__ void store_gate(const HeadSeries& t, int64_t at, double x) {
  switch (t.dtype) {
    case DType::kFloat32:
      static_cast<float*>(t.data)[at] = static_cast<float>(x);
      return;
    case DType::kFloat64:
      static_cast<double*>(t.data)[at] = x;
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(t.data)[at] = narrow<__nv_bfloat16>(static_cast<float>(x));
      return;
    default:
      static_cast<__half*>(t.data)[at] = narrow<__half>(static_cast<float>(x));
  }
}

/// c from log f, forwards.
struct Sums {
  static constexpr bool kReverse = false;
  ForgettingAttentionParams p;
  double* c;

  __device__ double load(const Sequence& keys, int token, int head) const {
    if (token == 0) {
      return 0;
    }
    const double x = load_gate(p.log_f, gate_offset(p.log_f, keys, token, head));
    return x < kLeastLogGate ? kLeastLogGate : x;
  }
  __device__ void store(const Sequence& keys, int token, int head, double x) const {
    c[(keys.batch * p.heads + head) * p.key_layout.time + keys.start + token] = x;
  }
};

/// dlog f from the sums of dS, backwards.
template <class Real>
struct Gradients {
  static constexpr bool kReverse = true;
  ForgettingAttentionParams p;
  HeadSeries dlog_f;
  const Real* row_sums;
  const Real* column_sums;

  __device__ double load(const Sequence& keys, int token, int head) const {
    const Sequence queries = find_sequence(p.layout, keys.index);
    const int64_t row = (keys.batch * p.heads + head);
    const int query = token - (keys.length - queries.length);
    const Real added = query < 0 ? Real(0) : row_sums[row * p.layout.time + queries.start + query];
    return static_cast<double>(added) -
           static_cast<double>(column_sums[row * p.key_layout.time + keys.start + token]);
  }
  __device__ void store(const Sequence& keys, int token, int head, double x) const {
    store_gate(dlog_f, gate_offset(dlog_f, keys, token, head), token == 0 ? 0.0 : x);
  }
};

__device__ double warp_sum(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
  }
  return x;
}

/// The sum over the block, for all threads.
__device__ double block_sum(double x, double (&shared)[kWarps]) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32] = x;
  }
  __syncthreads();
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    sum += shared[i];
  }
  return sum;
}

/// The thread's token in the order of the scan, or none.
template <class Scan>
__device__ int scanned_token(const Cut& cut) {
  const int at = cut.first + static_cast<int>(threadIdx.x);
  if (static_cast<int>(threadIdx.x) >= cut.tokens) {
    return -1;
  }
  return Scan::kReverse ? cut.sequence.length - 1 - at : at;
}

template <class Scan>
__global__ void __launch_bounds__(kChunk)
    gate_totals_kernel(const __grid_constant__ Scan scan, Cuts cuts, double* totals) {
  __shared__ double shared[kWarps];
  const Cut cut = find_cut(cuts, static_cast<int>(blockIdx.x));
  const int token = scanned_token<Scan>(cut), head = static_cast<int>(blockIdx.y);
  const double total = block_sum(token < 0 ? 0.0 : scan.load(cut.sequence, token, head), shared);
  if (threadIdx.x == 0) {
    totals[head * cuts.slots + blockIdx.x] = total;
  }
}

template <class Scan>
__global__ void __launch_bounds__(kChunk)
    gate_scan_kernel(const __grid_constant__ Scan scan, Cuts cuts, const double* totals) {
  __shared__ double shared[kWarps];
  const Cut cut = find_cut(cuts, static_cast<int>(blockIdx.x));
  if (cut.tokens == 0) {
    return;
  }
  const int token = scanned_token<Scan>(cut), head = static_cast<int>(blockIdx.y);
  const double* const before = totals + head * cuts.slots + blockIdx.x - cut.index;
  double start = 0;
  for (int i = static_cast<int>(threadIdx.x); i < cut.index; i += kChunk) {
    start += before[i];
  }
  start = block_sum(start, shared);
  double x = token < 0 ? 0.0 : scan.load(cut.sequence, token, head);
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
  if (token >= 0) {
    scan.store(cut.sequence, token, head, start + x);
  }
}

template <class Scan>
cudaError_t run(const Scan& scan, double* totals, cudaStream_t stream) {
  const Cuts cuts = cut_time(scan.p.key_layout, kChunk);
  const dim3 grid(static_cast<unsigned>(cuts.slots), static_cast<unsigned>(scan.p.heads));
  if (grid.x == 0 || grid.y == 0) {
    return cudaSuccess;
  }
  gate_totals_kernel<<<grid, kChunk, 0, stream>>>(scan, cuts, totals);
  gate_scan_kernel<<<grid, kChunk, 0, stream>>>(scan, cuts, totals);
  return cudaGetLastError();
}

}  // namespace

int64_t gate_totals_count(const ForgettingAttentionParams& p) {
  return cut_time(p.key_layout, kChunk).slots * p.heads;
}

int64_t gate_sums_count(const ForgettingAttentionParams& p) {
  return count_of(p) + gate_totals_count(p);
}

cudaError_t gate_sums(const ForgettingAttentionParams& p, double* c, cudaStream_t stream) {
  return run(Sums{p, c}, c + count_of(p), stream);
}

cudaError_t gate_gradients(const ForgettingAttentionBackwardParams& p, const float* row_sums,
                           const float* column_sums, double* totals, cudaStream_t stream) {
  return run(Gradients<float>{p.forward, p.dlog_f, row_sums, column_sums}, totals, stream);
}
cudaError_t gate_gradients(const ForgettingAttentionBackwardParams& p, const double* row_sums,
                           const double* column_sums, double* totals, cudaStream_t stream) {
  return run(Gradients<double>{p.forward, p.dlog_f, row_sums, column_sums}, totals, stream);
}

}  // namespace tidegate::kernels
