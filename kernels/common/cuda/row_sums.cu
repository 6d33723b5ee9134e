// The kernel of row_sums.h: a block sums 32 columns of a matrix, up to 32 rows side by side.

#include "kernels/common/cuda/row_sums.h"

#include <algorithm>

#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels {
namespace {

constexpr int kColumns = 32;   // of a block
constexpr int kMostRows = 32;  // that a block reads at once

template <class Real>
__global__ void row_sums_kernel(const __grid_constant__ RowSums sums) {
  __shared__ double partial[kMostRows][kColumns];
  const int64_t column = blockIdx.x * int64_t{kColumns} + threadIdx.x;
  const bool exists = column < sums.columns;
  wait_for_kernels_before();
  double sum = 0;
  if (exists) {
    const Real* from = static_cast<const Real*>(sums.from[blockIdx.y]) + column;
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < sums.rows; row += blockDim.y) {
      sum += from[row * sums.columns];
    }
  }
  partial[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && exists) {
    for (unsigned y = 1; y < blockDim.y; ++y) {
      sum += partial[y][threadIdx.x];
    }
    static_cast<Real*>(sums.to[blockIdx.y])[column] = static_cast<Real>(sum);
  }
}

}  // namespace

cudaError_t sum_rows(const RowSums& sums, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((sums.columns + kColumns - 1) / kColumns),
                  static_cast<unsigned>(sums.count));
  const dim3 block(kColumns, static_cast<unsigned>(std::clamp<int64_t>(sums.rows, 1, kMostRows)));
  return sums.dtype == DType::kFloat64
             ? launch_early<&row_sums_kernel<double>>(grid, block, 0, stream, sums)
             : launch_early<&row_sums_kernel<float>>(grid, block, 0, stream, sums);
}

}  // namespace tidegate::kernels
