#pragma once

// A math warpgroup of the Hopper backward kernel: what it keeps in registers, and the phases of a
// tile. See backward.cuh for which of them follows which, and who is waited for.

#include "kernels/attention/cuda/backward/query_gradients.cuh"
#include "kernels/attention/cuda/hopper/backward_tiles.cuh"
#include "kernels/common/cuda/gates.cuh"

namespace tidegate::kernels::attention {

/// The dk and dv of a warpgroup's keys, a part's S and dP, and the phases that work on them.
template <class Shape>
struct HopperKeyGradients {
  using T = typename Shape::T;
  using KeyPanels = typename Shape::KeyPanels;
  using RowPanels = typename Shape::RowPanels;
  using Shared = HopperBackwardShared<Shape>;
  using KeyTile = HopperKeyTile<Shape>;
  static constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kPart = Shape::kPart;
  using Stats = HopperRowStats<Shape::kRows>;
  using DimProduct = hopper::Product<T, kDim>;
  using PartProduct = hopper::Product<T, kPart>;
  using Scores = float[kPart / 8][4];            // of the part's queries
  using ScoreOperand = uint32_t[kPart / 16][4];  // in 16 bits, a left operand

  // The math warpgroup, which has keys 64 group and on of the tile (0 for both warpgroups where the
  // tile has 64 keys); the warp within it.
  int group, warp, lane;
  float scale;
  float dk[kDim / 8][4], dv[kDim / 8][4];
  Scores s, dp;
  float key_high[2], key_low[2];  // c_ref - c_j of the lane's keys
  float key_sums[2];              // of dS
  float row_sums[kPart / 4];      // of dS over the lane's two keys

  __device__ __forceinline__ HopperKeyGradients(const ForgettingAttentionParams& p, int thread)
      : group(kKeys == 64 ? 0  // otherwise known to be the same for a warp
                          : __shfl_sync(0xffffffffu, thread / 128 - 1, 0)),
        warp(thread % 128 / 32),
        lane(thread % 32),
        scale(static_cast<float>(p.scale) * kLog2E) {
    clear();
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dk[j][e] = dv[j][e] = 0;
      }
    }
  }
  /// The first of the lane's keys, the other one is 8 behind it.
  __device__ __forceinline__ int key() const { return 64 * group + 16 * warp + lane / 4; }

  __device__ __forceinline__ void start_head(const KeyTile& at, int head) {
    const GateSums gates(at.w, at.keys, head);
    const double reference = gates.at(at.last_key());
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SplitGate gate = SplitGate::of(reference - gates.at(at.first_key + key() + 8 * i));
      key_high[i] = gate.high;
      key_low[i] = gate.low;
      key_sums[i] = 0;
    }
  }

  /// d += keys rows^T: S^T of K and Q, dP^T of V and dO. `rows` are the part's, here and below.
  __device__ __forceinline__ void multiply_scores(Scores& d, const unsigned char* keys,
                                                  const unsigned char* rows) {
    using hopper::Operand;
    const Operand a = Operand::rows_inner(shared_address(keys) + group * (64 * 128));
    const Operand b = Operand::rows_inner(shared_address(rows));
    hopper::fence_products();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      PartProduct::shared(d, a.advance(step / 4 * KeyPanels::kPanelBytes + step % 4 * 32),
                          b.advance(step / 4 * RowPanels::kPanelBytes + step % 4 * 32), true);
    }
    hopper::commit_products();
  }

  /// What S^T or dP^T start from, which is the same for all keys: two columns in four elements.
  __device__ __forceinline__ void start(Scores& d, const float* from) const {
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(from + 8 * n + lane % 4 * 2);
      d[n][0] = d[n][2] = x.x;
      d[n][1] = d[n][3] = x.y;
    }
  }

  /// s = P, from S^T. `first`: the part's first query in the tile; `row`: its position less that of
  /// the block's first key.
  __device__ __forceinline__ void compute_p(const Stats& stats, int first, bool is_edge,
                                            PairMask mask, int row) {
    compute_exponents(stats, first, is_edge, mask, row);
    exponentiate();
  }
  __device__ __forceinline__ void compute_exponents(const Stats& stats, int first, bool is_edge,
                                                    PairMask mask, int row) {
    if (!is_edge) {
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[n][e] = fmaf(s[n][e], scale, key_high[e / 2]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n) {
        const int column = first + 8 * n + lane % 4 * 2;
        const float2 high = read_pair(stats.gate_high + column);
        const float2 low = read_pair(stats.gate_low + column);
        const float2 lse = read_pair(stats.lse + column);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float gate = (key_high[e / 2] + (e % 2 == 0 ? high.x : high.y)) +
                             (key_low[e / 2] + (e % 2 == 0 ? low.x : low.y));
          const float x = fmaf(s[n][e], scale, gate) - (e % 2 == 0 ? lse.x : lse.y);
          const bool sees = mask.sees(row + 8 * n + lane % 4 * 2 + e % 2, key() + e / 2 * 8);
          s[n][e] = sees ? x : -INFINITY;
        }
      }
    }
  }
  __device__ __forceinline__ void exponentiate() {
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = exp2_approx(s[n][e]);
      }
    }
  }

  /// dp = dS, with its sums.
  __device__ __forceinline__ void compute_ds() {
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dp[n][e] *= s[n][e];
        key_sums[e / 2] += dp[n][e];
      }
      row_sums[2 * n] = dp[n][0] + dp[n][2];
      row_sums[2 * n + 1] = dp[n][1] + dp[n][3];
    }
  }

  /// P^T or dS^T as the left operand of a product.
  static __device__ __forceinline__ void pack(ScoreOperand& operand, const Scores& x) {
#pragma unroll
    for (int step = 0; step < kPart / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        operand[step][2 * half] = pack_pair<T>(x[2 * step + half][0], x[2 * step + half][1]);
        operand[step][2 * half + 1] = pack_pair<T>(x[2 * step + half][2], x[2 * step + half][3]);
      }
    }
  }

  /// Writes dS, rows of queries.
  __device__ __forceinline__ void store_ds(unsigned char* ds, const ScoreOperand& operand) const {
    const int row = lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
    const unsigned to = shared_address(ds) + group * RowPanels::kPanelBytes +
                        row * hopper::kPanelRowBytes + ((piece ^ lane % 8) << 4);
#pragma unroll
    for (int step = 0; step < kPart / 16; ++step) {
      hopper::store_matrices_transposed(to + step * 16 * hopper::kPanelRowBytes, operand[step]);
    }
  }

  /// gradient += operand rows: dv of P^T and dO, dk of dS^T and Q.
  __device__ __forceinline__ void accumulate(float (&gradient)[kDim / 8][4],
                                             const ScoreOperand& operand,
                                             const unsigned char* rows) {
    const auto b = hopper::Operand::inner_rows(shared_address(rows), RowPanels::kPanelBytes);
    hopper::fence_products();
#pragma unroll
    for (int step = 0; step < kPart / 16; ++step) {
      DimProduct::template registers<true>(gradient, operand[step], b.advance(step * 2048));
    }
    hopper::commit_products();
  }

  /// dq = dS K of the tile, 64 rows and columns of it, in the place of dp.
  __device__ __forceinline__ void multiply_dq(const unsigned char* ds, const unsigned char* keys) {
    multiply_dq_columns(
        dp, shared_address(ds) + (Shape::kDqByRows ? group * (64 * 128) : 0),
        shared_address(keys) + (Shape::kDqByRows ? 0 : group * KeyPanels::kPanelBytes));
  }
  /// dq = dS K of 64 rows and 8 kColumns columns, those from a panel of the keys on; `ds` and
  /// `keys` are addresses in shared memory.
  template <int kColumns>
  static __device__ __forceinline__ void multiply_dq_columns(float (&dq)[kColumns][4], unsigned ds,
                                                             unsigned keys) {
    using hopper::Operand;
    const Operand a = Operand::rows_inner(ds);
    const Operand b = Operand::inner_rows(keys, KeyPanels::kPanelBytes);
    hopper::fence_products();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      hopper::Product<T, 8 * kColumns>::template shared<true>(
          dq, a.advance(step / 4 * RowPanels::kPanelBytes + step % 4 * 32), b.advance(step * 2048),
          step > 0);
    }
    hopper::commit_products();
  }

  /// Stores the sums of dS over the warp's keys, one for each of the part's queries.
  __device__ __forceinline__ void store_row_sums(float* to) {
    // The eight lanes of a column halve their columns three times, each passing on what the other
    // keeps: a lane ends with two neighbours.
#pragma unroll
    for (int mask = 16, count = 8; mask >= 4; mask /= 2, count /= 2) {
      const bool upper = (lane & mask) != 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) {
          float (&x)[kPart / 4] = row_sums;
          const float kept = upper ? x[i + count] : x[i], sent = upper ? x[i] : x[i + count];
          x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, mask);
        }
      }
    }
    *reinterpret_cast<float2*>(to + 2 * lane) = make_float2(row_sums[0], row_sums[1]);
  }

  /// Stores the warpgroup's half of dq in the order in which the warps hold it (convert_dq_kernel
  /// puts it in rows).
  __device__ __forceinline__ void store_dq(float* to) const {
#pragma unroll
    for (int j = 0; j < kPart / 8; ++j) {
      *reinterpret_cast<float4*>(to + ((4 * group + warp) * 8 + j) * 128 + 4 * lane) =
          make_float4(dp[j][0], dp[j][1], dp[j][2], dp[j][3]);
    }
  }
  /// Stores columns 8 kFirst and on of dq, in the order of store_dq.
  template <int kFirst, int kColumns>
  __device__ __forceinline__ void store_dq_columns(const float (&dq)[kColumns][4],
                                                   float* to) const {
    constexpr int kWarpColumns = Shape::Sums::QueryGradPart::kColumnTiles;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = kFirst + j, holder = warp + column / kWarpColumns * 4;
      *reinterpret_cast<float4*>(to + (holder * kWarpColumns + column % kWarpColumns) * 128 +
                                 4 * lane) = make_float4(dq[j][0], dq[j][1], dq[j][2], dq[j][3]);
    }
  }

  /// Stores a head's sums of dS over queries.
  __device__ __forceinline__ void store_key_sums(const KeyTile& at, int head) {
    float* const to = at.w.column_sums +
                      (at.keys.batch * at.p.heads + head) * at.p.key_layout.time + at.keys.start +
                      at.first_key;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = quad_sum(key_sums[i]);
      if (lane % 4 == 0 && key() + 8 * i < at.tokens) {
        to[key() + 8 * i] = sum;
      }
    }
  }

  /// dk and dv leave through the warpgroup's rows of keys and values.
  __device__ __forceinline__ void store(const KeyTile& at, Shared& shared) {
    stage_dk(at, shared);
    stage_dv(shared);
    hopper::named_barrier_sync(kGroupBarrier + group, 128);
    store_rows(at, at.w.params.dk, shared.keys);
    store_rows(at, at.w.params.dv, shared.values);
  }
  /// Write dk, scaled, and dv where the block's keys and values were, from where store_rows takes
  /// them.
  __device__ __forceinline__ void stage_dk(const KeyTile& at, Shared& shared) const {
    stage(shared.keys, dk, static_cast<float>(at.p.scale));
  }
  __device__ __forceinline__ void stage_dv(Shared& shared) const { stage(shared.values, dv, 1.0f); }

  __device__ __forceinline__ void store_rows(const KeyTile& at, const HeadSeries& t,
                                             const unsigned char* tile) const {
    constexpr int kPieces = kDim / 8;
    const int pieces = static_cast<int>(at.p.head_dim / 8);
    char* const to = row_address<2>(t, at.keys, at.key_head, at.first_key);
    const int stride = row_stride<2>(t);
#pragma unroll 4
    for (int i = warp * 32 + lane; i < 64 * kPieces; i += 128) {
      const int row = 64 * group + i / kPieces, piece = i % kPieces;
      if (row < at.tokens && piece < pieces) {
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(row) * stride + piece * 16) =
            *reinterpret_cast<const uint4*>(tile + KeyPanels::offset(row, piece));
      }
    }
  }

 private:
  /// Writes a gradient, rounded, to a tile of shared memory on its way to device memory. (No stage
  /// of a ring.)
  __device__ __forceinline__ void stage(unsigned char* tile, const float (&gradient)[kDim / 8][4],
                                        float factor) const {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const x = gradient[j] + 2 * half;
        *reinterpret_cast<uint32_t*>(tile + KeyPanels::offset(key() + 8 * half, j) + lane % 4 * 4) =
            pack_pair<T>(x[0] * factor, x[1] * factor);
      }
    }
  }
};

}  // namespace tidegate::kernels::attention
