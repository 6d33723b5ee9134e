#pragma once

// Which tiles the backward pass takes, by head dimension and by the shared memory there is.

#include <type_traits>

#include "kernels/attention/cuda/smem_tiles.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels::attention {

/// Eight warps share every product of a pair of tiles; each product divides its result among them
/// in its own way: warps along the rows, the others along the columns.
template <class Data, int kHeadDim, int kQueriesATile, int kKeysATile, int kScoreWarps,
          int kKeyWarps, int kQueryWarps, int kStagesOfQueries, int kBlocksPerSm = 1>
struct BackwardShape {
  using T = Data;
  static constexpr int kDim = kHeadDim;
  static constexpr int kRows = kQueriesATile;
  static constexpr int kKeys = kKeysATile;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kStagesOfQueries;  // one or two tiles of queries and of dO
  static constexpr int kBlocks = kBlocksPerSm;      // of a multiprocessor: bounds registers

  /// One product's part of a warp, in tiles of 16 rows and of 8 columns.
  template <int kAllRows, int kAllColumns, int kWarpsAlongRows>
  struct Part {
    static constexpr int kWarpsOfRows = kWarpsAlongRows;
    static constexpr int kRowTiles = kAllRows / kWarpsAlongRows / 16;
    static constexpr int kColumnTiles = kAllColumns / (kWarps / kWarpsAlongRows) / 8;
    static __device__ int row(int warp) { return warp % kWarpsAlongRows * (16 * kRowTiles); }
    static __device__ int column(int warp) { return warp / kWarpsAlongRows * (8 * kColumnTiles); }
  };
  using Scores = Part<kRows, kKeys, kScoreWarps>;    // S, dP
  using KeySums = Part<kKeys, kDim, kKeyWarps>;      // dk, dv
  using QuerySums = Part<kRows, kDim, kQueryWarps>;  // dq

  static constexpr int kKeyBytes = HalfTile<kDim>::bytes(kKeys);
  static constexpr int kRowBytes = HalfTile<kDim>::bytes(kRows);
  static constexpr int kScoreBytes = HalfTile<kKeys>::bytes(kRows);
  static constexpr int kRowStats = 4;  // c_i - c_ref, high and low; lse; dlse - delta
  // dq's sums by way of shared memory, which was slower at D = 128: see add_dq_tile.
  static constexpr bool kStagesSums = kStages > 1 && kDim < 128;
  static constexpr int kSharedBytes = 2 * kKeyBytes + 2 * kStages * kRowBytes + 2 * kScoreBytes +
                                      (2 * kKeys + 2 * kRowStats * kRows) * int{sizeof(float)};

  /// What a launch asks for.
  static int shared_bytes(const DeviceLimits& limits) {
    const bool staged = kStagesSums && limits.major == 9;
    return kSharedBytes + (staged ? kRows * kDim * int{sizeof(float)} : 0);
  }
};

template <class Data, int kHeadDim, int kRowTilesAWarp, int kWarpsABlock, int kKeysATile>
struct QueryGradientShape {
  using T = Data;
  static constexpr int kDim = kHeadDim;
  static constexpr int kRowTiles = kRowTilesAWarp;
  static constexpr int kWarps = kWarpsABlock;
  static constexpr int kKeys = kKeysATile;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarpRows * kWarps;
  static constexpr int kRowBytes = HalfTile<kDim>::bytes(kRows);
  static constexpr int kKeyBytes = HalfTile<kDim>::bytes(kKeys);
  static constexpr int kStageBytes = 2 * kKeyBytes;  // keys, values
  static constexpr int kSharedBytes =
      2 * kRowBytes + 2 * kStageBytes + (2 * 2 * kKeys + 4 * kRows) * int{sizeof(float)};
};

/// Calls f with the shapes of a head dimension of the class: f.template operator()<Shape of
/// key_gradient_kernel, its Shape for near heads, Shape of query_gradient_kernel>().
/// cudaErrorNotSupported where no shape fits.
template <class T, HeadDims kDims, class F>
cudaError_t with_backward_shapes(int64_t dim, const DeviceLimits& limits, const F& f) {
  const auto first_that_fits = [&]<class Query, class First, class Second, class Near = First>() {
    // Sums of dq are laid out by either, and read by the first.
    static_assert(First::kRows == Near::kRows &&
                  First::QuerySums::kWarpsOfRows == Near::QuerySums::kWarpsOfRows);
    if (Query::kSharedBytes <= limits.shared_bytes &&
        First::shared_bytes(limits) <= limits.shared_bytes) {
      return f.template operator()<First, Near, Query>();
    }
    if (Query::kSharedBytes <= limits.shared_bytes &&
        Second::shared_bytes(limits) <= limits.shared_bytes) {
      return f.template operator()<Second, Second, Query>();
    }
    return cudaErrorNotSupported;
  };
  if constexpr (kDims == HeadDims::kSmall) {
    if (dim <= 32) {
      using Only = BackwardShape<T, 32, 64, 128, 2, 4, 4, 2>;
      return first_that_fits.template operator()<QueryGradientShape<T, 32, 2, 4, 64>, Only, Only>();
    }
    if (dim <= 64) {
      return first_that_fits.template
      operator()<QueryGradientShape<T, 64, 2, 4, 64>, BackwardShape<T, 64, 128, 128, 4, 4, 4, 2>,
                 BackwardShape<T, 64, 64, 128, 2, 4, 4, 1>>();
    }
    return first_that_fits.template
    operator()<QueryGradientShape<T, 96, 2, 4, 32>, BackwardShape<T, 96, 64, 128, 2, 4, 4, 2>,
               BackwardShape<T, 96, 64, 64, 4, 4, 4, 1>>();
  } else {
    if (dim <= 128) {
      return first_that_fits.template
      operator()<QueryGradientShape<T, 128, 2, 4, 32>, BackwardShape<T, 128, 64, 128, 2, 4, 2, 2>,
                 BackwardShape<T, 128, 64, 64, 4, 4, 2, 1>,
                 BackwardShape<T, 128, 64, 64, 2, 2, 2, 1, 2>>();
    }
    if (dim <= 192) {
      return first_that_fits.template
      operator()<QueryGradientShape<T, 192, 1, 4, 32>, BackwardShape<T, 192, 64, 64, 4, 2, 2, 1>,
                 BackwardShape<T, 192, 32, 64, 2, 2, 2, 1>>();
    }
    using Only = BackwardShape<T, 256, 64, 64, 4, 2, 2, 1>;
    return first_that_fits.template operator()<QueryGradientShape<T, 256, 1, 4, 32>, Only, Only>();
  }
}

}  // namespace tidegate::kernels::attention
