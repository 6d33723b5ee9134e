#pragma once

// The first kernel of the backward pass, over all chunks at once: what the tokens of a sub-chunk
// exchange with the states at its ends, which are Q and K, and their scores among themselves.

#include "kernels/gla/cuda/backward/lane_inputs.cuh"
#include "kernels/gla/cuda/dyadic.cuh"

namespace tidegate::kernels::gla {

/// A lane's two tokens and four columns into a tile: four bytes for each token and half of the
/// columns.
__device__ inline void store_quad(char* to, int to_token, int to_half, const float (&x)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint32_t*>(to + i * to_token) = pack_bf16(x[i][2 * n], x[i][2 * n + 1]);
    }
    to += to_half;
  }
}

/// The way from a lane's first four bytes of a tile to its others, and to those of the next
/// K-slice's tile.
struct alignas(16) QuadSteps {
  int to_token, to_half, to_slice, to_piece;

  __device__ void find(const ChunkFactors& factors, const NearRows& rows) {
    const auto distance = [&](int slice, int offset) {
      return static_cast<int>(factors.tile(rows, slice, 0, offset) - rows.base);
    };
    to_token = distance(0, kTileBytes / 4);
    to_half = distance(0, kTileBytes / 2);
    to_slice = distance(1, 0);
    to_piece = distance(factors.slices_down(), 0) - distance(factors.slices_down() - 1, 0);
  }
};

/// The scores of a sub-chunk as a tile: rows and columns in the order of token_of_row.
__device__ inline void store_scores(const ChunkBackward& a, const ChunkPlace& at, int sub_chunk,
                                    DyadicScores& sums) {
  float scores[2][4];
  sums.finish(scores, at.lane);
  const float by_row[2][4] = {{scores[0][0], scores[0][2], scores[0][1], scores[0][3]},
                              {scores[1][0], scores[1][2], scores[1][1], scores[1][3]}};
  uint4* const tile = a.factors.sub_chunk_scores(at.chunk, at.head, sub_chunk);
  store_quad(reinterpret_cast<char*>(tile) + at.lane * 4, kTileBytes / 4, kTileBytes / 2, by_row);
}

/// A block of threads is a chunk and a head, a warp a sub-chunk. A lane goes through the K-slices
/// with two tokens and four channels: loads them a slice ahead, makes Q, K and the sub-chunk's
/// decays by dyadic_step, which adds to the scores, and stores them. kWide: half of a tile lies in
/// one piece of a row.
template <class T, GateKind kKind, bool kWide>
__global__ void __launch_bounds__(kSubChunks * 32, 5)
    chunk_factors_kernel(const __grid_constant__ ChunkBackward a) {
  __shared__ ChunkRows rows;
  __shared__ QuadSteps steps[kFactorSides];
  const GlaParams& p = a.backward.forward;
  const auto index = static_cast<int>(blockIdx.x), heads = static_cast<int>(p.heads);
  const int chunk = index / heads, head = index % heads;
  if (threadIdx.x < 32) {
    rows.find(a, chunk, head, static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  if (threadIdx.x < kFactorSides) {
    steps[threadIdx.x].find(a.factors, rows.factors[threadIdx.x]);
  }
  __syncthreads();
  const ChunkPlace at(p, chunk, head, rows);
  if (at.tokens == 0) {
    return;
  }
  const int sub_chunk = at.warp, r = at.lane / 4, c = at.lane % 4;
  const int token = sub_chunk * kSubChunk + 2 * r;
  const int last_down = a.factors.slices_down() - 1;
  char* places[kFactorSides];
#pragma unroll
  for (int side = 0; side < kFactorSides; ++side) {
    places[side] = a.factors.tile(rows.factors[side], 0, sub_chunk, at.lane * 4);
  }
  float* decays = a.factors.slice_decays(chunk, head, 0) + sub_chunk * kSlice + 2 * c;
  QuadInputs<T, kKind> inputs(p, rows);
  DyadicScores sums;
  inputs.move_to(token);
  inputs.load(4 * c);
#pragma unroll 1
  for (int s = 0; s < at.key_slices; ++s) {
    float gamma[4], total[4];
    load_lane_gamma(p, head, s * kSlice + 4 * c, gamma);
    Quad x;
    inputs.get(gamma, at.tokens - token, x);
    if (s + 1 < at.key_slices) {
      inputs.load((s + 1) * kSlice + 4 * c);
    }
    dyadic_step(x.q, x.k, x.f, at.lane, sums, total);
#pragma unroll
    for (int side = 0; side < kFactorSides; ++side) {
      const QuadSteps& step = steps[side];
      store_quad(places[side], kWide ? kTileBytes / 4 : step.to_token, step.to_half,
                 side == kQueries ? x.q : x.k);
      places[side] += (s & last_down) == last_down ? step.to_piece : step.to_slice;
    }
    if (r == 0) {
      *reinterpret_cast<float2*>(decays) = make_float2(total[0], total[1]);
      *reinterpret_cast<float2*>(decays + 8) = make_float2(total[2], total[3]);
    }
    decays += ChunkFactors::kSliceDecays;
  }
  store_scores(a, at, sub_chunk, sums);
}

}  // namespace tidegate::kernels::gla
