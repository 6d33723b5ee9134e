#pragma once

// The first pass over all chunks at once: what the tokens of a block exchange with the states at
// its ends, and their scores among themselves. A warp has a block of 16 tokens.

#include "kernels/gla/cuda/dyadic.cuh"
#include "kernels/gla/cuda/quad_inputs.cuh"

namespace tidegate::kernels {

/// Where a lane's two tokens and four columns lie in a tile: four bytes for each token and half of
/// the columns.
struct QuadPlace {
  char* first;
  int to_token, to_half;

  /// Of slice 0.
  __device__ QuadPlace(const ChunkFactors& factors, const NearRows& rows, int block, int lane)
      : first(factors.tile(rows, 0, block, lane * 4)),
        to_token(distance(factors, rows, 0, kTileBytes / 4)),
        to_half(distance(factors, rows, 0, kTileBytes / 2)) {}
  __device__ QuadPlace(char* tile, int lane)
      : first(tile + lane * 4), to_token(kTileBytes / 4), to_half(kTileBytes / 2) {}

  /// From the first byte of slice 0 to another of the same block.
  static __device__ int distance(const ChunkFactors& factors, const NearRows& rows, int slice,
                                 int offset) {
    return static_cast<int>(factors.tile(rows, slice, 0, offset) - factors.tile(rows, 0, 0, 0));
  }

  __device__ void store(int offset, const float (&x)[2][4]) const {
    char* to = first + offset;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        *reinterpret_cast<uint32_t*>(to + i * to_token + n * to_half) =
            pack_bf16(x[i][2 * n], x[i][2 * n + 1]);
      }
    }
  }
};

template <class T, GateKind kKind>
__global__ void __launch_bounds__(kBlocks * 32, 5)
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
  const NearRows &key_rows = rows.factors[kKeys], &query_rows = rows.factors[kQueries];
  const QuadPlace keys(a.factors, key_rows, block, at.lane);
  const QuadPlace queries(a.factors, query_rows, block, at.lane);
  float* decays = a.factors.slice_decays(slot, head, 0) + block * kBlock + 2 * c;
  QuadInputs<T, kKind> inputs(p, rows);
  DyadicScores sums;
  inputs.move_to(token);
  inputs.load(4 * c);
#pragma unroll 1
  for (int s = 0; s < at.key_slices; ++s) {
    float gamma[4], total[4];
    load_bounds(p, head, s * kBlock + 4 * c, gamma);
    Quad x;
    inputs.get(gamma, at.tokens - token, x);
    if (s + 1 < at.key_slices) {
      inputs.load((s + 1) * kBlock + 4 * c);
    }
    dyadic_step(x.q, x.k, x.f, at.lane, sums, total);
    keys.store(QuadPlace::distance(a.factors, key_rows, s, 0), x.k);
    queries.store(QuadPlace::distance(a.factors, query_rows, s, 0), x.q);
    if (r == 0) {
      *reinterpret_cast<float2*>(decays) = make_float2(total[0], total[1]);
      *reinterpret_cast<float2*>(decays + 8) = make_float2(total[2], total[3]);
    }
    decays += ChunkFactors::kSliceDecays;
  }
  float scores[2][4];
  sums.finish(scores, at.lane);
  // Rows and columns in the order of rows: even tokens, then odd ones.
  const float by_row[2][4] = {{scores[0][0], scores[0][2], scores[0][1], scores[0][3]},
                              {scores[1][0], scores[1][2], scores[1][1], scores[1][3]}};
  QuadPlace(reinterpret_cast<char*>(a.factors.block_scores(slot, head, block)), at.lane)
      .store(0, by_row);
}

}  // namespace tidegate::kernels
