#pragma once

// The first pass over all chunks at once: what the tokens of a block exchange with the states at
// its ends, and their scores among themselves. A warp has a block of 16 tokens.

#include "kernels/gla/cuda/dyadic.cuh"
#include "kernels/gla/cuda/quad_inputs.cuh"

namespace tidegate::kernels {

/// A lane's two tokens and four columns into a tile.
__device__ inline void store_quad(char* tile, const float (&x)[2][4], int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      *reinterpret_cast<uint32_t*>(tile + tile_offset(lane / 4 + 8 * i, n) + lane % 4 * 4) =
          pack_bf16(x[i][2 * n], x[i][2 * n + 1]);
    }
  }
}

template <class T, GateKind kKind>
__global__ void __launch_bounds__(kBlocks * 32)
    chunk_factors_kernel(const __grid_constant__ ChunkBackward a) {
  __shared__ ChunkRows rows;
  const GlaParams& p = a.backward.forward;
  const auto index = static_cast<int>(blockIdx.x), heads = static_cast<int>(p.heads);
  const int slot = index / heads, head = index % heads;
  if (threadIdx.x < 32) {
    rows.find(a, slot, head, static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  const ChunkPlace at(p, slot, head, rows);
  if (at.tokens == 0) {
    return;
  }
  const int block = at.warp, r = at.lane / 4, c = at.lane % 4, token = block * kBlock + 2 * r;
  char* slice = a.factors.slice(slot, head, 0);
  float* decays = a.factors.slice_decays(slot, head, 0) + block * kBlock + 2 * c;
  QuadInputs<T, kKind> inputs(p, rows);
  DyadicScores sums;
  inputs.load(token, 4 * c);
#pragma unroll 1
  for (int s = 0; s < at.key_slices; ++s) {
    float gamma[4], total[4];
    load_bounds(p, head, s * kBlock + 4 * c, gamma);
    Quad x;
    inputs.get(gamma, at.tokens - token, x);
    if (s + 1 < at.key_slices) {
      inputs.load(token, (s + 1) * kBlock + 4 * c);
    }
    dyadic_step(x.q, x.k, x.f, at.lane, sums, total);
    store_quad(slice + ChunkFactors::key_tile(block) * kTileBytes, x.k, at.lane);
    store_quad(slice + ChunkFactors::query_tile(block) * kTileBytes, x.q, at.lane);
    if (r == 0) {
      *reinterpret_cast<float2*>(decays) = make_float2(total[0], total[1]);
      *reinterpret_cast<float2*>(decays + 8) = make_float2(total[2], total[3]);
    }
    slice += ChunkFactors::kSliceBytes;
    decays += ChunkFactors::kSliceDecays;
  }
  float scores[2][4];  // [token][earlier token]: 4c + j is row 2c + j / 2 of the even or odd ones
  sums.finish(scores, at.lane);
  auto* tile = reinterpret_cast<char*>(a.factors.block_scores(slot, head, block));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      *reinterpret_cast<uint32_t*>(tile + tile_offset(r + 8 * i, odd) + c * 4) =
          pack_bf16(scores[i][odd], scores[i][2 + odd]);
    }
  }
}

}  // namespace tidegate::kernels
