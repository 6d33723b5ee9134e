#pragma once

// Sums over time of per-channel quantities: gradients of the arguments that have no time axis.
// Each team of threads writes one row of partial sums; the rows are added up by the caller.

#include "kernels/common/cuda/precise.cuh"
#include "kernels/scan/cuda/rows.cuh"

namespace tidegate::kernels::scan {

template <class Number, int kVec>
__device__ inline void write_partial(const Number (&sum)[kVec], void* partial, int64_t row,
                                     const Lane& lane) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    if (partial != nullptr) {
      static_cast<Number*>(partial)[row * lane.channels + lane.channel + v] = sum[v];
    }
  }
}

template <class Number, bool kPrecise, int kVec>
__device__ inline void write_partial(const Sum<Number, kPrecise> (&sum)[kVec], void* partial,
                                     int64_t row, const Lane& lane) {
  Number values[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    values[v] = sum[v].value();
  }
  write_partial(values, partial, row, lane);
}

/// Adds the warps' sums in the order of the warps. `scratch` is shared memory for warps * 32 packs.
/// Called by all threads of a block, or by none.
template <class Number, bool kPrecise, int kVec>
__device__ inline void sum_over_warps(const Sum<Number, kPrecise> (&sum)[kVec], void* partial,
                                      int64_t row, const Lane& lane, void* scratch, int warp,
                                      int warps, int lane_index) {
  if (partial == nullptr) {
    return;
  }
  auto* board = static_cast<Pack<Number, kVec>(*)[kWarpSize]>(scratch);
  Number values[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    values[v] = sum[v].value();
  }
  __syncthreads();
  board[warp][lane_index] = pack<Number, kVec>(values);
  __syncthreads();
  if (warp != 0) {
    return;
  }
  Sum<Number, kPrecise> total[kVec];
  for (int w = 0; w < warps; ++w) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      total[v].add(board[w][lane_index].get(v));
    }
  }
  write_partial(total, partial, row, lane);
}

}  // namespace tidegate::kernels::scan
