#include "kernels/attention/cuda/step.h"

#include <algorithm>

#include "kernels/attention/cuda/plain_rows.cuh"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kOwn = 8;     // numbers of a row that a lane holds
constexpr int kHeads = 4;   // query heads that read a key together
constexpr int kPart = 128;  // keys that are in shared memory as scores at a time
constexpr int kMaxDim = static_cast<int>(kMaxAttentionHeadDim);

/// A partial result: o times its sum, then maximum, sum, and the sum of the part's gates.
__host__ __device__ constexpr int64_t partial_numbers(int64_t head_dim) { return head_dim + 3; }

struct Step {
  ForgettingAttentionStepParams params = {};
  int64_t part = 0;     // keys of a split
  int lanes_a_row = 0;  // that share a row, a power of two
};

/// How a lane's kOwn numbers of a row lie: packs of kVec, kOwn / kVec of them.
template <class E, int kVec>
struct RowPacks {
  using Real = typename Register<E>::type;
  static constexpr int kPacks = kOwn / kVec;
  Pack<E, kVec> packs[kPacks];

  __device__ void load(const E* row, int lane, int lanes, int dim) {
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
      const int d = (lane + n * lanes) * kVec;
      packs[n] = {};
      if (d < dim) {
        packs[n] = load_streaming<E, kVec>(row + d);
      }
    }
  }
  __device__ Real get(int i) const { return packs[i / kVec].get(i % kVec); }
};

template <class E, int kVec>
__device__ int channel_of(int own, int lane, int lanes) {
  return (lane + own / kVec * lanes) * kVec + own % kVec;
}

/// A block takes one split of one head of keys, for up to kHeads of its query heads at a time.
template <class E, int kVec>
__global__ void __launch_bounds__(kThreads) step_kernel(const Step step) {
  using Real = typename Register<E>::type;
  __shared__ Real scores[kHeads][kPart];
  __shared__ Real rows[kWarps][kMaxDim];
  __shared__ Real shrink[kHeads];
  const ForgettingAttentionStepParams& p = step.params;
  const int warp = threadIdx.x / 32, lanes = step.lanes_a_row;
  const int lane = threadIdx.x % lanes, row_of_warp = threadIdx.x % 32 / lanes;
  const int rows_a_warp = 32 / lanes, rows_a_block = kWarps * rows_a_warp;
  const auto dim = static_cast<int>(p.head_dim);
  const int64_t batch = blockIdx.z, key_head = blockIdx.y, split = blockIdx.x;
  const int64_t length = max(int64_t{0}, min(int64_t{p.lengths[batch]}, p.capacity));
  const int64_t oldest = p.window > 0 ? max(int64_t{0}, length - p.window) : 0;
  const int64_t begin = max(oldest, split * step.part);
  const int64_t end = min(length, (split + 1) * step.part);
  const int64_t group = p.heads / p.key_heads;
  const AttentionRows<const E> keys(p.k, batch, 0, key_head), values(p.v, batch, 0, key_head);
  const Real none = -static_cast<Real>(INFINITY);

  for (int64_t first_head = key_head * group; first_head < (key_head + 1) * group;
       first_head += kHeads) {
    const int heads = static_cast<int>(min(int64_t{kHeads}, (key_head + 1) * group - first_head));
    Real query[kHeads][kOwn], sums[kHeads][kOwn] = {};
    // What a warp knows of its own head, the same in all of its lanes: head `warp`, where there is.
    Real maximum = none, total = 0;
    double gates = 0;  // from the newest key of the split back
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const E* q = AttentionRows<const E>(p.q, batch, 0, first_head + min(h, heads - 1)).first;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int d = channel_of<E, kVec>(i, lane, lanes);
        query[h][i] =
            d < dim ? static_cast<Real>(p.scale) * static_cast<Real>(widen(q[d])) : Real(0);
      }
    }
    for (int64_t last = end; last > begin; last -= kPart) {
      const int64_t first = max(begin, last - kPart);
      const auto count = static_cast<int>(last - first);
      for (int j = warp * rows_a_warp + row_of_warp; j - row_of_warp < count; j += rows_a_block) {
        RowPacks<E, kVec> key;
        key.load(keys.row(first + min(j, count - 1)), lane, lanes, dim);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          Real dot = 0;
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            dot = fused(query[h][i], key.get(i), dot);
          }
          for (int s = lanes / 2; s > 0; s /= 2) {
            dot += __shfl_xor_sync(~0u, dot, s);
          }
          if (lane == 0 && j < count) {
            scores[h][j] = dot;
          }
        }
      }
      __syncthreads();
      if (warp < heads) {
        const int own = threadIdx.x % 32;
        const AttentionRows<const Real> log_f(p.log_f, batch, first, first_head + warp);
        Real top = maximum;
        // From the newest group of 32 keys back, each key with the gates after it.
        for (int newest = count; newest > 0; newest -= 32) {
          const int j = newest - 1 - own;
          double gate = 0;
          if (j >= 0) {
            gate = static_cast<double>(*log_f.row(j));
            gate = gate < kLeastLogGate ? kLeastLogGate : gate;
          }
          double through = gate;  // of this key and those after it
#pragma unroll
          for (int s = 1; s < 32; s *= 2) {
            const double newer = __shfl_up_sync(~0u, through, s);
            through += own >= s ? newer : 0.0;
          }
          if (j >= 0) {
            const Real score = static_cast<Real>(static_cast<double>(scores[warp][j]) +
                                                 (gates + (through - gate)));
            scores[warp][j] = score;
            top = larger(top, score);
          }
          gates += __shfl_sync(~0u, through, 31);
        }
        top = warp_max(top);
        const Real against = top == none ? Real(0) : top;
        Real sum = 0;
        for (int j = own; j < count; j += 32) {
          const Real weight = exponential(scores[warp][j] - against);
          scores[warp][j] = weight;
          sum += weight;
        }
        const Real factor = exponential(maximum - against);
        total = fused(total, factor, warp_sum(sum));
        maximum = top;
        if (own == 0) {
          shrink[warp] = factor;
        }
      }
      __syncthreads();
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          sums[h][i] *= h < heads ? shrink[h] : Real(0);
        }
      }
      for (int j = warp * rows_a_warp + row_of_warp; j < count; j += rows_a_block) {
        RowPacks<E, kVec> value;
        value.load(values.row(first + j), lane, lanes, dim);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (h < heads) {
            const Real weight = scores[h][j];
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
              sums[h][i] = fused(weight, value.get(i), sums[h][i]);
            }
          }
        }
      }
      __syncthreads();
    }

    const int64_t stride = partial_numbers(p.head_dim);
    for (int h = 0; h < heads; ++h) {
      Real* const partial = static_cast<Real*>(p.workspace) +
                            ((batch * p.heads + first_head + h) * gridDim.x + split) * stride;
#pragma unroll
      for (int which = 0; which < kHeads; ++which) {  // registers know no index
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          Real sum = sums[which][i];
          for (int s = lanes; s < 32; s *= 2) {
            sum += __shfl_xor_sync(~0u, sum, s);
          }
          const int d = channel_of<E, kVec>(i, lane, lanes);
          if (which == h && row_of_warp == 0 && d < dim) {
            rows[warp][d] = sum;
          }
        }
      }
      if (warp == h && threadIdx.x % 32 == 0) {
        partial[dim] = maximum;
        partial[dim + 1] = total;
        partial[dim + 2] = static_cast<Real>(gates);
      }
      __syncthreads();
      for (int d = static_cast<int>(threadIdx.x); d < dim; d += kThreads) {
        Real sum = 0;
        for (int w = 0; w < kWarps; ++w) {
          sum += rows[w][d];
        }
        partial[d] = sum;
      }
      __syncthreads();
    }
  }
}

/// o of one query head: from the newest split to the oldest, between which and the query the gates
/// of all newer splits lie.
template <class E>
__global__ void __launch_bounds__(kMaxDim) combine_kernel(const Step step) {
  using Real = typename Register<E>::type;
  const ForgettingAttentionStepParams& p = step.params;
  const int64_t head = blockIdx.x, batch = blockIdx.y, splits = p.plan.splits;
  const int64_t stride = partial_numbers(p.head_dim), dim = p.head_dim;
  const int64_t length = max(int64_t{0}, min(int64_t{p.lengths[batch]}, p.capacity));
  const int64_t oldest = p.window > 0 ? max(int64_t{0}, length - p.window) : 0;
  const int64_t first = oldest / step.part, last = (length + step.part - 1) / step.part;
  const Real* const partials =
      static_cast<const Real*>(p.workspace) + (batch * p.heads + head) * splits * stride;
  double maximum = -INFINITY, total = 0, sum = 0, gates = 0;
  const auto d = static_cast<int64_t>(threadIdx.x);
  for (int64_t split = last - 1; split >= first; --split) {
    const Real* partial = partials + split * stride;
    const double here = static_cast<double>(partial[dim]) + gates;
    const double top = fmax(maximum, here);
    const double against = top == -INFINITY ? 0.0 : top;
    const double old = exp(maximum - against), factor = exp(here - against);
    total = total * old + factor * static_cast<double>(partial[dim + 1]);
    if (d < dim) {
      sum = sum * old + factor * static_cast<double>(partial[d]);
    }
    maximum = top;
    gates += static_cast<double>(partial[dim + 2]);
  }
  if (d < dim) {
    AttentionRows<E>(p.o, batch, 0, head).first[d] =
        narrow<E>(static_cast<Real>(total == 0 ? 0.0 : sum / total));
  }
}

/// Splits of at least kPart keys, as many as fill the device a few times.
cudaError_t divide_cache(const ForgettingAttentionStepParams& p, int64_t* part, int64_t* splits) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int64_t blocks = std::max<int64_t>(1, p.layout.batch * p.key_heads);
  const int64_t wanted = std::max<int64_t>(1, (8 * limits.multiprocessors + blocks - 1) / blocks);
  const int64_t keys = (std::max<int64_t>(p.capacity, 1) + wanted - 1) / wanted;
  *part = (keys + kPart - 1) / kPart * kPart;
  *splits = (std::max<int64_t>(p.capacity, 1) + *part - 1) / *part;
  return cudaSuccess;
}

bool aligned(const HeadSeries& t) {
  const int64_t size = element_size(t.dtype);
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride_b * size % 16 == 0 &&
         t.stride_t * size % 16 == 0 && t.stride_h * size % 16 == 0;
}

template <class E, int kVec>
void launch_step(Step step, int64_t splits, cudaStream_t stream) {
  const ForgettingAttentionStepParams& p = step.params;
  // As few lanes as hold a row: the others take other rows.
  step.lanes_a_row = 1;
  while (step.lanes_a_row < 32 && step.lanes_a_row * kOwn < p.head_dim) {
    step.lanes_a_row *= 2;
  }
  const dim3 grid(static_cast<unsigned>(splits), static_cast<unsigned>(p.key_heads),
                  static_cast<unsigned>(p.layout.batch));
  step_kernel<E, kVec><<<grid, kThreads, 0, stream>>>(step);
}

}  // namespace

cudaError_t attention_step_plan(const ForgettingAttentionStepParams& params,
                                ForgettingAttentionPlan* plan) {
  int64_t part = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(divide_cache(params, &part, &plan->splits));
  plan->workspace_bytes = params.layout.batch * params.heads * plan->splits *
                          partial_numbers(params.head_dim) *
                          element_size(state_dtype(params.q.dtype));
  return cudaSuccess;
}

cudaError_t attention_step(const ForgettingAttentionStepParams& params, cudaStream_t stream) {
  Step step;
  step.params = params;
  int64_t splits = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(divide_cache(params, &step.part, &splits));
  with_element(params.q.dtype, [&]<class E>() {
    constexpr int kVec = 16 / sizeof(E);
    const bool whole = params.head_dim % kVec == 0 && aligned(params.k) && aligned(params.v);
    if (whole) {
      launch_step<E, kVec>(step, splits, stream);
    } else {
      launch_step<E, 1>(step, splits, stream);
    }
    const dim3 heads(static_cast<unsigned>(params.heads),
                     static_cast<unsigned>(params.layout.batch));
    combine_kernel<E>
        <<<heads, static_cast<unsigned>((params.head_dim + 31) / 32 * 32), 0, stream>>>(step);
  });
  return cudaGetLastError();
}

}  // namespace tidegate::kernels
