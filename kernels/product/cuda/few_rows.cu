// Products of a few rows with a matrix: a warp has a channel of the result, or two, and reads its
// rows of w from end to end, eight packs of 16 bytes a lane in flight. Nothing else needs the
// memory's speed here: x stays in the first-level cache.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/product/product_cuda.h"

namespace tidegate::kernels::product {
namespace {

constexpr int kWarps = 4;
constexpr int kBytes = 16;

template <class E>
constexpr int kPack = kBytes / static_cast<int>(sizeof(E));

/// The packs of w that a lane has in flight, of kOuter channels.
template <class E, int kOuter, int kUnroll>
struct WeightPacks {
  Pack<E, kPack<E>> packs[kUnroll][kOuter];

  __device__ void load(const FewRowsParams& p, int64_t channel, int64_t first, int64_t count) {
    using Bits = typename Pack<E, kPack<E>>::Bits;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t pack = first + 32 * u;
#pragma unroll
      for (int o = 0; o < kOuter; ++o) {
        if (pack < count && channel + o < p.outer) {
          const E* const row = static_cast<const E*>(p.w) + (channel + o) * p.stride_w;
          packs[u][o].bits = __ldg(reinterpret_cast<const Bits*>(row) + pack);
        } else {
          packs[u][o].bits = Bits{};
        }
      }
    }
  }
};

template <class E, int kRows, int kOuter, int kUnroll>
__global__ void __launch_bounds__(32 * kWarps)
    few_rows_kernel(const __grid_constant__ FewRowsParams p) {
  using Real = typename Register<E>::type;
  using Bits = typename Pack<E, kPack<E>>::Bits;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kOuter;
  const int64_t count = p.inner / kPack<E>;
  Real sums[kRows][kOuter] = {};
  WeightPacks<E, kOuter, kUnroll> weights;
  // The weights are nobody's result: they are on their way while the kernel before still writes x.
  weights.load(p, channel, lane, count);
  wait_for_kernels_before();
  for (int64_t first = lane; first < count; first += 32 * kUnroll) {
    if (first != lane) {
      weights.load(p, channel, first, count);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t pack = first + 32 * u;
      if (pack >= count) {
        break;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const E* const row = static_cast<const E*>(p.x) + r * p.stride_x;
        // No __ldg: x may have been written while this kernel ran.
        const Pack<E, kPack<E>> x{*(reinterpret_cast<const Bits*>(row) + pack)};
#pragma unroll
        for (int o = 0; o < kOuter; ++o) {
#pragma unroll
          for (int v = 0; v < kPack<E>; ++v) {
            sums[r][o] += weights.packs[u][o].get(v) * x.get(v);
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int o = 0; o < kOuter; ++o) {
      const Real sum = warp_sum(sums[r][o]);
      if (lane == 0 && channel + o < p.outer) {
        const Real bias =
            p.bias == nullptr ? Real(0) : widen(static_cast<const E*>(p.bias)[channel + o]);
        static_cast<E*>(p.y)[r * p.stride_y + channel + o] = narrow<E>(sum + bias);
      }
    }
  }
}

template <class E, int kRows>
cudaError_t launch_few_rows(const FewRowsParams& p, cudaStream_t stream) {
  // Two channels share what is read of x where there are several rows of it.
  constexpr int kOuter = kRows > 2 ? 2 : 1;
  constexpr int kUnroll = 8 / kOuter;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.outer, kWarps * kOuter)));
  return launch_early<&few_rows_kernel<E, kRows, kOuter, kUnroll>>(grid, dim3(32 * kWarps), 0,
                                                                   stream, p);
}

bool is_in_packs(const void* data, int64_t stride, DType dtype) {
  return is_aligned(data, kBytes) && stride * element_size(dtype) % kBytes == 0;
}

}  // namespace

bool few_rows_fit(const FewRowsParams& p) {
  return p.rows >= 1 && p.rows <= kFewRows && p.outer >= 1 && p.inner >= 1 &&
         p.outer <= INT32_MAX && p.inner * element_size(p.dtype) % kBytes == 0 &&
         is_in_packs(p.x, p.stride_x, p.dtype) && is_in_packs(p.w, p.stride_w, p.dtype);
}

cudaError_t few_rows_cuda(const FewRowsParams& params, cudaStream_t stream) {
  return dispatch_real(params.dtype, [&]<class E>() {
    switch (params.rows) {
      case 1:
        return launch_few_rows<E, 1>(params, stream);
      case 2:
        return launch_few_rows<E, 2>(params, stream);
      case 3:
        return launch_few_rows<E, 3>(params, stream);
      default:
        return launch_few_rows<E, 4>(params, stream);
    }
  });
}

}  // namespace tidegate::kernels::product
