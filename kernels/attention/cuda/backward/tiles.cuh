#pragma once

// What a tile of the backward pass is made of: scores in registers, from Q K^T to P and from dO V^T
// to dS, as both kernels work on them; then the key-gradient kernel's shared memory and
// accumulators, which tiles a block of it works on, and how they get into shared memory.

#include <cmath>

#include "kernels/attention/cuda/pruning.cuh"
#include "kernels/attention/cuda/smem_tiles.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"

namespace tidegate::kernels::attention {

// ---- Scores, of both kernels ----

/// A row's c, lse and delta - dlse in device memory.
struct RawRowStats {
  double gate;
  float lse, delta_minus_dlse;
};

/// What the scores of a row need, kRows apart: c_i - c_ref, its high and low parts; lse, in log2;
/// dlse - delta. A row that is not there, or has no keys, gets P = 0.
template <int kRows>
__device__ inline void write_row_stats(float* to, const RawRowStats& row, double reference) {
  const SplitGate gate = SplitGate::of(row.gate - reference);
  to[0] = gate.high;
  to[kRows] = gate.low;
  to[2 * kRows] = row.lse == -INFINITY ? INFINITY : row.lse * kLog2E;
  to[3 * kRows] = -row.delta_minus_dlse;
}

/// s = log2 of P, from Q K^T. `gates`: of the lane's first two keys; `rows`: of its first row, see
/// write_row_stats.
template <int kRows, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void compute_log2_p(float (&s)[kRowTiles][kColumnTiles][4], float scale,
                                               const float* gates, const float* rows) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * i + 8 * half;
      const float row_offset = rows[2 * kRows + row] - rows[row];
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const float2 gate = *reinterpret_cast<const float2*>(gates + 8 * j);
        s[i][j][2 * half] = fmaf(s[i][j][2 * half], scale, gate.x) - row_offset;
        s[i][j][2 * half + 1] = fmaf(s[i][j][2 * half + 1], scale, gate.y) - row_offset;
      }
    }
  }
}

/// s = log2 of P, from Q K^T, with what it needs in registers: `gates`, c_ref - c_j of pairs of
/// keys, and `row_offsets`, lse - c_i of rows.
template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void compute_log2_p(float (&s)[kRowTiles][kColumnTiles][4], float scale,
                                               const float2 (&gates)[kColumnTiles],
                                               const float (&row_offsets)[2 * kRowTiles]) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      float* const pair = s[i / 2][j] + i % 2 * 2;
      pair[0] = fmaf(pair[0], scale, gates[j].x) - row_offsets[i];
      pair[1] = fmaf(pair[1], scale, gates[j].y) - row_offsets[i];
    }
  }
}

/// s = log2 of P, from Q K^T, on edge tiles of kKeys keys: gates are added pair by pair, and a pair
/// that does not count gets -infinity.
template <int kRows, int kKeys, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void compute_log2_p(float (&s)[kRowTiles][kColumnTiles][4], float scale,
                                               const float* gates, const float* rows, PairMask mask,
                                               int position, int key) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const float high = rows[8 * i], low = rows[kRows + 8 * i], row_offset = rows[2 * kRows + 8 * i];
    const PairMask::Row row = mask.row(position + 8 * i, key);
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const float2 x = read_pair(gates + 8 * j), y = read_pair(gates + kKeys + 8 * j);
      float* const pair = s[i / 2][j] + i % 2 * 2;
      const float first = fmaf(pair[0], scale, (high + x.x) + (low + y.x)) - row_offset;
      const float second = fmaf(pair[1], scale, (high + x.y) + (low + y.y)) - row_offset;
      pair[0] = row.sees(8 * j) ? first : -INFINITY;
      pair[1] = row.sees(8 * j + 1) ? second : -INFINITY;
    }
  }
}

/// s = P; dp = dO V^T - delta + dlse meanwhile. `rows`: of the lane's first row, see
/// write_row_stats.
template <class T, int kRows, int kSteps, int kRowTiles, int kColumnTiles, class TileA, class TileB>
__device__ __forceinline__ void compute_p_and_dp(float (&s)[kRowTiles][kColumnTiles][4],
                                                 float (&dp)[kRowTiles][kColumnTiles][4],
                                                 const float* rows, const TileA& d_o,
                                                 const TileB& values) {
  constexpr int kScores = kRowTiles * kColumnTiles * 4;
  const auto exponentials = [&](int step) {
#pragma unroll
    for (int at = 0; at < kScores; ++at) {
      if (at >= step * kScores / kSteps && at < (step + 1) * kScores / kSteps) {
        float& x = s[at / 4 / kColumnTiles][at / 4 % kColumnTiles][at % 4];
        x = exp2_approx(x);
      }
    }
  };
  FromRows<2 * kRowTiles> start;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    start.x[i] = rows[3 * kRows + 8 * i];
  }
  multiply<T, false, false, kSteps, true>(dp, d_o, values, exponentials, start);
}

/// Sums over the four lanes of a row. A lane has a part of the sums of rows lane / 4 + 8 i, i <
/// kRows, and gets one of the four or two whole: lanes exchange what the other keeps.
template <int kRows>
struct QuadSum {
  static_assert(kRows == 2 || kRows == 4);

  /// Which row's, and whether this lane is the one to store it: of two rows, two lanes have each.
  static __device__ int row(int lane) {
    return lane / 4 + 8 * (kRows == 2 ? lane % 2 : lane % 2 * 2 + lane / 2 % 2);
  }
  static __device__ bool is_first(int lane) { return kRows == 4 || lane % 4 < 2; }

  static __device__ __forceinline__ float of(const float (&parts)[kRows], int lane) {
    float pair[kRows / 2];
    exchange(pair, parts, lane % 2 != 0, 1);
    if constexpr (kRows == 2) {
      return pair[0] + __shfl_xor_sync(0xffffffffu, pair[0], 2);
    } else {
      float sum[1];
      exchange(sum, pair, lane % 4 >= 2, 2);
      return sum[0];
    }
  }

 private:
  template <int kHalf>
  static __device__ __forceinline__ void exchange(float (&half)[kHalf],
                                                  const float (&all)[2 * kHalf], bool upper,
                                                  int mask) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float kept = upper ? all[i + kHalf] : all[i];
      half[i] = kept + __shfl_xor_sync(0xffffffffu, upper ? all[i] : all[i + kHalf], mask);
    }
  }
};

// ---- Tiles of the key-gradient kernel ----

template <class Shape>
struct BackwardShared {
  unsigned char* keys;
  unsigned char* values;
  unsigned char* queries;  // [kStages]
  unsigned char* d_o;      // [kStages]
  unsigned char* p;
  unsigned char* ds;
  float* key_gates;  // [2][kKeys]: c_ref - c_j, high and low parts
  float* row_stats;  // [2][kRowStats][kRows]
  float* dq;         // [kRows][kDim], where there is room: see BackwardShape::shared_bytes

  __device__ explicit BackwardShared(unsigned char* shared)
      : keys(shared),
        values(keys + Shape::kKeyBytes),
        queries(values + Shape::kKeyBytes),
        d_o(queries + Shape::kStages * Shape::kRowBytes),
        p(d_o + Shape::kStages * Shape::kRowBytes),
        ds(p + Shape::kScoreBytes),
        key_gates(reinterpret_cast<float*>(ds + Shape::kScoreBytes)),
        row_stats(key_gates + 2 * Shape::kKeys),
        dq(row_stats + 2 * Shape::kRowStats * Shape::kRows) {}
};

/// What a warp keeps in registers: dk and dv for all tiles, S and dP for the tile at hand.
template <class Shape>
struct KeyGradientAccumulators {
  using T = typename Shape::T;
  using Scores = typename Shape::Scores;
  using KeyGradPart = typename Shape::KeyGradPart;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kRowTiles = Scores::kRowTiles, kColumnTiles = Scores::kColumnTiles;

  float dk[KeyGradPart::kRowTiles][KeyGradPart::kColumnTiles][4] = {};
  float dv[KeyGradPart::kRowTiles][KeyGradPart::kColumnTiles][4] = {};
  float s[kRowTiles][kColumnTiles][4];
  float dp[kRowTiles][kColumnTiles][4];
  float column_sums_reversed[2 * kColumnTiles];

  /// The sum over queries of column 8 j + e of the lane's columns. They lie in reverse: ptxas
  /// orders instructions by where values live, and in this order the products of dv wait less (2 %
  /// of the backward pass at a head dimension of 128).
  __device__ __forceinline__ float& column_sum(int j, int e) {
    return column_sums_reversed[2 * kColumnTiles - 1 - 2 * j - e];
  }

  /// dp = dS, adding up its columns here, and its rows, of the lane's columns, in `sums`.
  __device__ __forceinline__ void compute_ds(float (&sums)[2 * kRowTiles]) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      sums[i] = 0;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = dp[i / 2][j][i % 2 * 2 + e];
          x *= s[i / 2][j][i % 2 * 2 + e];
          sums[i] += x;
          column_sum(j, e) += x;
        }
      }
    }
  }

  /// Writes scores as 16-bit elements.
  static __device__ __forceinline__ void store_smem(const float (&x)[kRowTiles][kColumnTiles][4],
                                                    unsigned char* tile, int row, int column,
                                                    int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        unsigned char* const to =
            tile + Tile16Bit<kKeys>::offset(row + 16 * i + lane / 4, column / 8 + j) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(x[i][j][0], x[i][j][1]);
        *reinterpret_cast<uint32_t*>(to + 8 * Tile16Bit<kKeys>::kRowBytes) =
            pack_pair<T>(x[i][j][2], x[i][j][3]);
      }
    }
  }
};

/// The block's keys, and what all of its query heads have in common.
template <class Shape>
struct KeyTile {
  const TensorAttention& w;
  const ForgettingAttentionParams& p;
  const TileAndHead& place;
  const Sequence& keys;
  Sequence queries;
  int key_head, first_key, last_key;
  int shift;  // from a query to its position
  int group;  // query heads that share the keys
  int warp;
  int pieces;  // of 16 bytes, of a row
  PairMask mask;
  float scale;

  __device__ __forceinline__ KeyTile(const TensorAttention& work, const TileAndHead& at)
      : w(work),
        p(work.params.forward),
        place(at),
        keys(at.tile.sequence),
        queries(find_sequence(p.layout, keys.index)),
        key_head(at.head),
        first_key(at.tile.first),
        last_key(first_key + at.tile.tokens - 1),
        shift(keys.length - queries.length),
        group(static_cast<int>(p.heads / p.key_heads)),
        warp(static_cast<int>(threadIdx.x) / 32),
        pieces(static_cast<int>(p.head_dim / 8)),
        mask{static_cast<int>(p.window)},
        scale(static_cast<float>(p.scale) * kLog2E) {}

  __device__ __forceinline__ void load_keys_and_values(const BackwardShared<Shape>& shared) const {
    const int thread = fresh_thread_index();
    load_rows(p.k, shared.keys, thread);
    load_rows(p.v, shared.values, thread);
    commit_copies();
  }

 private:
  __device__ __forceinline__ void load_rows(const HeadSeries& t, unsigned char* to,
                                            int thread) const {
    load_tile<Shape::kDim, Shape::kKeys, Shape::kThreads>(
        shared_address(to), row_address<2>(t, keys, key_head, first_key), row_stride<2>(t),
        place.tile.tokens, pieces, thread);
  }
};

/// One query head's tiles of queries: which of them see the block's keys, and how a stage of them
/// and of their row statistics gets into shared memory.
template <class Shape>
struct QueryTiles {
  static constexpr int kDim = Shape::kDim, kRows = Shape::kRows, kKeys = Shape::kKeys;
  static constexpr int kThreads = Shape::kThreads;

  const KeyTile<Shape>& at;
  const BackwardShared<Shape>& shared;
  int head;
  GateSums gates;
  double reference;
  int begin, end;  // see QueryTileRange

  __device__ __forceinline__ QueryTiles(const KeyTile<Shape>& block,
                                        const BackwardShared<Shape>& shared, int head)
      : at(block), shared(shared), head(head), gates(block.w, block.keys, head) {
    reference = gates.at(at.last_key);
    const auto range = QueryTileRange::of<kRows>(at.first_key, at.last_key, at.shift,
                                                 at.queries.length, at.mask.window);
    begin = range.begin;
    end = range.end;
  }

  /// Where pruning leaves the keys fewer queries, the tiles end earlier.
  __device__ __forceinline__ void apply_key_extents() {
    if (at.p.prune > 0) {
      static_assert(kKeys % KeyExtents::kKeys == 0);
      const KeyExtents& extents = at.w.extents;
      const int64_t tile_index = first_tile_index(extents.keys, static_cast<int>(at.keys.index)) +
                                 at.last_key / KeyExtents::kKeys;
      end = min(end, (extents.ends[tile_index * at.p.heads + head] + kRows - 1) / kRows);
    }
  }

  __device__ __forceinline__ void load_stage(int tile, int stage) const {
    load_rows(at.p.q, shared_address(shared.queries) + stage % Shape::kStages * Shape::kRowBytes,
              tile);
    load_rows(at.w.params.d_o,
              shared_address(shared.d_o) + stage % Shape::kStages * Shape::kRowBytes, tile);
  }

  /// What a row needs is read one tile ahead and worked out later, so that nothing waits for it.
  /// All threads do so, those of a row write a part each: a branch for some would hold up the
  /// others.
  __device__ __forceinline__ RawRowStats read_row_stats(int tile) const {
    const int row = tile * kRows + fresh_thread_index() % kRows;
    const bool exists = row < at.queries.length;
    const int64_t offset = (at.queries.batch * at.p.heads + head) * at.p.layout.time +
                           at.queries.start + (exists ? row : 0);
    RawRowStats read = {gates.at(row + at.shift), -INFINITY, 0};
    if (exists) {
      read.lse = static_cast<const float*>(at.p.lse)[offset];
      read.delta_minus_dlse = at.w.delta_minus_dlse[offset];
    }
    return read;
  }
  __device__ __forceinline__ void store_row_stats(const RawRowStats& row, int stage) const {
    constexpr int kStats = Shape::kRowStats, kShares = kThreads / kRows;
    const int thread = fresh_thread_index(), share = thread / kRows;
    float stats[kStats];
    write_row_stats<1>(stats, row, reference);
    float* const to = shared.row_stats + stage * kStats * kRows + thread % kRows;
#pragma unroll
    for (int first = 0; first < kStats; first += kShares) {
      float x = stats[first];
#pragma unroll
      for (int i = 1; i < kShares && first + i < kStats; ++i) {
        x = share == i ? stats[first + i] : x;
      }
      if (kShares <= kStats || share < kStats) {
        to[(first + share) * kRows] = x;
      }
    }
  }

  struct KeyGate {
    int key;
    double c;
  };
  __device__ __forceinline__ KeyGate read_key_gate() const {
    const int key = min(fresh_thread_index(), kKeys - 1);
    return {key, gates.at(at.first_key + key)};
  }
  __device__ __forceinline__ void store_key_gate(const KeyGate& read) const {
    if (fresh_thread_index() < kKeys) {
      const SplitGate gate = SplitGate::of(reference - read.c);
      shared.key_gates[read.key] = gate.high;
      shared.key_gates[kKeys + read.key] = gate.low;
    }
  }

 private:
  __device__ __forceinline__ void load_rows(const HeadSeries& t, unsigned to, int tile) const {
    const int row = tile * kRows;
    load_tile<kDim, kRows, kThreads>(to, row_address<2>(t, at.queries, head, row), row_stride<2>(t),
                                     at.queries.length - row, at.pieces, fresh_thread_index());
  }
};

}  // namespace tidegate::kernels::attention
