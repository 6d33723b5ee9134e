// Rotary positions: one elementwise pass, bound by memory. A thread has one token and a few
// neighbouring channels of both halves of four heads, which share the angles in its registers.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/integers.h"
#include "kernels/rotary/rotary_cuda.h"

namespace tidegate::kernels::rotary {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadsPerThread = 4;

template <class T, int kVec>
__device__ Pack<T, kVec> load(const T* p) {
  return {__ldg(reinterpret_cast<const typename Pack<T, kVec>::Bits*>(p))};
}

/// kVec numbers in accesses of at most 16 bytes.
template <class T, int kVec>
__device__ void load_all(const T* p, T (&out)[kVec]) {
  constexpr int kMost = 16 / static_cast<int>(sizeof(T));
  constexpr int kPart = kVec < kMost ? kVec : kMost;
#pragma unroll
  for (int i = 0; i < kVec; i += kPart) {
    const auto part = load<T, kPart>(p + i);
#pragma unroll
    for (int v = 0; v < kPart; ++v) {
      out[i + v] = part.get(v);
    }
  }
}

/// A thread has kVec channels of each half, of one token and a few heads. `Index` counts threads.
template <class E, int kVec, class Index>
__global__ void __launch_bounds__(kThreads)
    rotary_kernel(const RotaryParams p, Index packs, Index groups, Index items) {
  using Real = typename Register<E>::type;
  const Index item = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= items) {
    return;
  }
  const Index time = static_cast<Index>(p.time);
  const int64_t channel = static_cast<int64_t>(item % packs) * kVec;
  const int64_t first_head = static_cast<int64_t>(item / packs % groups) * kHeadsPerThread;
  const Index token = item / packs / groups;
  const int64_t b = token / time, t = token % time;

  // All that is read is asked for at once.
  const E* x = static_cast<const E*>(p.x.data) + b * p.x.stride_b + t * p.x.stride_t + channel;
  Pack<E, kVec> low[kHeadsPerThread], high[kHeadsPerThread];
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) {
    // Where there are fewer heads, the last one again.
    const int64_t head = first_head + i < p.heads ? first_head + i : p.heads - 1;
    low[i] = load<E, kVec>(x + head * p.x.stride_h);
    high[i] = load<E, kVec>(x + head * p.x.stride_h + p.half);
  }
  const int64_t row = ((p.shared_angles ? 0 : b) * p.time + t) * p.half + channel;
  Real cos[kVec], sin[kVec];
  load_all(static_cast<const Real*>(p.cos) + row, cos);
  load_all(static_cast<const Real*>(p.sin) + row, sin);

  E* y = static_cast<E*>(p.y.data) + b * p.y.stride_b + t * p.y.stride_t + channel;
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) {
    Real turned_low[kVec], turned_high[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Real a = low[i].get(v), c = high[i].get(v);
      const Real s = p.inverse ? -sin[v] : sin[v];
      turned_low[v] = fused(a, cos[v], -(c * s));
      turned_high[v] = fused(c, cos[v], a * s);
    }
    if (first_head + i < p.heads) {
      using Bits = typename Pack<E, kVec>::Bits;
      E* to = y + (first_head + i) * p.y.stride_h;
      *reinterpret_cast<Bits*>(to) = pack<E, kVec>(turned_low).bits;
      *reinterpret_cast<Bits*>(to + p.half) = pack<E, kVec>(turned_high).bits;
    }
  }
}

template <class E, int kVec>
cudaError_t launch(const RotaryParams& p, cudaStream_t stream) {
  const int64_t packs = p.half / kVec;
  const int64_t groups = ceil_div(p.heads, kHeadsPerThread);
  const int64_t items = p.batch * p.time * groups * packs;
  const int64_t blocks = ceil_div(items, kThreads);
  if (blocks * kThreads <= INT32_MAX) {  // 64-bit divisions take longer than the work
    return launch_unless_empty(&rotary_kernel<E, kVec, uint32_t>, blocks, dim3(kThreads), 0, stream,
                               p, static_cast<uint32_t>(packs), static_cast<uint32_t>(groups),
                               static_cast<uint32_t>(items));
  }
  return launch_unless_empty(&rotary_kernel<E, kVec, int64_t>, blocks, dim3(kThreads), 0, stream, p,
                             packs, groups, items);
}

}  // namespace

cudaError_t rotary(const RotaryParams& params, cudaStream_t stream) {
  return dispatch_real(params.x.dtype, [&]<class E>() {
    constexpr int kVec = 16 / static_cast<int>(sizeof(E));
    const bool is_wide =
        params.half % kVec == 0 && rows_aligned(params.x, 16) && rows_aligned(params.y, 16);
    return is_wide ? launch<E, kVec>(params, stream) : launch<E, 1>(params, stream);
  });
}

}  // namespace tidegate::kernels::rotary
