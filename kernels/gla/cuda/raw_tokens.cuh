#pragma once

// A lane's share of a block of 16 tokens before anything is applied to it: two tokens, eight
// channels at once.

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/gla/cuda/block_tiles.cuh"
#include "kernels/gla/cuda/gates.cuh"

namespace tidegate::kernels::gla {

/// Eight elements of T.
template <class T>
struct Eight {
  static constexpr int kPieces = sizeof(T) / 2;
  uint4 bits[kPieces];

  /// From a tile of T; `piece` counts eights.
  template <class Tile>
  __device__ void load(Tile& tile, int token, int piece) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      bits[i] = *tile.at(token, piece * kPieces + i);
    }
  }
  __device__ void fill(uint32_t word) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      bits[i] = {word, word, word, word};
    }
  }
  /// Element i, a constant once loops are unrolled.
  __device__ float get(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word(i));
    } else {
      return Pack<T, 2>{word(i / 2)}.get(i % 2);
    }
  }

 private:
  __device__ uint32_t word(int i) const {
    const uint4& b = bits[i / 4];
    return i % 4 == 0 ? b.x : i % 4 == 1 ? b.y : i % 4 == 2 ? b.z : b.w;
  }
};

/// Sigmoid at the precision of 16-bit data; zero where exp(-x) overflows.
__device__ inline float sigmoid_of_data(float x) {
  return reciprocal_approx(1.0f + exp2_approx(x * -kLog2E));
}

/// Four of eight elements, activated, as floats.
template <class T>
__device__ inline void activated(InputActivation activation, const Eight<T>& raw, int first,
                                 float (&out)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    out[j] = raw.get(first + j);
  }
  if (activation != InputActivation::kNone) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float s = sigmoid_of_data(out[j]);
      out[j] = activation == InputActivation::kSilu ? out[j] * s : s;
    }
  }
}

/// Eight values, activated, as bf16.
template <class T>
__device__ inline uint4 activated_bf16(InputActivation activation, const Eight<T>& raw) {
  float low[4], high[4];
  activated(activation, raw, 0, low);
  activated(activation, raw, 4, high);
  return {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
          pack_bf16(high[2], high[3])};
}

}  // namespace tidegate::kernels::gla
