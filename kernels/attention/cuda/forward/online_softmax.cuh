#pragma once

// A warp's rows in the forward pass: scores of the tile at hand, and the online softmax over tiles.
//
// Scores are in units of log2. The bias c_i - c_j enters in one of three ways, by how far the keys
// are from the queries:
//   away from the diagonal  (c_i - c_ref) + (c_ref - c_j), ref = the block's first query: the
//                           second term is added to the score, the first, a constant of the row,
//                           is deferred to the row's maximum. Both are at most zero, so each has
//                           its digits wherever the weight is not zero anyway;
//   near the diagonal       the same with ref = the warp's first row, from split floats;
//   on edge tiles           c_i - c_j pair by pair, from split floats, with the mask.

#include "kernels/attention/cuda/smem_tiles.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::attention {

/// One warp's rows: scores of the tile at hand, and outputs so far.
template <class Shape>
struct OnlineSoftmax {
  using T = typename Shape::T;
  static constexpr int kDim = Shape::kDim;
  static constexpr int kRowTiles = Shape::kRowTiles;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kPart = Shape::kPart;
  static constexpr int kStats = 2 * kRowTiles;  // rows of a lane: 8 apart

  float o[kRowTiles][kDim / 8][4] = {};
  float s[kRowTiles][kPart / 8][4];
  float row_max[kStats];  // of the scores, as of the last rescaling: the true one is at most 8
                          // above. The sum and o are relative to it
  float sum[kStats];
  float deferred_bias[kStats];  // what the scores of the tile at hand lack
  float row_offset[kStats];     // what is subtracted from them

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      row_max[i] = -INFINITY;
      sum[i] = 0;
    }
  }

  __device__ __forceinline__ void clear_outputs() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        o[i][j][0] = o[i][j][1] = o[i][j][2] = o[i][j][3] = 0;
      }
    }
  }

  /// Scores that start from their keys' bias, (c_ref - c_j) / scale: `gates` are of the lane's
  /// first two keys, twice. What is added up is then to be multiplied by the scale.
  __device__ __forceinline__ void begin_with_bias(const float* gates) {
    static_assert(kRowTiles == 1);
#pragma unroll
    for (int j = 0; j < kPart / 8; ++j) {
      const float4 x = *reinterpret_cast<const float4*>(gates + 16 * j);
      s[0][j][0] = x.x;
      s[0][j][1] = x.y;
      s[0][j][2] = x.z;
      s[0][j][3] = x.w;
    }
  }
  /// deferred_bias = c_i - c_ref. `rows`: of the lane's first row.
  __device__ __forceinline__ void defer_row_bias(const float* rows) {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      deferred_bias[i] = rows[8 * i];
    }
  }

  /// s = scale s + c_ref - c_j, and deferred_bias = c_i - c_ref. `gates`: of the lane's first two
  /// keys; `rows`: of its first row.
  __device__ __forceinline__ void add_bias(float scale, const float* gates, const float* rows) {
#pragma unroll
    for (int j = 0; j < kPart / 8; ++j) {
      add_key_bias(scale, j, *reinterpret_cast<const float2*>(gates + 8 * j));
    }
    defer_row_bias(rows);
  }

  /// Adds the bias relative to the warp's first row, whose own gates are `own`: for keys after the
  /// block's first query, but none after the warp's.
  __device__ __forceinline__ void add_bias_near_diagonal(float scale, const float* gates,
                                                         const float* rows, const float* own) {
    const float high = own[0], low = own[Shape::kRows];
#pragma unroll
    for (int j = 0; j < kPart / 8; ++j) {
      const float2 x = read_pair(gates + 8 * j), y = read_pair(gates + kKeys + 8 * j);
      add_key_bias(scale, j, {(x.x + high) + (y.x + low), (x.y + high) + (y.y + low)});
    }
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      deferred_bias[i] = (rows[8 * i] - high) + (rows[Shape::kRows + 8 * i] - low);
    }
  }

  /// s = scale s + c_i - c_j, or -infinity where the pair does not count; nothing is lacking.
  __device__ __forceinline__ void add_bias_and_mask(float scale, const float* gates,
                                                    const float* rows, PairMask mask, int position,
                                                    int key) {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      const float high = rows[8 * i], low = rows[Shape::kRows + 8 * i];
      const PairMask::Row row = mask.row(position + 8 * i, key);
      deferred_bias[i] = 0;
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
        const float2 x = read_pair(gates + 8 * j), y = read_pair(gates + kKeys + 8 * j);
        float* const pair = s[i / 2][j] + i % 2 * 2;
        const float first = fmaf(pair[0], scale, (high + x.x) + (low + y.x));
        const float second = fmaf(pair[1], scale, (high + x.y) + (low + y.y));
        pair[0] = row.sees(8 * j) ? first : -INFINITY;
        pair[1] = row.sees(8 * j + 1) ? second : -INFINITY;
      }
    }
  }

  /// The scores of keys behind a window's far end, of a tile whose keys are all before its queries,
  /// become -infinity. `position`: of the lane's first row; `key`: the lane's first.
  __device__ __forceinline__ void mask_far_end(int position, int window, int key) {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      const int oldest = position + 8 * i - window - key;
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[i / 2][j][i % 2 * 2 + e];
          x = 8 * j + e > oldest ? x : -INFINITY;
        }
      }
    }
  }

  /// Brings `row_max`, and with it the outputs so far, up to the tile's scores.
  __device__ __forceinline__ void update_row_max() {
    float factor[kStats];
    if (raise_row_max(factor)) {
      rescale(factor);
    }
  }

  /// Brings `row_max` and `sum` up to the tile's scores; the outputs are to be multiplied by
  /// `factor` where this returns true, for all lanes of the warp. While no row's largest score
  /// (log2) grows by more than 8, weights stay at most 2^8 and nothing is rescaled: every warp
  /// would do so for one of its rows at most tiles. Scores are `unit` times what s has.
  __device__ __forceinline__ bool raise_row_max(float (&factor)[kStats], float unit = 1.0f) {
    constexpr float kSlack = 8;
    float tile_max[kStats];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      float x[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
        x[0] = fmaxf(x[0], s[i / 2][j][i % 2 * 2]);
        x[1] = fmaxf(x[1], s[i / 2][j][i % 2 * 2 + 1]);
      }
      tile_max[i] = fmaf(quad_max(fmaxf(x[0], x[1])), unit, deferred_bias[i]);
      grows |= tile_max[i] > row_max[i] + kSlack;
    }
    grows = __any_sync(0xffffffffu, grows);
    if (grows) {
#pragma unroll
      for (int i = 0; i < kStats; ++i) {
        const float next = fmaxf(row_max[i], tile_max[i]);
        factor[i] = exp2_approx(row_max[i] - finite_or_zero(next));
        row_max[i] = next;
        sum[i] *= factor[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      row_offset[i] = finite_or_zero(row_max[i]) - deferred_bias[i];
    }
    return grows;
  }

  __device__ __forceinline__ void rescale(const float (&factor)[kStats]) {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        o[i / 2][j][i % 2 * 2] *= factor[i];
        o[i / 2][j][i % 2 * 2 + 1] *= factor[i];
      }
    }
  }

  /// o += P V with P = exp2(s - row_offset).
  __device__ __forceinline__ void accumulate_pv(const OperandReader<kDim>& tile) {
    constexpr int kChunks = kPart / 16, kPairs = kDim / 16;
    uint32_t b[2][4], a[kChunks][kRowTiles][4];
    tile.transposed(b[0], 0, 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      compute_p(chunk);
      pack_p(a[chunk], chunk);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int at = chunk * kPairs + pair;
        if (at + 1 < kChunks * kPairs) {
          tile.transposed(b[(at + 1) % 2], (at + 1) / kPairs * 16, (at + 1) % kPairs);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            mma<T>(o[i][2 * pair + half], a[chunk][i], b[at % 2][2 * half],
                   b[at % 2][2 * half + 1]);
          }
        }
      }
    }
  }

  /// s = P for a chunk of 16 keys, adding up rows.
  __device__ __forceinline__ void compute_p(int chunk) {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        float& x = s[i / 2][2 * chunk + at / 2][i % 2 * 2 + at % 2];
        x = exp2_approx(x - row_offset[i]);
        sum[i] += x;
      }
    }
  }

  /// A chunk of P as the operand A of products.
  __device__ __forceinline__ void pack_p(uint32_t (&a)[kRowTiles][4], int chunk) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float (&x)[4] = s[i][2 * chunk + half];
        a[i][2 * half] = pack_pair<T>(x[0], x[1]);
        a[i][2 * half + 1] = pack_pair<T>(x[2], x[3]);
      }
    }
  }

  /// s = P = exp2(unit s - row_offset), adding up rows: of a row in two sums, whose additions do
  /// not wait for each other.
  __device__ __forceinline__ void compute_p(float unit) {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      float sums[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[i / 2][j][i % 2 * 2 + e];
          x = exp2_approx(fmaf(x, unit, -row_offset[i]));
          sums[e] += x;
        }
      }
      sum[i] += sums[0] + sums[1];
    }
  }
  __device__ __forceinline__ void pack_p(uint32_t (&a)[kPart / 16][kRowTiles][4]) const {
#pragma unroll
    for (int chunk = 0; chunk < kPart / 16; ++chunk) {
      pack_p(a[chunk], chunk);
    }
  }

  /// Adds the infinite and NaN elements of a tile of values, laid out as Tile has it, to the rows
  /// that see them.
  template <class Tile = Tile16Bit<kDim>>
  __device__ __forceinline__ void add_non_finite(const unsigned char* tile, PairMask mask,
                                                 int position, int key, int lane) {
    for (int row = 0; row < kPart; ++row) {
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const auto pair =
            *reinterpret_cast<const Pack<T, 2>*>(tile + Tile::offset(row, j) + lane % 4 * 4);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = pair.get(e);
          if (fabsf(x) < INFINITY) {
            continue;
          }
#pragma unroll
          for (int i = 0; i < kStats; ++i) {
            if (mask.sees(position + 8 * i, key + row)) {
              o[i / 2][j][i % 2 * 2 + e] += x;
            }
          }
        }
      }
    }
  }

  /// Adds up what the four lanes of a row have, and divides. Afterwards `sum` is lse in log2.
  __device__ __forceinline__ void normalize() {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      sum[i] = quad_sum(sum[i]);
      const float factor = sum[i] == 0.0f ? 0.0f : 1.0f / sum[i];
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        o[i / 2][j][i % 2 * 2] *= factor;
        o[i / 2][j][i % 2 * 2 + 1] *= factor;
      }
      sum[i] = sum[i] == 0.0f ? -INFINITY : row_max[i] + log2f(sum[i]);
    }
  }

  /// Writes the outputs over the warp's queries in shared memory.
  __device__ __forceinline__ void store_smem(unsigned char* rows, int lane) const {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        *reinterpret_cast<uint32_t*>(rows + Tile16Bit<kDim>::offset(8 * i + lane / 4, j) +
                                     lane % 4 * 4) =
            pack_pair<T>(o[i / 2][j][i % 2 * 2], o[i / 2][j][i % 2 * 2 + 1]);
      }
    }
  }

 private:
  __device__ __forceinline__ void add_key_bias(float scale, int j, float2 gate) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      s[i][j][0] = fmaf(s[i][j][0], scale, gate.x);
      s[i][j][1] = fmaf(s[i][j][1], scale, gate.y);
      s[i][j][2] = fmaf(s[i][j][2], scale, gate.x);
      s[i][j][3] = fmaf(s[i][j][3], scale, gate.y);
    }
  }

  static __device__ float finite_or_zero(float x) { return x == -INFINITY ? 0.0f : x; }
};

/// Returns bits that are not zero where 16 bytes hold an infinity or a NaN.
template <class T>
__device__ inline uint32_t non_finite_bits(const unsigned char* piece) {
  constexpr uint32_t kExponents = std::is_same_v<T, __half> ? 0x7c007c00u : 0x7f807f80u;
  constexpr uint32_t kOne = std::is_same_v<T, __half> ? 0x04000400u : 0x00800080u;
  const uint4 x = *reinterpret_cast<const uint4*>(piece);
  // An exponent of ones carries into the sign.
  return (((x.x & kExponents) + kOne) | ((x.y & kExponents) + kOne) | ((x.z & kExponents) + kOne) |
          ((x.w & kExponents) + kOne)) &
         0x80008000u;
}

/// Whether a thread's share of a tile holds an infinity or a NaN.
template <class T, int kThreads>
__device__ inline bool has_non_finite(const unsigned char* tile, int bytes, int thread) {
  uint32_t found = 0;
  for (int at = thread * 16; at < bytes; at += kThreads * 16) {
    found |= non_finite_bits<T>(tile + at);
  }
  return found != 0;
}

template <class T, int kThreads>
__device__ inline void zero_non_finite(unsigned char* tile, int bytes, int thread) {
  constexpr unsigned kExponent = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  for (int at = thread * 2; at < bytes; at += kThreads * 2) {
    auto* const x = reinterpret_cast<unsigned short*>(tile + at);
    if ((*x & kExponent) == kExponent) {
      *x = 0;
    }
  }
}

}  // namespace tidegate::kernels::attention
