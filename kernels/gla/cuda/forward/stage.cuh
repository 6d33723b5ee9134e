#pragma once

// How the forward pass on tensor cores divides its work, and the ring of stages in shared memory
// through which that goes: tiles with their reasons, what a launch tells its kernel, the workspace;
// the layout of a stage.

#include <algorithm>
#include <type_traits>

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/dyadic.cuh"
#include "kernels/gla/cuda/head_inputs.cuh"
#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

// ---- The schedule ----
//
// The plan (gla_cuda.cu) and the kernel (tensor_forward.cuh) read everything from here.

// The tiles of a block of threads, which has one head of one segment.
//
//   time    16 tokens, a sub-chunk: the depth of one mma, four dyadic levels (dyadic.cuh).
//   keys    64 where K <= 64: half of the state's registers and two thirds of a stage's bytes.
//           128 above: a consumer's state is 64 fp32 registers a lane, which is what 128 registers
//           a thread leave room for. K up to 256 takes two launches with fp32 sums between them.
//   values  V / ceil(V / 128) columns, rounded up to 16: one consumer warp per 16 columns.
//           Eight consumers leave eight warps to load and to make operands.
//   warps   up to 16 of 128 registers a thread: the consumers, one loader, and as many producers as
//           find a stage to work on.
//   stages  up to 16, as many as shared memory holds: 16 of 13.25 KB (keys 128, 16-bit logits) in
//           227 KB, 7 in the 99 KB of smaller chips.
constexpr int kNarrowKeyTile = 64, kKeyTile = 128;
constexpr int kValueTile = 128;
constexpr int kConsumerColumns = 16;
constexpr int kMaxWarps = 16;
constexpr int kMaxStages = 16;

/// A segment that others of its sequence follow has a multiple of so many tokens: sub-chunks, and
/// steps of segment_maps.cuh, are whole.
constexpr int kSegmentStep = 32;
static_assert(kSegmentStep % kSubChunk == 0);
/// Segments shorter than this have more of a start and an end than of a middle.
constexpr int64_t kShortestSegment = 256;
/// What a pass over the maps of segments costs beside the pass over the outputs.
constexpr double kMapCost = 0.5;

inline int64_t value_tiles(const GlaParams& p) { return ceil_div(p.value_dim, kValueTile); }

/// Columns of V a block of threads: as equal as multiples of 16 can be.
inline int value_tile(const GlaParams& p) {
  return static_cast<int>(ceil_div(p.value_dim, value_tiles(p) * kConsumerColumns) *
                          kConsumerColumns);
}

/// The ring of stages in shared memory, and the warps that fill it.
struct ForwardRing {
  int stages, producers;

  ForwardRing(int stage_bytes, int consumers, int shared_bytes) {
    constexpr int kStaticBytes = 1 << 10;  // barriers and bounds
    stages = std::min(kMaxStages, (shared_bytes - kStaticBytes) / stage_bytes);
    // Some stages are being loaded and one is consumed while every producer holds one.
    producers = std::clamp(stages - 3, 1, kMaxWarps - 1 - consumers);
  }
};

/// Tokens of a segment, or 0 where whole sequences keep the chip busy.
inline int64_t choose_forward_segment(const GlaParams& p, int multiprocessors) {
  const int64_t blocks = p.heads * value_tiles(p);  // of one segment
  const auto rounded = [](int64_t time) { return ceil_div(time, kSegmentStep) * kSegmentStep; };
  if (p.layout.offsets != nullptr) {
    // Lengths are not known here: enough segments of equal length, unless there are many sequences.
    const int64_t time = std::max(
        kShortestSegment, rounded(ceil_div(p.layout.time * blocks, int64_t{multiprocessors})));
    return p.layout.sequences * blocks >= 2 * multiprocessors || p.layout.time <= time ? 0 : time;
  }
  int64_t best = 1;
  double least = 0;
  for (int64_t parts = 1; parts == 1 || p.layout.time / parts >= kShortestSegment; ++parts) {
    const int64_t waves = ceil_div(p.layout.sequences * blocks * parts, multiprocessors);
    // Passes of 1 / parts of the time each, and a little for every one of them.
    const double cost = (parts == 1 ? 1.0 : 1.0 + kMapCost) * static_cast<double>(waves) /
                            static_cast<double>(parts) +
                        0.002 * static_cast<double>(parts);
    if (parts == 1 || cost < least) {
      best = parts;
      least = cost;
    }
  }
  return best == 1 ? 0 : rounded(ceil_div(p.layout.time, best));
}

/// The tensors whose rows the loader copies.
enum ForwardRow : int { kForwardQ = 0, kForwardK, kForwardV, kForwardGate, kForwardRows };

/// What a launch tells its kernel.
struct TensorForward {
  GlaParams params = {};
  int first_key = 0, keys = 0;  // the key tile
  int value_tile = 0;           // columns of V a block, a multiple of 16
  int producers = 0, stages = 0;
  // Whether all rows of q, k, v and the gate are whole pieces of 16 bytes, aligned to as many.
  bool whole_pieces[kForwardRows] = {};
  int output_bytes = 0;     // what a lane stores of o at once: 8, 4 or 2
  TimeTiles segments = {};  // a segment is a whole sequence where time is not divided
  // Where time is divided into segments: [segment index, H, K, V] and [segment index, H, K]. First
  // the map of each segment (the state it makes of zero, and the product of its decays), then in
  // the place of the former the state after it.
  float* states = nullptr;
  float* products = nullptr;
  // K above 128: the sum of o over the key tiles before this one, and up to it. [B, T, H, V].
  const float* sum_before = nullptr;
  float* sum_after = nullptr;

  bool is_partial() const { return sum_before != nullptr || sum_after != nullptr; }
};

/// The parts of the workspace, in their order, in bytes.
struct ForwardWorkspace {
  int64_t states, products, sums;

  ForwardWorkspace(const GlaParams& p, int64_t segments)
      : states(segments * p.heads * p.key_dim * p.value_dim * int64_t{sizeof(float)}),
        products(segments * p.heads * p.key_dim * int64_t{sizeof(float)}),
        sums(p.key_dim <= kKeyTile ? 0
                                   : p.layout.batch * p.layout.time * p.heads * p.value_dim *
                                         int64_t{sizeof(float)}) {}

  int64_t bytes() const { return states + products + sums; }
  float* states_in(void* workspace) const { return at(workspace, 0); }
  float* products_in(void* workspace) const { return at(workspace, states); }
  float* sums_in(void* workspace) const { return at(workspace, states + products); }

 private:
  static float* at(void* workspace, int64_t offset) {
    return reinterpret_cast<float*>(static_cast<char*>(workspace) + offset);
  }
};

/// The part of a launch's work that one block of threads has.
struct WorkTile {
  TimeTile segment;
  int64_t head;
  int first_key, keys;      // channels of K: 128 at most
  int first_value, values;  // columns of V: 128 at most; the last tile's are what is left
};

__device__ inline WorkTile find_work_tile(const TensorForward& w) {
  const GlaParams& p = w.params;
  const int tiles = static_cast<int>((p.value_dim + w.value_tile - 1) / w.value_tile);
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int64_t pair = blockIdx.x / tiles;
  const int first = tile * w.value_tile;
  return {find_time_tile(w.segments, static_cast<int>(pair / p.heads)),
          pair % p.heads,
          w.first_key,
          w.keys,
          first,
          min(w.value_tile, static_cast<int>(p.value_dim) - first)};
}

/// The segment index of the block of threads.
__device__ inline int64_t find_segment_index(const TensorForward& w) {
  const GlaParams& p = w.params;
  return blockIdx.x / ((p.value_dim + w.value_tile - 1) / w.value_tile) / p.heads;
}

/// Where the state of a work tile's keys and values begins in row `row` of a tensor [.., H, K, V].
__device__ inline int64_t state_offset(const GlaParams& p, const WorkTile& work, int64_t row) {
  return ((row * p.heads + work.head) * p.key_dim + work.first_key) * p.value_dim +
         work.first_value;
}

// ---- A stage ----
//
// A stage of the forward pass's ring: a sub-chunk of 16 tokens in shared memory, on its way from
// the loader by a producer to the consumers. It is rewritten in place: where q, k (or the logits)
// and v arrive, the producer leaves what the consumers multiply, every lane in the very 16-byte
// pieces that it has read.

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
