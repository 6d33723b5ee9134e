// Cross-entropy of rows of logits, and the logits' gradient in their place. One block has one row.
// Memory bounds it: a row is read once and written once. Between the two, while the block agrees on
// the row's sum of exponentials, the row waits in shared memory; two blocks share a multiprocessor,
// so that one's reads go on during the other's exponentials.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/loss/cross_entropy_cuda.h"

namespace tidegate::kernels::loss {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kPacksAtOnce = 4;       // reads of a thread in flight: 64 KB a multiprocessor
constexpr int kReservedBytes = 1024;  // of shared memory, that the system takes of each block
constexpr int kSumThreads = 1024;

// ---- Numbers ----

__device__ inline float minus_infinity(float) { return __int_as_float(0xff800000); }
__device__ inline double minus_infinity(double) {
  return __longlong_as_double(0xfff0000000000000ll);
}
__device__ inline float not_a_number(float) { return __int_as_float(0x7fc00000); }
__device__ inline double not_a_number(double) { return __longlong_as_double(0x7ff8000000000000ll); }

/// exp(x) for x <= 0. The result of 16-bit logits is rounded to 2^-9 of itself: the special
/// function unit's 2^-22 are enough for them, and for the sum of their exponentials.
template <class E>
__device__ inline float exponential(float x) {
  if constexpr (sizeof(E) == 2) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2E));
    return y;
  } else {
    return expf(x);
  }
}
template <class E>
__device__ inline double exponential(double x) {
  return exp(x);
}

__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

/// What to subtract from logits: their maximum, or 0 where they all are -inf, whose difference
/// would be NaN.
template <class Real>
__device__ inline Real reference_of(Real max) {
  return max == minus_infinity(Real()) ? Real(0) : max;
}

// ---- A row's sums ----

/// sum = sum_j exp(z_j - max), of the logits seen so far. fmax passes a NaN by; the exponentials
/// carry it into the sum.
template <class E>
struct RowSums {
  using Real = typename Register<E>::type;
  Real max = minus_infinity(Real()), sum = 0, total = 0;

  template <int kVec>
  __device__ void add(const Real (&z)[kVec]) {
    Real most = z[0];
#pragma unroll
    for (int v = 1; v < kVec; ++v) {
      most = larger(most, z[v]);
    }
    if (most > max) {  // seldom, after the first few
      sum *= exponential<E>(max - most);
      max = most;
    }
    const Real reference = reference_of(max);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      sum += exponential<E>(z[v] - reference);
      total += z[v];
    }
  }

  /// Relative to a maximum that is no smaller. (Where no logit above -inf was seen, the sum is zero
  /// or NaN and stays so: 0 exp(0 - most) would be NaN where all logits are far below zero.)
  __device__ void move_to(Real most) {
    if (max > minus_infinity(Real())) {
      sum *= exponential<E>(max - most);
    }
    max = most;
  }
};

/// The sums over a whole block, in every thread; the order depends on the number of threads alone.
template <class E>
__device__ void sum_over_block(RowSums<E>& row) {
  using Real = typename RowSums<E>::Real;
  __shared__ Real shared[3][kMaxThreads / kWarpSize];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  row.move_to(warp_max(row.max));
  row.sum = warp_sum(row.sum);
  row.total = warp_sum(row.total);
  if (lane == 0) {
    shared[0][warp] = row.max;
    shared[1][warp] = row.sum;
    shared[2][warp] = row.total;
  }
  __syncthreads();
  RowSums<E> of_warp;
  if (lane < warps) {
    of_warp.max = shared[0][lane];
    of_warp.sum = shared[1][lane];
    of_warp.total = shared[2][lane];
  }
  of_warp.move_to(warp_max(of_warp.max));
  row.max = of_warp.max;
  row.sum = warp_sum(of_warp.sum);
  row.total = warp_sum(of_warp.total);
}

// ---- A row in packs of 16 bytes ----

template <class E>
struct Row {
  static constexpr int kVec = 16 / static_cast<int>(sizeof(E));
  using Real = typename Register<E>::type;
  using Data = Pack<E, kVec>;

  E* logits;
  const Real* bias;  // zeros past the row's end; or null
  int vocab, columns, whole_packs;
  Data* cache;
  int cached;  // packs that the cache holds: a thread's own ones, so nobody waits for another

  __device__ Data read(int pack) const {
    return {*reinterpret_cast<const typename Data::Bits*>(logits + int64_t{pack} * kVec)};
  }
  __device__ Data read_again(int pack) const { return pack < cached ? cache[pack] : read(pack); }

  __device__ void widened(const Data& data, int pack, Real (&z)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      z[v] = data.get(v);
    }
    if (bias != nullptr) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        z[v] += bias[int64_t{pack} * kVec + v];
      }
    }
  }

  /// Two 16-bit conversions are one instruction.
  __device__ static Data narrowed(const Real (&x)[kVec]) {
    if constexpr (sizeof(E) == 2) {
      Pack<E, 2> pairs[kVec / 2];
#pragma unroll
      for (int i = 0; i < kVec / 2; ++i) {
        const Real pair[2] = {x[2 * i], x[2 * i + 1]};
        pairs[i] = ::tidegate::kernels::pack<E, 2>(pair);
      }
      return {{pairs[0].bits, pairs[1].bits, pairs[2].bits, pairs[3].bits}};
    } else {
      return ::tidegate::kernels::pack<E, kVec>(x);
    }
  }

  __device__ void add_to(RowSums<E>& sums, const Data& data, int pack) const {
    if (pack < cached) {
      cache[pack] = data;
    }
    Real z[kVec];
    widened(data, pack, z);
    sums.add(z);
  }

  /// The pack that the row ends in.
  __device__ void add_end(RowSums<E>& sums) const {
    const int pack = whole_packs;
    const Data data = read(pack);
    if (pack < cached) {
      cache[pack] = data;
    }
    Real z[kVec];
    widened(data, pack, z);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      if (pack * kVec + v < vocab) {
        const Real one[1] = {z[v]};
        sums.add(one);
      }
    }
  }

  __device__ RowSums<E> sums() const {
    RowSums<E> sums;
    const int step = blockDim.x;
    int pack = threadIdx.x;
    for (; pack + (kPacksAtOnce - 1) * step < whole_packs; pack += kPacksAtOnce * step) {
      Data data[kPacksAtOnce];
#pragma unroll
      for (int i = 0; i < kPacksAtOnce; ++i) {
        data[i] = read(pack + i * step);
      }
#pragma unroll
      for (int i = 0; i < kPacksAtOnce; ++i) {
        add_to(sums, data[i], pack + i * step);
      }
    }
    for (; pack < whole_packs; pack += step) {
      add_to(sums, read(pack), pack);
    }
    if (pack == whole_packs && whole_packs * kVec < vocab) {
      add_end(sums);
    }
    return sums;
  }

  __device__ void write(int pack, const Real (&dz)[kVec]) const {
    E* const to = logits + int64_t{pack} * kVec;
    *reinterpret_cast<typename Data::Bits*>(to) = narrowed(dz).bits;
  }

  /// dz_j = exp(z_j - max) * factor - shift, and zeros from the row's end to the last column.
  __device__ void write_gradient(Real max, Real factor, Real shift) const {
    const int step = blockDim.x;
    int pack = threadIdx.x;
#pragma unroll kPacksAtOnce
    for (; pack < whole_packs; pack += step) {
      Real z[kVec];
      widened(read_again(pack), pack, z);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        z[v] = fused(exponential<E>(z[v] - max), factor, -shift);
      }
      write(pack, z);
    }
    for (; pack < end_pack(); pack += step) {
      Real z[kVec];
      widened(read_again(pack), pack, z);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const bool inside = pack * kVec + v < vocab;
        z[v] = inside ? fused(exponential<E>(z[v] - max), factor, -shift) : Real(0);
      }
      write(pack, z);
    }
  }

  __device__ void fill(Real value) const {
    for (int pack = threadIdx.x; pack < end_pack(); pack += blockDim.x) {
      Real z[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        z[v] = pack * kVec + v < vocab ? value : Real(0);
      }
      write(pack, z);
    }
  }

  __device__ int end_pack() const { return (columns + kVec - 1) / kVec; }
};

// ---- The kernels ----

template <class E>
__device__ Row<E> row_of(const CrossEntropyParams& p, int cached, unsigned char* cache) {
  using Real = typename Register<E>::type;
  Row<E> row;
  row.logits = static_cast<E*>(p.logits) + int64_t{blockIdx.x} * p.stride;
  row.bias = static_cast<const Real*>(p.bias);
  row.vocab = static_cast<int>(p.vocab);
  row.columns = static_cast<int>(p.columns);
  row.whole_packs = row.vocab / Row<E>::kVec;
  row.cache = reinterpret_cast<typename Row<E>::Data*>(cache);
  row.cached = cached;
  return row;
}

/// The row has no loss or no valid label: its gradient is `value` everywhere, and its loss is.
template <class E, class Real>
__device__ void finish_without_label(const CrossEntropyParams& p, const Row<E>& row, Real value) {
  if (p.gradient) {
    row.fill(value);
  }
  if (p.loss != nullptr && threadIdx.x == 0) {
    static_cast<Real*>(p.loss)[blockIdx.x] = value;
  }
}

template <class E>
__global__ void __launch_bounds__(kMaxThreads, kBlocksPerSm)
    cross_entropy_kernel(const CrossEntropyParams p, int cached) {
  using Real = typename Register<E>::type;
  extern __shared__ __align__(16) unsigned char cache[];
  const Row<E> row = row_of<E>(p, cached, cache);
  const int64_t label = p.labels[blockIdx.x];
  if (label == p.ignored) {
    return finish_without_label(p, row, Real(0));
  }
  if (label < 0 || label >= p.vocab) {
    return finish_without_label(p, row, not_a_number(Real()));
  }
  RowSums<E> sums = row.sums();
  Real of_label = widen(row.logits[label]);
  if (row.bias != nullptr) {
    of_label += row.bias[label];
  }
  sum_over_block(sums);  // after it nobody reads what others overwrite

  const Real log_sum = logarithm(sums.sum), lse = sums.max + log_sum;
  const Real smooth = static_cast<Real>(p.label_smoothing);
  const Real z_loss = static_cast<Real>(p.z_loss);
  if (p.loss != nullptr && threadIdx.x == 0) {
    // Next to the maximum: lse - z_y would lose the digits of a small loss.
    Real loss = log_sum + (1 - smooth) * (sums.max - of_label) + z_loss * lse * lse;
    if (smooth != 0) {
      loss += smooth * (sums.max - sums.total / static_cast<Real>(p.vocab));
    }
    static_cast<Real*>(p.loss)[blockIdx.x] = loss;
  }
  if (p.gradient) {
    const Real* const given = static_cast<const Real*>(p.row_gradient);
    const Real g = given == nullptr ? Real(1) : given[blockIdx.x];
    const Real factor = g * (1 + 2 * z_loss * lse) / sums.sum;
    const Real shift = g * smooth / static_cast<Real>(p.vocab);
    row.write_gradient(sums.max, factor, shift);
    __syncthreads();  // then the label's own term, once
    if (threadIdx.x == 0) {
      const Real p_label = exponential<E>(of_label - sums.max) * factor;
      row.logits[label] = narrow<E>(p_label - shift - g * (1 - smooth));
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(kSumThreads) loss_sum_kernel(const LossSumParams p) {
  __shared__ double sums[kSumThreads / kWarpSize];
  __shared__ int64_t counts[kSumThreads / kWarpSize];
  double sum = 0;
  int64_t count = 0;
  for (int64_t row = threadIdx.x; row < p.rows; row += kSumThreads) {
    sum += static_cast<const Real*>(p.losses)[row];
    count += p.labels[row] != p.ignored;
  }
  sum = warp_sum(sum);
  count = warp_sum(count);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (lane == 0) {
    sums[warp] = sum;
    counts[warp] = count;
  }
  __syncthreads();
  if (warp == 0) {
    sum = warp_sum(sums[lane]);
    count = warp_sum(counts[lane]);
    if (lane == 0) {
      const double scale = p.mean ? 1.0 / static_cast<double>(count > 1 ? count : 1) : 1.0;
      *static_cast<Real*>(p.loss) = static_cast<Real>(sum * scale);
      *static_cast<Real*>(p.scale) = static_cast<Real>(scale);
    }
  }
}

// ---- Launches ----

/// A few packs a thread, so that a small vocabulary has many blocks on a multiprocessor.
template <class E>
int threads_for(int64_t vocab) {
  const int64_t packs = ceil_div(vocab, Row<E>::kVec);
  const int64_t warps = ceil_div(packs, kWarpSize * kPacksAtOnce);
  constexpr int64_t kMaxWarps = kMaxThreads / kWarpSize;
  return static_cast<int>(warps < kMaxWarps ? warps : kMaxWarps) * kWarpSize;
}

/// Packs of a row that wait in a block's shared memory, where blocks share what a processor has.
template <class E>
cudaError_t cached_packs(const CrossEntropyParams& p, int* packs) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  constexpr int kStaticBytes = 1024;  // more than sum_over_block declares
  const int64_t room = (limits.shared_bytes - kReservedBytes) / kBlocksPerSm - kStaticBytes;
  const int64_t row = ceil_div(p.vocab, Row<E>::kVec);
  *packs = p.gradient ? static_cast<int>(row < room / 16 ? row : room / 16) : 0;
  return cudaSuccess;
}

template <class E>
cudaError_t launch(const CrossEntropyParams& p, cudaStream_t stream) {
  int cached = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cached_packs<E>(p, &cached));
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<&cross_entropy_kernel<E>>(16 * cached));
  return launch_unless_empty(&cross_entropy_kernel<E>, p.rows, dim3(threads_for<E>(p.vocab)),
                             16 * cached, stream, p, cached);
}

}  // namespace

cudaError_t cross_entropy(const CrossEntropyParams& params, cudaStream_t stream) {
  return dispatch_real(params.dtype, [&]<class E>() { return launch<E>(params, stream); });
}

cudaError_t loss_sum(const LossSumParams& params, cudaStream_t stream) {
  return dispatch_state(params.dtype, [&]<class Real>() {
    return launch_unless_empty(&loss_sum_kernel<Real>, 1, dim3(kSumThreads), 0, stream, params);
  });
}

}  // namespace tidegate::kernels::loss
