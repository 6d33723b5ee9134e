#pragma once

// dk, dv and, by additions, dq on Hopper: the five products of backward/key_gradient_kernel.cuh by
// wgmma, with S and dP transposed, rows of keys:
//
//   S^T = K Q^T   P = exp(S - lse)   dP^T = V dO^T   dS = P (dP - delta + dlse)
//   dv += P^T dO      dk += dS^T Q      dq += dS K  (fp32 additions)
//
// A block takes 128 keys of one key/value head and iterates over the tiles of queries that see
// them, of every query head that shares the keys. Two warpgroups of math have 64 keys each, with
// their dk and dv in registers, and take a tile 64 queries at a time. P and dS go from accumulators
// straight into the left operand of dv and dk. For dq, of which each warpgroup makes a half, dS of
// both passes through shared memory.
//
// The producer's first warp fills the stages of Q and dO (queries_full, d_o_full), its second adds
// what the queries' scores need (queries_full, too); a warp of math frees them when its products
// have read them. The third warp takes dq of a tile from shared memory (kDqBarrier, dq_free), and
// adds it. ds_full says that all warps of math have written dS of a stage. It needs no barrier that
// frees it: who writes a stage has waited for all to have written the one between.
//
// Products are under way beside everything else: dP beside the exponentials, dv beside dS, dk
// beside the sums over rows, dq and the next S beside the additions of dq. 240 registers hold two
// accumulators of scores at a time beside dk and dv: dq takes the place of dP, dS that of P.

#include "kernels/attention/cuda/backward/query_gradients.cuh"
#include "kernels/attention/cuda/hopper/backward_tiles.cuh"
#include "kernels/common/cuda/gates.cuh"

namespace tidegate::kernels::attention {

/// What a warpgroup of math keeps in registers, and the phases of a tile.
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

  int group, warp, lane;  // of the warpgroup; the warp within it
  float scale;
  float dk[kDim / 8][4], dv[kDim / 8][4];
  Scores s, dp;
  float key_high[2], key_low[2];  // c_ref - c_j of the lane's keys
  float key_sums[2];              // of dS
  float row_sums[kPart / 4];      // of dS over the lane's two keys

  __device__ __forceinline__ HopperKeyGradients(const ForgettingAttentionParams& p, int thread)
      : group(__shfl_sync(0xffffffffu, thread / 128 - 1, 0)),  // known to be the same for a warp
        warp(thread % 128 / 32),
        lane(thread % 32),
        scale(static_cast<float>(p.scale) * kLog2E) {
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

  /// d += keys rows^T: S^T of K and Q, dP^T of V and dO. `rows`: of the part, as everywhere.
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
    using hopper::Operand;
    const Operand a =
        Operand::rows_inner(shared_address(ds) + (Shape::kDqByRows ? group * (64 * 128) : 0));
    const Operand b = Operand::inner_rows(
        shared_address(keys) + (Shape::kDqByRows ? 0 : group * KeyPanels::kPanelBytes),
        KeyPanels::kPanelBytes);
    hopper::fence_products();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      PartProduct::template shared<true>(
          dp, a.advance(step / 4 * RowPanels::kPanelBytes + step % 4 * 32), b.advance(step * 2048),
          step > 0);
    }
    hopper::commit_products();
  }

  /// Sums of dS over the warp's keys, of the part's queries.
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

  /// dq's half, in the order in which the warps hold it: see convert_dq_kernel.
  __device__ __forceinline__ void store_dq(float* to) const {
#pragma unroll
    for (int j = 0; j < kPart / 8; ++j) {
      *reinterpret_cast<float4*>(to + ((4 * group + warp) * 8 + j) * 128 + 4 * lane) =
          make_float4(dp[j][0], dp[j][1], dp[j][2], dp[j][3]);
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
    const float dk_scale = static_cast<float>(at.p.scale);
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int offset = KeyPanels::offset(key() + 8 * half, j) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(shared.keys + offset) =
            pack_pair<T>(dk[j][2 * half] * dk_scale, dk[j][2 * half + 1] * dk_scale);
        *reinterpret_cast<uint32_t*>(shared.values + offset) =
            pack_pair<T>(dv[j][2 * half], dv[j][2 * half + 1]);
      }
    }
    hopper::named_barrier_sync(kGroupBarrier + group, 128);
    store_rows(at, at.w.params.dk, shared.keys);
    store_rows(at, at.w.params.dv, shared.values);
  }

 private:
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
};

/// The tiles of a warpgroup of math: the stages and barriers around the phases of its gradients.
template <class Shape>
struct HopperMathTiles {
  static constexpr int kPart = Shape::kPart, kPartBytes = kPart * hopper::kPanelRowBytes;
  const HopperKeyTile<Shape>& at;
  HopperBackwardShared<Shape>& shared;
  HopperKeyGradients<Shape> math;
  HopperStage<Shape::kStages> stage;
  int dq_parity = 0;

  __device__ __forceinline__ HopperMathTiles(const HopperKeyTile<Shape>& block,
                                             HopperBackwardShared<Shape>& memory, int thread)
      : at(block), shared(memory), math(block.p, thread) {}

  /// Begins S of a part of the stage's queries.
  __device__ __forceinline__ void begin_s(int part) {
    math.start(math.s, shared.stats[stage.index].start_s + part * kPart);
    math.multiply_scores(math.s, shared.keys, shared.queries[stage.index] + part * kPartBytes);
  }
  /// What dP of a part of the stage's queries starts from.
  __device__ __forceinline__ void start_dp(int part) {
    math.start(math.dp, shared.stats[stage.index].start_dp + part * kPart);
  }
  __device__ __forceinline__ void wait_for_s() {
    hopper::wait_for_products<0>();
    hopper::keep(math.s);
  }

  /// From S of a part to its share of dv, and of dk, which is under way in the end. Its dS and the
  /// sums of it are in shared memory then.
  __device__ __forceinline__ void take_part(int tile, int part) {
    const int i = stage.index, row = tile * Shape::kRows + part * kPart;
    const unsigned char* const d_o = shared.d_o[i] + part * kPartBytes;
    typename HopperKeyGradients<Shape>::ScoreOperand operand;  // P, then dS
    if (!Shape::kStartsEarly) {
      start_dp(part);
    }
    math.multiply_scores(math.dp, shared.values, d_o);
    math.compute_p(shared.stats[i], part * kPart, at.is_edge(row), at.mask(),
                   row + at.shift - at.first_key);
    math.pack(operand, math.s);
    math.accumulate(math.dv, operand, d_o);
    hopper::wait_for_products<1>();  // dP
    hopper::keep(math.dp);
    math.compute_ds();
    hopper::wait_for_products<0>();  // dv
    math.pack(operand, math.dp);
    math.store_ds(shared.ds[i] + part * kPartBytes, operand);
    if (part == Shape::kParts - 1) {
      hopper::fence_async_proxy();
      hopper::arrive_from(&shared.ds_full[i], math.lane);
    }
    math.accumulate(math.dk, operand, shared.queries[i] + part * kPartBytes);
    math.store_row_sums(shared.row_sums[i][4 * math.group + math.warp] + part * kPart);
  }

  /// dq of the stage's queries, handed to the producer's third warp, and the next stage's S, if
  /// there are `more`.
  __device__ __forceinline__ void take_dq(bool more) {
    const HopperStage<Shape::kStages> taken = stage;
    stage.next();
    if (more) {
      mbarrier_wait(&shared.queries_full[stage.index], stage.parity);
    }
    mbarrier_wait(&shared.ds_full[taken.index], taken.parity);
    math.multiply_dq(shared.ds[taken.index], shared.keys);
    if (more) {
      begin_s(0);
      hopper::wait_for_products<1>();  // dk, dq
    } else {
      hopper::wait_for_products<0>();
    }
    hopper::keep(math.dp);
    hopper::arrive_from(&shared.queries_free[taken.index], math.lane);
    hopper::arrive_from(&shared.d_o_free[taken.index], math.lane);
    mbarrier_wait(&shared.dq_free, dq_parity ^ 1);
    math.store_dq(shared.dq);
    if (Shape::kStartsEarly && more) {
      start_dp(0);
    }
    hopper::fence_async_proxy();
    hopper::named_barrier_arrive(kDqBarrier, kDqBarrierThreads);
    dq_parity ^= 1;
  }
};

/// A warpgroup of math.
template <class Shape>
__device__ __forceinline__ void compute_hopper_gradients(const HopperKeyTile<Shape>& at,
                                                         HopperBackwardShared<Shape>& shared,
                                                         int thread) {
  HopperMathTiles<Shape> tiles(at, shared, thread);
  auto& math = tiles.math;
  const auto& stage = tiles.stage;
  mbarrier_wait(&shared.keys_full, 0);
  bool has_values = false;
  for (int head = at.first_head; head < at.end_head; ++head) {
    const auto range = at.range(head);
    math.start_head(at, head);
    if (range.begin < range.end) {
      mbarrier_wait(&shared.queries_full[stage.index], stage.parity);
      tiles.begin_s(0);
      if (Shape::kStartsEarly) {
        tiles.start_dp(0);
      }
      if (!has_values) {
        has_values = true;
        mbarrier_wait(&shared.values_full, 0);
      }
      tiles.wait_for_s();
    }
#pragma unroll 1
    for (int tile = range.begin; tile < range.end; ++tile) {
      mbarrier_wait(&shared.d_o_full[stage.index], stage.parity);
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        tiles.take_part(tile, part);
        if (part + 1 < Shape::kParts) {
          tiles.begin_s(part + 1);
          if (Shape::kStartsEarly) {
            tiles.start_dp(part + 1);
          }
          tiles.wait_for_s();
        }
      }
      tiles.take_dq(tile + 1 < range.end);
      tiles.wait_for_s();
    }
    math.store_key_sums(at, head);
  }
  hopper::keep(math.dk);
  hopper::keep(math.dv);
  hopper::named_barrier_sync(kKeysReadBarrier, 256);  // all have read the keys
  math.store(at, shared);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    hopper_backward_kernel(const __grid_constant__ HopperBackwardWork work) {
#if TIDEGATE_HOPPER_CODE
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = HopperBackwardShared<Shape>::at(bytes);
  const TensorAttention& w = work.attention;
  const int thread = static_cast<int>(threadIdx.x);
  const bool ordered = w.turns != nullptr;
  if (thread == 0) {
    shared.init_barriers();
    // Who waits for turns must have been started after those it waits for.
    shared.block = ordered ? atomicAdd(w.turns, 1) : static_cast<int>(blockIdx.x);
  }
  __syncthreads();
  const TileAndHead place(w.tiles, w.params.forward.key_heads, w.side_by_side,
                          static_cast<unsigned>(shared.block), ordered);
  if (place.tile.tokens == 0) {
    return;
  }
  const HopperKeyTile<Shape> at(w, place);
  if (thread < 128) {
    hopper::release_registers<Shape::kProducerRegisters>();
    if (thread < 32) {
      load_tiles(work, at, shared, thread);
    } else if (thread < 64) {
      load_row_stats(at, shared, thread - 32);
    } else if (thread < 96) {
      add_query_sums(at, shared, thread - 64);
    }
  } else {
    hopper::claim_registers<Shape::kMathRegisters>();
    compute_hopper_gradients(at, shared, thread);
  }
#endif
}

}  // namespace tidegate::kernels::attention
