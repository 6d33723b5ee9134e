// The gated linear unit's product: one elementwise pass each way, bound by memory. A thread has a
// few neighbouring columns of one row.

#include "kernels/norm/cuda/row_tile.cuh"
#include "kernels/norm/glu_cuda.h"

namespace tidegate::kernels::norm {
namespace {

constexpr int kThreads = 256;

/// What a thread has: a row, and its first column there.
template <class Index>
struct GluPlace {
  RowPlace<Index> row;
  int64_t column = 0;
};

template <int kColumns, class Index>
__device__ GluPlace<Index> glu_place(const GluParams& p, Index packs, Index item) {
  const Index row = item / packs;
  return {row_place(p, row), static_cast<int64_t>(item - row * packs) * kColumns};
}

template <class E, int kColumns, class Index>
__global__ void __launch_bounds__(kThreads)
    glu_kernel(const __grid_constant__ GluParams p, Index packs, Index items) {
  using Real = typename Register<E>::type;
  using Math = GateMath<Real, sizeof(E) == 2>;
  using Bits = typename Pack<E, kColumns>::Bits;
  const Index item = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= items) {
    return;
  }
  const auto [row, column] = glu_place<kColumns>(p, packs, item);
  const E* const x = row.template in<const E>(p.x) + column;
  const Pack<E, kColumns> gate{__ldg(reinterpret_cast<const Bits*>(x))};
  const Pack<E, kColumns> value{__ldg(reinterpret_cast<const Bits*>(x + p.channels))};
  Real y[kColumns];
#pragma unroll
  for (int v = 0; v < kColumns; ++v) {
    y[v] = activated<Math, Real>(p.activation, gate.get(v)) * value.get(v);
  }
  *reinterpret_cast<Bits*>(row.template in<E>(p.y) + column) = pack<E, kColumns>(y).bits;
}

template <class E, int kColumns, class Index>
__global__ void __launch_bounds__(kThreads)
    glu_backward_kernel(const __grid_constant__ GluBackwardParams p, Index packs, Index items) {
  using Real = typename Register<E>::type;
  using Math = GateMath<Real, sizeof(E) == 2>;
  using Bits = typename Pack<E, kColumns>::Bits;
  const Index item = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= items) {
    return;
  }
  const GluParams& f = p.forward;
  const auto [row, column] = glu_place<kColumns>(f, packs, item);
  const E* const x = row.template in<const E>(f.x) + column;
  const Pack<E, kColumns> gate{__ldg(reinterpret_cast<const Bits*>(x))};
  const Pack<E, kColumns> value{__ldg(reinterpret_cast<const Bits*>(x + f.channels))};
  const Pack<E, kColumns> dy{
      __ldg(reinterpret_cast<const Bits*>(row.template in<const E>(p.dy) + column))};
  Real dgate[kColumns], dvalue[kColumns], y[kColumns];
#pragma unroll
  for (int v = 0; v < kColumns; ++v) {
    Real act, derivative;
    activate<Math, Real>(f.activation, gate.get(v), &act, &derivative);
    dvalue[v] = dy.get(v) * act;
    dgate[v] = dy.get(v) * value.get(v) * derivative;
    y[v] = act * value.get(v);
  }
  E* const dx = row.template in<E>(p.dx) + column;
  *reinterpret_cast<Bits*>(dx) = pack<E, kColumns>(dgate).bits;
  *reinterpret_cast<Bits*>(dx + f.channels) = pack<E, kColumns>(dvalue).bits;
  if (f.y.data != nullptr) {
    *reinterpret_cast<Bits*>(row.template in<E>(f.y) + column) = pack<E, kColumns>(y).bits;
  }
}

/// The kernels of one direction, for the widest packs that the tensors allow.
template <class E, int kColumns>
cudaError_t launch(const GluParams& p, cudaStream_t stream) {
  const int64_t packs = p.channels / kColumns;
  const int64_t items = p.batch * p.time * p.heads * packs;
  const int64_t blocks = ceil_div(items, kThreads);
  if (blocks * kThreads <= INT32_MAX) {  // 64-bit divisions take longer than the work
    return launch_unless_empty(&glu_kernel<E, kColumns, uint32_t>, blocks, dim3(kThreads), 0,
                               stream, p, static_cast<uint32_t>(packs),
                               static_cast<uint32_t>(items));
  }
  return launch_unless_empty(&glu_kernel<E, kColumns, int64_t>, blocks, dim3(kThreads), 0, stream,
                             p, packs, items);
}

template <class E, int kColumns>
cudaError_t launch(const GluBackwardParams& p, cudaStream_t stream) {
  const GluParams& f = p.forward;
  const int64_t packs = f.channels / kColumns;
  const int64_t items = f.batch * f.time * f.heads * packs;
  const int64_t blocks = ceil_div(items, kThreads);
  if (blocks * kThreads <= INT32_MAX) {
    return launch_unless_empty(&glu_backward_kernel<E, kColumns, uint32_t>, blocks, dim3(kThreads),
                               0, stream, p, static_cast<uint32_t>(packs),
                               static_cast<uint32_t>(items));
  }
  return launch_unless_empty(&glu_backward_kernel<E, kColumns, int64_t>, blocks, dim3(kThreads), 0,
                             stream, p, packs, items);
}

template <class Params>
cudaError_t launch_widest(const Params& p, DType dtype, int64_t channels, bool are_aligned,
                          cudaStream_t stream) {
  return dispatch_real(dtype, [&]<class E>() {
    constexpr int kColumns = 16 / static_cast<int>(sizeof(E));
    const bool is_wide = are_aligned && channels % kColumns == 0;
    return is_wide ? launch<E, kColumns>(p, stream) : launch<E, 1>(p, stream);
  });
}

}  // namespace

cudaError_t glu_forward(const GluParams& params, cudaStream_t stream) {
  const GluParams p = with_merged_rows(params);
  const bool are_aligned = rows_aligned(p.x, 16) && rows_aligned(p.y, 16);
  return launch_widest(p, p.x.dtype, p.channels, are_aligned, stream);
}

cudaError_t glu_backward(const GluBackwardParams& params, cudaStream_t stream) {
  const GluBackwardParams p = with_merged_rows(params);
  const bool are_aligned = rows_aligned(p.forward.x, 16) && rows_aligned(p.dy, 16) &&
                           rows_aligned(p.dx, 16) &&
                           (p.forward.y.data == nullptr || rows_aligned(p.forward.y, 16));
  return launch_widest(p, p.forward.x.dtype, p.forward.channels, are_aligned, stream);
}

}  // namespace tidegate::kernels::norm
