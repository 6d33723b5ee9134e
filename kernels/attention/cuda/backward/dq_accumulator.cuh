#pragma once

// dq where several blocks add to it: the five-product backward pass keeps it in fp32, in the order
// in which the warps of the key-gradient kernel hold its accumulators, so that an addition is whole
// 16-byte pieces and nothing has to be rearranged in the hot loop. Here are both ends of that
// layout: how a warp adds its part of a tile, and the kernel that converts the sums to dq's dtype.

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/smem_tiles.cuh"
#include "kernels/attention/cuda/work.cuh"

namespace tidegate::kernels::attention {

/// Adds four floats to device memory.
__device__ inline void add_four(float* to, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    atomicAdd(to + i, x[i]);
  }
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/// Adds kBytes of floats in shared memory to device memory, asynchronously, in a group of the
/// thread's own. The warp that wrote them has met: see add_dq_tile.
template <int kBytes>
__device__ inline void add_bulk(float* to, const float* shared) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(shared_address(shared)), "n"(kBytes)
      : "memory");
}
/// What the thread's groups read may be written again.
__device__ inline void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// What the thread's groups add has been added.
__device__ inline void wait_for_bulk_additions() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/// Lets the copy engine see what this thread wrote to shared memory.
__device__ inline void show_to_copy_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

/// Adds a warp's part of a tile of dq to that in device memory, in the order in which lanes hold
/// it: see convert_dq_kernel. `to`, `staged`: of the lane's first four floats. On 9.0 by way of
/// shared memory where there is room, from where the copy engine adds it.
template <class Shape>
__device__ __forceinline__ void add_dq_tile(
    const float (&dq)[Shape::QueryGradPart::kRowTiles][Shape::QueryGradPart::kColumnTiles][4],
    float* to, float* staged, int lane) {
  using Part = typename Shape::QueryGradPart;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr bool kDqViaSmem = Shape::kDqViaSmem;
  if constexpr (kDqViaSmem) {
    if (lane == 0) {
      wait_for_bulk_reads();
    }
    __syncwarp();
  }
#else
  constexpr bool kDqViaSmem = false;
#endif
#pragma unroll
  for (int i = 0; i < Part::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < Part::kColumnTiles; ++j) {
      const int at = (i * Part::kColumnTiles + j) * 128;
      if constexpr (kDqViaSmem) {
        const float (&x)[4] = dq[i][j];
        *reinterpret_cast<float4*>(staged + at) = make_float4(x[0], x[1], x[2], x[3]);
      } else {
        add_four(to + at, dq[i][j]);
      }
    }
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kDqViaSmem) {
    show_to_copy_engine();
    __syncwarp();
    if (lane == 0) {
      add_bulk<static_cast<int>(sizeof(dq)) * 32>(to, staged);
    }
  }
#endif
}

/// dq from its sums, a block a tile of queries: they lie in the order in which the warps that made
/// them hold accumulators. The first blocks add up chunks of gates' gradients.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    convert_dq_kernel(const __grid_constant__ TensorAttention w,
                      const __grid_constant__ GateChunks<GateGradientScan<float>> gates) {
  static_assert(Shape::kThreads == kGateChunk);
  if (blockIdx.x < gates.blocks()) {
    gates.add_up(blockIdx.x);
    return;
  }
  using T = typename Shape::T;
  using QueryGradPart = typename Shape::QueryGradPart;
  constexpr int kDim = Shape::kDim, kRows = Shape::kRows;
  extern __shared__ __align__(128) unsigned char rounded[];
  const ForgettingAttentionParams& p = w.params.forward;
  // From the last head on, whose sums the L2 still has.
  const TileAndHead place(w.query_tiles, p.heads, 1, gridDim.x - 1 - blockIdx.x, false);
  if (place.tile.tokens == 0) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const float scale = static_cast<float>(p.scale);
  constexpr int kParts = QueryGradPart::kRowTiles * QueryGradPart::kColumnTiles;
  const float* const from = w.dq_sums + (place.tile_index * p.heads + place.head) * (kRows * kDim) +
                            (warp * kParts * 32 + lane) * 4;
#pragma unroll
  for (int i = 0; i < QueryGradPart::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < QueryGradPart::kColumnTiles; ++j) {
      const float4 x =
          *reinterpret_cast<const float4*>(from + (i * QueryGradPart::kColumnTiles + j) * 128);
      unsigned char* const to =
          rounded +
          Tile16Bit<kDim>::offset(QueryGradPart::row(warp) + 16 * i + lane / 4,
                                  QueryGradPart::column(warp) / 8 + j) +
          lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(x.x * scale, x.y * scale);
      *reinterpret_cast<uint32_t*>(to + 8 * Tile16Bit<kDim>::kRowBytes) =
          pack_pair<T>(x.z * scale, x.w * scale);
    }
  }
  __syncthreads();
  store_tile<kDim, kRows, Shape::kThreads>(
      row_address<2>(w.params.dq, place.tile.sequence, place.head, place.tile.first),
      row_stride<2>(w.params.dq), rounded, place.tile.tokens, static_cast<int>(p.head_dim / 8),
      thread);
}

}  // namespace tidegate::kernels::attention
