#pragma once

// A stage of the forward pass's ring: a sub-chunk of 16 tokens in shared memory, on its way from
// the loader by a producer to the consumers. It is rewritten in place: where q, k (or the logits)
// and v arrive, the producer leaves what the consumers multiply, every lane in the very 16-byte
// pieces that it has read.

#include <type_traits>

#include "kernels/common/cuda/mma.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/gla/cuda/dyadic.cuh"
#include "kernels/gla/cuda/forward/schedule.cuh"
#include "kernels/gla/cuda/head_inputs.cuh"

namespace tidegate::kernels::gla {

/// 16 tokens x kColumns elements of 16 bits. A row's 16-byte pieces are permuted, so that neither
/// the eight rows that ldmatrix reads at once nor the four pieces of every second row that a
/// producer's quarter-warps touch meet in a bank.
template <int kColumns>
struct TokenTile {
  static_assert(kColumns % 64 == 0);
  static constexpr int kPieces = kColumns / 8;  // a row
  uint4 pieces[kSubChunk][kPieces];

  static __device__ int swizzle(int token) {
    return (token >> 1 & 1) << 2 | (token & 1) << 1 | (token >> 2 & 1);
  }
  __device__ uint4* at(int token, int piece) { return &pieces[token][piece ^ swizzle(token)]; }
  /// That place, in bytes from the tile's beginning.
  static __device__ unsigned offset(int token, int piece) {
    return (token * kPieces + (piece ^ swizzle(token))) * sizeof(uint4);
  }
};

/// 16 tokens x kColumns floats; producers touch every second piece of every second row.
template <int kColumns>
struct FloatTile {
  static constexpr int kPieces = kColumns / 4;
  uint4 pieces[kSubChunk][kPieces];

  __device__ uint4* at(int token, int piece) { return &pieces[token][piece ^ (token >> 1 & 1)]; }
};

struct ScoreTile {
  uint2 rows[kSubChunk][6];  // 16 bf16 a row; the padding keeps ldmatrix free of conflicts
};

/// A factor a channel, stored so that the four channels of a 16-wide step that a consumer's lane
/// holds (2c, 2c + 1, 2c + 8, 2c + 9 in the layout of an accumulator) are one access.
template <int kKeys>
struct ChannelFactors {
  float4 quads[kKeys / 4];

  /// Sets channels first .. first + 3, where `first` is a multiple of four.
  __device__ void set(int first, const float (&x)[4]) {
    float* const step = reinterpret_cast<float*>(quads) + first / 16 * 16 + first / 8 % 2 * 2;
    const int c = first % 8 / 2;
    *reinterpret_cast<float2*>(step + 4 * c) = {x[0], x[1]};
    *reinterpret_cast<float2*>(step + 4 * c + 4) = {x[2], x[3]};
  }
  /// The factors of step j, for lanes with this c (lane % 4).
  __device__ float4 get(int j, int c) const { return quads[4 * j + c]; }
  /// Multiplies the factors of quads[i] into a product.
  __device__ void multiply_into(float (&product)[4], int i) const {
    if (i * 4 < kKeys) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        product[e] *= reinterpret_cast<const float*>(&quads[i])[e];
      }
    }
  }
  /// The channels of quads[i], in their order.
  static __device__ int channel(int i, int e) { return i / 4 * 16 + e / 2 * 8 + i % 4 * 2 + e % 2; }
};

/// What consumers need of 16 tokens, and before that what it is made of.
template <int kKeys>
struct SubChunkStage {
  TokenTile<kKeys> query;       // q_t; then times the decays from the sub-chunk's start to t
  TokenTile<kKeys> key;         // k_s or 16-bit logits; then k_s times the decays from s + 1 to
                                // the sub-chunk's end
  TokenTile<kValueTile> value;  // v; then activated
  ScoreTile score;              // [t][s], zero where s > t
  ChannelFactors<kKeys> total;  // the product of the sub-chunk's decays
};

/// Gates that have no place of their own in a SubChunkStage: all but 16-bit logits.
template <class Gate, int kKeys>
using GateTile = std::conditional_t<sizeof(Gate) == 4, FloatTile<kKeys>, TokenTile<kKeys>>;

template <class Gate, int kKeys>
struct SubChunkStageWithGate : SubChunkStage<kKeys> {
  GateTile<Gate, kKeys> gate;
};

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
