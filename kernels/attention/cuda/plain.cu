// The kernels that take anything: any dtype, D up to 256, rows of any alignment. A warp owns a row
// (a query forward, for delta and for dq; a key for dk and dv) and goes over the rows on the other
// side, 32 at a time, so every sum has one order and nothing is added atomically.

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/rows.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/attention/forgetting_attention_cuda.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/sequences.cuh"

namespace tidegate::kernels::attention {
namespace {

constexpr int kWarps = 8;  // rows of a block
constexpr int kMaxDim = static_cast<int>(kMaxAttentionHeadDim);
constexpr int kChannelsPerLane = kMaxDim / 32;  // numbers of a row that a lane adds up

/// One launch: the params, and the workspace's arrays.
struct PlainAttention {
  ForgettingAttentionBackwardParams grads = {};
  TimeTiles tiles = {};  // of the rows that the warps own
  double* gate_sums = nullptr;
  void* delta_minus_dlse = nullptr;  // [B, Hq, Tq] state type: do . o - dlse
  double* row_sums = nullptr;
  double* column_sums = nullptr;
};

/// One query head of one sequence.
template <class E>
struct PlainHead {
  using Real = typename Register<E>::type;

  const ForgettingAttentionParams& p;
  Sequence queries, keys;
  AttentionRows<const E> q, k, v;
  const double* c;   // at the sequence's first key
  int64_t query_at;  // where numbers a query begin
  int64_t key_at;

  __device__ PlainHead(const PlainAttention& work, int64_t n, int64_t head)
      : p(work.grads.forward),
        queries(find_sequence(p.layout, n)),
        keys(find_sequence(p.key_layout, n)),
        q(p.q, queries.batch, queries.start, head),
        k(p.k, keys.batch, keys.start, head / (p.heads / p.key_heads)),
        v(p.v, keys.batch, keys.start, head / (p.heads / p.key_heads)),
        query_at((queries.batch * p.heads + head) * p.layout.time + queries.start),
        key_at((keys.batch * p.heads + head) * p.key_layout.time + keys.start) {
    c = work.gate_sums + key_at;
  }

  __device__ int64_t position(int64_t query) const { return query + keys.length - queries.length; }
  __device__ int64_t first_key(int64_t position) const {
    return p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
  }

  __device__ Real score(Real dot, int64_t position, int64_t key) const {
    return fused(static_cast<Real>(p.scale), dot, static_cast<Real>(c[position] - c[key]));
  }
};

/// In the order of the channels, so that a pair's product is the same bits in whichever kernel.
template <class Real, class E>
__device__ Real product(const Real* row, const E* other, int dim) {
  Real sum = 0;
  for (int d = 0; d < dim; ++d) {
    sum = fused(row[d], widen(other[d]), sum);
  }
  return sum;
}

template <class Real, class E>
__device__ void copy_row(const E* from, int dim, Real* to) {
  for (int d = threadIdx.x % 32; d < dim; d += 32) {
    to[d] = widen(from[d]);
  }
  __syncwarp();
}

/// sums[n] += the weights of `count` lanes times rows, the lane's channels of each.
template <class Real, class E>
__device__ void add_rows(Real weight, int count, const AttentionRows<const E>& rows, int64_t first,
                         int dim, Real (&sums)[kChannelsPerLane]) {
  const int lane = threadIdx.x % 32;
  for (int j = 0; j < count; ++j) {
    const Real w = __shfl_sync(~0u, weight, j);
    const E* row = rows.row(first + j);
#pragma unroll
    for (int n = 0; n < kChannelsPerLane; ++n) {
      if (lane + 32 * n < dim) {
        sums[n] = fused(w, static_cast<Real>(widen(row[lane + 32 * n])), sums[n]);
      }
    }
  }
}

template <class Real, class E>
__device__ void write_row(const Real (&sums)[kChannelsPerLane], Real factor, int dim, E* to) {
#pragma unroll
  for (int n = 0; n < kChannelsPerLane; ++n) {
    const int d = threadIdx.x % 32 + 32 * n;
    if (d < dim) {
      to[d] = narrow<E>(factor * sums[n]);
    }
  }
}

/// A warp takes a query through all keys that it sees, 32 at a time.
template <class E>
__global__ void __launch_bounds__(32 * kWarps) plain_forward_kernel(const PlainAttention work) {
  using Real = typename Register<E>::type;
  __shared__ Real query[kWarps][kMaxDim];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const TimeTile tile = find_time_tile(work.tiles, static_cast<int>(blockIdx.x));
  if (!tile.exists() || warp >= tile.tokens) {
    return;
  }
  const int64_t head = blockIdx.y, i = tile.first + warp;
  const PlainHead<E> at(work, tile.sequence.index, head);
  const ForgettingAttentionParams& p = at.p;
  const auto dim = static_cast<int>(p.head_dim);
  copy_row(at.q.row(i), dim, query[warp]);

  const Real none = -static_cast<Real>(INFINITY);
  Real sums[kChannelsPerLane] = {}, maximum = none, total = 0;
  const int64_t position = at.position(i);
  for (int64_t first = at.first_key(position); first <= position; first += 32) {
    const int64_t key = first + lane;
    const int count = static_cast<int>(min(int64_t{32}, position - first + 1));
    const Real score =
        lane < count ? at.score(product(query[warp], at.k.row(key), dim), position, key) : none;
    const Real top = larger(maximum, warp_max(score));
    const Real against = top == none ? Real(0) : top;
    const Real weight = lane < count ? exponential(score - against) : Real(0);
    const Real shrink = exponential(maximum - against);
    maximum = top;
    total = fused(total, shrink, warp_sum(weight));
#pragma unroll
    for (int n = 0; n < kChannelsPerLane; ++n) {
      sums[n] *= shrink;
    }
    add_rows(weight, count, at.v, first, dim, sums);
  }
  write_row(sums, total == Real(0) ? Real(0) : Real(1) / total, dim,
            AttentionRows<E>(p.o, at.queries.batch, at.queries.start, head).row(i));
  if (lane == 0) {
    static_cast<Real*>(p.lse)[at.query_at + i] =
        total == Real(0)
            ? none
            : static_cast<Real>(static_cast<double>(maximum) + log(static_cast<double>(total)));
  }
}

template <class E>
__global__ void __launch_bounds__(32 * kWarps) plain_delta_kernel(const PlainAttention work) {
  using Real = typename Register<E>::type;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const TimeTile tile = find_time_tile(work.tiles, static_cast<int>(blockIdx.x));
  if (!tile.exists() || warp >= tile.tokens) {
    return;
  }
  const int64_t head = blockIdx.y, i = tile.first + warp;
  const PlainHead<E> at(work, tile.sequence.index, head);
  const E* o = AttentionRows<const E>(at.p.o, at.queries.batch, at.queries.start, head).row(i);
  const E* d_o =
      AttentionRows<const E>(work.grads.d_o, at.queries.batch, at.queries.start, head).row(i);
  double sum = 0;
  for (int d = lane; d < static_cast<int>(at.p.head_dim); d += 32) {
    sum += static_cast<double>(widen(o[d])) * static_cast<double>(widen(d_o[d]));
  }
  sum = warp_sum(sum);
  if (lane == 0) {
    if (work.grads.dlse != nullptr) {
      sum -= static_cast<double>(static_cast<const Real*>(work.grads.dlse)[at.query_at + i]);
    }
    static_cast<Real*>(work.delta_minus_dlse)[at.query_at + i] = static_cast<Real>(sum);
  }
}

/// P and dS of a pair: the same bits in both kernels of the backward pass.
template <class Real>
struct PlainPair {
  Real weight, d_score;

  __device__ PlainPair(Real score, Real d_weight, Real lse, Real delta_minus_dlse)
      : weight(exponential(score - lse)), d_score(weight * (d_weight - delta_minus_dlse)) {}
  __device__ PlainPair() : weight(0), d_score(0) {}
};

/// dq and the sum of dS over keys, the query's own left out: it would be in both sums, and cancel.
/// A warp takes a query through all keys.
template <class E>
__global__ void __launch_bounds__(32 * kWarps) plain_query_kernel(const PlainAttention work) {
  using Real = typename Register<E>::type;
  __shared__ Real query[kWarps][kMaxDim], d_out[kWarps][kMaxDim];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const TimeTile tile = find_time_tile(work.tiles, static_cast<int>(blockIdx.x));
  if (!tile.exists() || warp >= tile.tokens) {
    return;
  }
  const int64_t head = blockIdx.y, i = tile.first + warp;
  const PlainHead<E> at(work, tile.sequence.index, head);
  const ForgettingAttentionParams& p = at.p;
  const auto dim = static_cast<int>(p.head_dim);
  copy_row(at.q.row(i), dim, query[warp]);
  copy_row(AttentionRows<const E>(work.grads.d_o, at.queries.batch, at.queries.start, head).row(i),
           dim, d_out[warp]);
  const Real lse = static_cast<const Real*>(p.lse)[at.query_at + i];
  const Real delta_minus_dlse = static_cast<const Real*>(work.delta_minus_dlse)[at.query_at + i];

  Real sums[kChannelsPerLane] = {};
  double row_sum = 0;
  const int64_t position = at.position(i);
  for (int64_t first = at.first_key(position); first <= position; first += 32) {
    const int64_t key = first + lane;
    const int count = static_cast<int>(min(int64_t{32}, position - first + 1));
    PlainPair<Real> pair;
    if (lane < count) {
      pair = {at.score(product(query[warp], at.k.row(key), dim), position, key),
              product(d_out[warp], at.v.row(key), dim), lse, delta_minus_dlse};
    }
    row_sum += key == position ? 0.0 : static_cast<double>(pair.d_score);
    add_rows(pair.d_score, count, at.k, first, dim, sums);
  }
  write_row(sums, static_cast<Real>(p.scale), dim,
            AttentionRows<E>(work.grads.dq, at.queries.batch, at.queries.start, head).row(i));
  row_sum = warp_sum(row_sum);
  if (lane == 0) {
    work.row_sums[at.query_at + i] = row_sum;
  }
}

/// dk, dv and the sums of dS over queries, the key's own left out. A warp takes a key through all
/// queries of all heads that share it.
template <class E>
__global__ void __launch_bounds__(32 * kWarps) plain_key_kernel(const PlainAttention work) {
  using Real = typename Register<E>::type;
  __shared__ Real key_row[kWarps][kMaxDim], value_row[kWarps][kMaxDim];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const TimeTile tile = find_time_tile(work.tiles, static_cast<int>(blockIdx.x));
  if (!tile.exists() || warp >= tile.tokens) {
    return;
  }
  const ForgettingAttentionParams& p = work.grads.forward;
  const int64_t group = p.heads / p.key_heads, j = tile.first + warp;
  const auto dim = static_cast<int>(p.head_dim);
  Real dk[kChannelsPerLane] = {}, dv[kChannelsPerLane] = {};
  for (int64_t head = blockIdx.y * group; head < (blockIdx.y + 1) * group; ++head) {
    const PlainHead<E> at(work, tile.sequence.index, head);
    __syncwarp();  // all lanes are done with the head before
    copy_row(at.k.row(j), dim, key_row[warp]);
    copy_row(at.v.row(j), dim, value_row[warp]);
    const AttentionRows<const E> d_out(work.grads.d_o, at.queries.batch, at.queries.start, head);
    const int64_t offset = at.position(0);
    const int64_t end =
        p.window > 0 ? min(int64_t{at.queries.length}, j - offset + p.window) : at.queries.length;
    double column_sum = 0;
    for (int64_t first = max(int64_t{0}, j - offset); first < end; first += 32) {
      const int64_t i = first + lane;
      const int count = static_cast<int>(min(int64_t{32}, end - first));
      PlainPair<Real> pair;
      if (lane < count) {
        pair = {at.score(product(key_row[warp], at.q.row(i), dim), at.position(i), j),
                product(value_row[warp], d_out.row(i), dim),
                static_cast<const Real*>(p.lse)[at.query_at + i],
                static_cast<const Real*>(work.delta_minus_dlse)[at.query_at + i]};
      }
      column_sum += at.position(i) == j ? 0.0 : static_cast<double>(pair.d_score);
      add_rows(pair.d_score, count, at.q, first, dim, dk);
      add_rows(pair.weight, count, d_out, first, dim, dv);
    }
    column_sum = warp_sum(column_sum);
    if (lane == 0) {
      work.column_sums[at.key_at + j] = column_sum;
    }
  }
  const Sequence& keys = tile.sequence;
  write_row(dk, static_cast<Real>(p.scale), dim,
            AttentionRows<E>(work.grads.dk, keys.batch, keys.start, blockIdx.y).row(j));
  write_row(dv, Real(1), dim,
            AttentionRows<E>(work.grads.dv, keys.batch, keys.start, blockIdx.y).row(j));
}

// ---- Launches ----

/// A warp for every row of the work's tiles and head.
cudaError_t launch(void (*kernel)(PlainAttention), const PlainAttention& work, int64_t heads,
                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(work.tiles.count), static_cast<unsigned>(heads));
  return launch_unless_empty(kernel, grid, 32 * kWarps, 0, stream, work);
}

}  // namespace

void plain_attention_forward_plan(const ForgettingAttentionParams& params,
                                  ForgettingAttentionPlan* plan) {
  *plan = {.path = AttentionPath::kPlain};
  plan->workspace_bytes = PlainWorkspace(params, false).bytes;
}

void plain_attention_backward_plan(const ForgettingAttentionBackwardParams& params,
                                   ForgettingAttentionPlan* plan) {
  *plan = {.path = AttentionPath::kPlain};
  plan->workspace_bytes = PlainWorkspace(params.forward, true).bytes;
}

cudaError_t plain_attention_forward(const ForgettingAttentionParams& params, cudaStream_t stream) {
  const PlainWorkspace workspace(params, false);
  PlainAttention work;
  work.grads.forward = params;
  work.tiles = time_tiles(params.layout, kWarps);
  work.gate_sums = workspace.gate_sums;
  TIDEGATE_RETURN_IF_CUDA_ERROR(scan_gates(params, workspace.gate_sums, stream));
  return dispatch_real(params.q.dtype, [&]<class E>() {
    return launch(&plain_forward_kernel<E>, work, params.heads, stream);
  });
}

cudaError_t plain_attention_backward(const ForgettingAttentionBackwardParams& params,
                                     cudaStream_t stream) {
  const ForgettingAttentionParams& p = params.forward;
  const PlainWorkspace workspace(p, true);
  PlainAttention work;
  work.grads = params;
  work.gate_sums = workspace.gate_sums;
  work.delta_minus_dlse = workspace.delta_minus_dlse;
  work.row_sums = workspace.row_sums;
  work.column_sums = workspace.column_sums;
  TIDEGATE_RETURN_IF_CUDA_ERROR(scan_gates(p, workspace.gate_sums, stream));
  TIDEGATE_RETURN_IF_CUDA_ERROR(dispatch_real(p.q.dtype, [&]<class E>() {
    work.tiles = time_tiles(p.layout, kWarps);
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch(&plain_delta_kernel<E>, work, p.heads, stream));
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch(&plain_query_kernel<E>, work, p.heads, stream));
    work.tiles = time_tiles(p.key_layout, kWarps);
    return launch(&plain_key_kernel<E>, work, p.key_heads, stream);
  }));
  return gate_gradients(params, work.row_sums, work.column_sums, workspace.totals, stream);
}

}  // namespace tidegate::kernels::attention
