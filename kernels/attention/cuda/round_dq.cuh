#pragma once

// dq from its sums in float.

#include "kernels/attention/cuda/tensor_backward.cuh"

namespace tidegate::kernels::attention {

/// dq from its sums, a block a tile of queries: they lie in the order in which the warps that made
/// them hold accumulators. The first blocks add up chunks of gates' gradients.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    round_dq_kernel(const __grid_constant__ TensorAttention w,
                    const __grid_constant__ GateChunks<GateGradientScan<float>> gates) {
  static_assert(Shape::kThreads == kGateChunk);
  if (blockIdx.x < gates.blocks()) {
    gates.add_up(blockIdx.x);
    return;
  }
  using T = typename Shape::T;
  using QuerySums = typename Shape::QuerySums;
  constexpr int kDim = Shape::kDim, kRows = Shape::kRows;
  extern __shared__ __align__(128) unsigned char rounded[];
  const ForgettingAttentionParams& p = w.params.forward;
  // From the last head on, whose sums the L2 still has.
  const TileAndHead place(w.query_tiles, p.heads, 1, gridDim.x - 1 - blockIdx.x, false);
  if (place.cut.tokens == 0) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const float scale = static_cast<float>(p.scale);
  constexpr int kParts = QuerySums::kRowTiles * QuerySums::kColumnTiles;
  const float* const from = w.dq_sums + (place.slot * p.heads + place.head) * (kRows * kDim) +
                            (warp * kParts * 32 + lane) * 4;
#pragma unroll
  for (int i = 0; i < QuerySums::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < QuerySums::kColumnTiles; ++j) {
      const float4 x =
          *reinterpret_cast<const float4*>(from + (i * QuerySums::kColumnTiles + j) * 128);
      unsigned char* const to = rounded +
                                HalfTile<kDim>::offset(QuerySums::row(warp) + 16 * i + lane / 4,
                                                       QuerySums::column(warp) / 8 + j) +
                                lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(x.x * scale, x.y * scale);
      *reinterpret_cast<uint32_t*>(to + 8 * HalfTile<kDim>::kRowBytes) =
          pack_pair<T>(x.z * scale, x.w * scale);
    }
  }
  __syncthreads();
  store_tile<kDim, kRows, Shape::kThreads>(
      row_address(w.params.dq, place.cut.sequence, place.head, place.cut.first),
      row_bytes(w.params.dq), rounded, place.cut.tokens, static_cast<int>(p.head_dim / 8), thread);
}

}  // namespace tidegate::kernels::attention
