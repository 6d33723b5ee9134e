#pragma once

// The backward pass on tensor cores. A block of threads takes a tile of keys of one head of keys
// and walks over the queries that see it, of all query heads that share it, with dk and dv in
// registers:
//
//   S = Q K^T   P = exp(S - lse)   dP = dO V^T   dS = P (dP - delta + dlse)
//   dv += P^T dO      dk += dS^T Q      dq += dS K  (atomics in float, unless deterministic)
//
// Sums of dS over rows and columns are taken from the same values: see forgetting_attention.h.
// c enters as in the forward pass, relative to the tile's last key.

#include <cmath>

#include "kernels/attention/cuda/gate_sums.cuh"
#include "kernels/attention/cuda/half_tiles.cuh"
#include "kernels/attention/cuda/tensor_work.cuh"

namespace tidegate::kernels {

/// Eight warps share every product of a pair of tiles; each product divides its result among them
/// in its own way: warps along the rows, the others along the columns.
template <class Data, int kHeadDim, int kQueriesATile, int kKeysATile, int kScoreWarps,
          int kKeyWarps, int kQueryWarps, int kStagesOfQueries, int kBlocksASm = 1>
struct BackwardShape {
  using T = Data;
  static constexpr int kDim = kHeadDim;
  static constexpr int kRows = kQueriesATile;
  static constexpr int kKeys = kKeysATile;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kStagesOfQueries;  // one or two tiles of queries and of dO
  static constexpr int kBlocks = kBlocksASm;        // of a multiprocessor: bounds registers

  /// One product's part of a warp, in tiles of 16 rows and of 8 columns.
  template <int kAllRows, int kAllColumns, int kWarpsAlongRows>
  struct Part {
    static constexpr int kWarpsOfRows = kWarpsAlongRows;
    static constexpr int kRowTiles = kAllRows / kWarpsAlongRows / 16;
    static constexpr int kColumnTiles = kAllColumns / (kWarps / kWarpsAlongRows) / 8;
    static __device__ int row(int warp) { return warp % kWarpsAlongRows * (16 * kRowTiles); }
    static __device__ int column(int warp) { return warp / kWarpsAlongRows * (8 * kColumnTiles); }
  };
  using Scores = Part<kRows, kKeys, kScoreWarps>;    // S, dP
  using KeySums = Part<kKeys, kDim, kKeyWarps>;      // dk, dv
  using QuerySums = Part<kRows, kDim, kQueryWarps>;  // dq

  static constexpr int kKeyBytes = HalfTile<kDim>::bytes(kKeys);
  static constexpr int kRowBytes = HalfTile<kDim>::bytes(kRows);
  static constexpr int kScoreBytes = HalfTile<kKeys>::bytes(kRows);
  static constexpr int kRowTerms = 4;  // c_i - c_ref, high and low; lse; delta - dlse
  static constexpr int kSharedBytes = 2 * kKeyBytes + 2 * kStages * kRowBytes + 2 * kScoreBytes +
                                      (2 * kKeys + 2 * kRowTerms * kRows) * int{sizeof(float)};
};

template <class Shape>
struct BackwardShared {
  unsigned char* keys;
  unsigned char* values;
  unsigned char* queries;  // [kStages]
  unsigned char* d_o;      // [kStages]
  unsigned char* p;
  unsigned char* ds;
  float* key_gates;  // [2][kKeys]: c_ref - c_j, high and low parts
  float* row_terms;  // [2][kRowTerms][kRows]

  __device__ explicit BackwardShared(unsigned char* shared)
      : keys(shared),
        values(keys + Shape::kKeyBytes),
        queries(values + Shape::kKeyBytes),
        d_o(queries + Shape::kStages * Shape::kRowBytes),
        p(d_o + Shape::kStages * Shape::kRowBytes),
        ds(p + Shape::kScoreBytes),
        key_gates(reinterpret_cast<float*>(ds + Shape::kScoreBytes)),
        row_terms(key_gates + 2 * Shape::kKeys) {}
};

/// A row's c, lse and delta - dlse in device memory.
struct RawRow {
  double gate;
  float lse, term;
};

/// What the scores of a row need, kRows apart: c_i - c_ref, its high and low parts; lse, in log2;
/// delta - dlse. A row that is not there, or has no keys, gets P = 0.
template <int kRows>
__device__ inline void put_row_terms(float* to, const RawRow& row, double reference) {
  const SplitGate gate = SplitGate::of(row.gate - reference);
  to[0] = gate.high;
  to[kRows] = gate.low;
  to[2 * kRows] = row.lse == -INFINITY ? INFINITY : row.lse * kLog2E;
  to[3 * kRows] = row.term;
}

/// Adds four floats to device memory.
__device__ inline void add_four(float* to, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    atomicAdd(to + i, x[i]);
  }
#endif
}

/// s = log2 of P, from Q K^T. `gates`: of the lane's first two keys; `rows`: of its first row, see
/// put_row_terms.
template <int kRows, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void weight_exponents(float (&s)[kRowTiles][kColumnTiles][4],
                                                 float scale, const float* gates,
                                                 const float* rows) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * i + 8 * half;
      const float level = rows[2 * kRows + row] - rows[row];
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const float2 gate = *reinterpret_cast<const float2*>(gates + 8 * j);
        s[i][j][2 * half] = fmaf(s[i][j][2 * half], scale, gate.x) - level;
        s[i][j][2 * half + 1] = fmaf(s[i][j][2 * half + 1], scale, gate.y) - level;
      }
    }
  }
}

/// The same on edge tiles of kKeys keys: pair by pair, -infinity where a pair does not count.
template <int kRows, int kKeys, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void weight_exponents(float (&s)[kRowTiles][kColumnTiles][4],
                                                 float scale, const float* gates, const float* rows,
                                                 PairMask mask, int position, int key) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const float high = rows[8 * i], low = rows[kRows + 8 * i], level = rows[2 * kRows + 8 * i];
    const PairMask::Row row = mask.row(position + 8 * i, key);
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const float2 x = read_pair(gates + 8 * j), y = read_pair(gates + kKeys + 8 * j);
      float* const pair = s[i / 2][j] + i % 2 * 2;
      const float first = fmaf(pair[0], scale, (high + x.x) + (low + y.x)) - level;
      const float second = fmaf(pair[1], scale, (high + x.y) + (low + y.y)) - level;
      pair[0] = row.sees(8 * j) ? first : -INFINITY;
      pair[1] = row.sees(8 * j + 1) ? second : -INFINITY;
    }
  }
}

/// s = P; dp = dO V^T meanwhile.
template <class T, int kSteps, int kRowTiles, int kColumnTiles, class TileA, class TileB>
__device__ __forceinline__ void weights_and_products(float (&s)[kRowTiles][kColumnTiles][4],
                                                     float (&dp)[kRowTiles][kColumnTiles][4],
                                                     const TileA& d_o, const TileB& values) {
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
  multiply<T, false, false, kSteps, true>(dp, d_o, values, exponentials);
}

template <class Shape>
struct BackwardWarp {
  using T = typename Shape::T;
  using Scores = typename Shape::Scores;
  using KeySums = typename Shape::KeySums;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kRowTiles = Scores::kRowTiles, kColumnTiles = Scores::kColumnTiles;

  float dk[KeySums::kRowTiles][KeySums::kColumnTiles][4] = {};
  float dv[KeySums::kRowTiles][KeySums::kColumnTiles][4] = {};
  float s[kRowTiles][kColumnTiles][4];
  float dp[kRowTiles][kColumnTiles][4];
  float column_sums[kColumnTiles][2];

  /// dp = dS, adding up its columns here, and its rows in device memory where `row_sums` is not
  /// null.
  __device__ __forceinline__ void score_gradients(const float* rows, float* row_sums, int limit,
                                                  int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * i + 8 * half;
        const float term = rows[3 * Shape::kRows + row];
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = dp[i][j][2 * half + e];
            x = s[i][j][2 * half + e] * (x - term);
            sum += x;
            column_sums[j][e] += x;
          }
        }
        if (row_sums != nullptr) {
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          if (lane % 4 == 0 && row < limit) {
            atomicAdd(row_sums + row, sum);
          }
        }
      }
    }
  }

  /// Writes scores as 16-bit elements.
  static __device__ __forceinline__ void put(const float (&x)[kRowTiles][kColumnTiles][4],
                                             unsigned char* tile, int row, int column, int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        unsigned char* const to =
            tile + HalfTile<kKeys>::offset(row + 16 * i + lane / 4, column / 8 + j) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(x[i][j][0], x[i][j][1]);
        *reinterpret_cast<uint32_t*>(to + 8 * HalfTile<kKeys>::kRowBytes) =
            pack_pair<T>(x[i][j][2], x[i][j][3]);
      }
    }
  }
};

/// Block `block`'s tile: its dk, dv, sums of columns, and its part of dq and of the sums of rows.
template <class Shape>
__device__ __forceinline__ void add_key_gradients(const TensorAttention& w, unsigned block,
                                                  unsigned char* shared_bytes) {
  using T = typename Shape::T;
  using Scores = typename Shape::Scores;
  using KeySums = typename Shape::KeySums;
  using QuerySums = typename Shape::QuerySums;
  constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kRows = Shape::kRows;
  constexpr int kThreads = Shape::kThreads;
  const BackwardShared<Shape> shared(shared_bytes);
  const ForgettingAttentionParams& p = w.params.forward;
  const TileAndHead place(w.tiles, p.key_heads, w.together, block, false);
  if (place.cut.tokens == 0 || !takes_head(w, place.cut.sequence.index, place.head)) {
    return;
  }
  const Sequence& keys = place.cut.sequence;
  const Sequence queries = find_sequence(p.layout, keys.index);
  const int key_head = place.head, first_key = place.cut.first;
  const int last_key = first_key + place.cut.tokens - 1;
  const int shift = keys.length - queries.length;  // from a query to its position
  const int group = static_cast<int>(p.heads / p.key_heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int pieces = static_cast<int>(p.head_dim / 8);
  const PairMask mask = {static_cast<int>(p.window)};
  const float scale = static_cast<float>(p.scale) * kLog2E;

  {
    const int thread = fresh_thread();
    load_tile<kDim, kKeys, kThreads>(shared_address(shared.keys),
                                     row_address(p.k, keys, key_head, first_key), row_bytes(p.k),
                                     place.cut.tokens, pieces, thread);
    load_tile<kDim, kKeys, kThreads>(shared_address(shared.values),
                                     row_address(p.v, keys, key_head, first_key), row_bytes(p.v),
                                     place.cut.tokens, pieces, thread);
    commit_copies();
  }

  BackwardWarp<Shape> state;
  for (int head = key_head * group; head < (key_head + 1) * group; ++head) {
    const GateSums gates(w, keys, head);
    const double reference = gates.at(last_key);
    // Tiles of queries: the first that sees the first key, up to the last that sees the last key.
    int tile = max(0, first_key - shift) / kRows;
    int end = (queries.length + kRows - 1) / kRows;
    if (mask.window > 0) {
      const int last_row = last_key + mask.window - 1 - shift;
      end = last_row < 0 ? 0 : min(end, last_row / kRows + 1);
    }
    const auto load_rows = [&](const HeadSeries& t, unsigned to, int tile) {
      const int row = tile * kRows;
      load_tile<kDim, kRows, kThreads>(to, row_address(t, queries, head, row), row_bytes(t),
                                       queries.length - row, pieces, fresh_thread());
    };
    const auto load_queries = [&](int tile, int turn) {
      load_rows(p.q, shared_address(shared.queries) + turn % Shape::kStages * Shape::kRowBytes,
                tile);
    };
    const auto load_gradients = [&](int tile, int turn) {
      load_rows(w.params.d_o, shared_address(shared.d_o) + turn % Shape::kStages * Shape::kRowBytes,
                tile);
    };
    // What a row needs is read one tile ahead and worked out where it is written, so that nothing
    // waits for it.
    const auto read_row = [&](int tile) -> RawRow {
      const int row = tile * kRows + fresh_thread();
      if (row >= queries.length) {
        return {0, -INFINITY, 0};
      }
      const int64_t at = (queries.batch * p.heads + head) * p.layout.time + queries.start + row;
      return {gates.at(row + shift), static_cast<const float*>(p.lse)[at], w.row_terms[at]};
    };
    const auto put_row = [&](const RawRow& row, int turn) {
      put_row_terms<kRows>(shared.row_terms + turn * Shape::kRowTerms * kRows + fresh_thread(), row,
                           reference);
    };

    __syncthreads();   // the last head's tiles have been read
    if (tile < end) {  // under way before anything waits for memory
      load_queries(tile, 0);
      load_gradients(tile, 0);
    }
    commit_copies();
    const RawRow row = fresh_thread() < kRows ? read_row(tile) : RawRow{};
    const int thread_key = min(fresh_thread(), kKeys - 1);
    const double key_gate = gates.at(first_key + thread_key);
    if (p.prune > 0) {
      static_assert(kKeys % KeyReach::kKeys == 0);
      const int64_t slot =
          first_slot(w.reach.keys, static_cast<int>(keys.index)) + last_key / KeyReach::kKeys;
      end = min(end, (w.reach.ends[slot * p.heads + head] + kRows - 1) / kRows);
    }
    if (fresh_thread() < kRows) {
      put_row(row, 0);
    }
    if (fresh_thread() < kKeys) {
      const SplitGate gate = SplitGate::of(reference - key_gate);
      shared.key_gates[thread_key] = gate.high;
      shared.key_gates[kKeys + thread_key] = gate.low;
    }
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
      state.column_sums[j][0] = state.column_sums[j][1] = 0;
    }

    for (int turn = 0; tile < end; ++tile, turn ^= 1) {
      wait_for_copies<0>();
      __syncthreads();  // the tile is there, and all are done with the one before it
      const bool more = tile + 1 < end;
      RawRow next = {};
      if (more) {
        if (Shape::kStages > 1) {
          load_queries(tile + 1, turn ^ 1);
          load_gradients(tile + 1, turn ^ 1);
        }
        if (fresh_thread() < kRows) {
          next = read_row(tile + 1);
        }
      }
      commit_copies();

      const int lane = fresh_thread() % 32;
      const unsigned queries_at =
          shared_address(shared.queries) + turn % Shape::kStages * Shape::kRowBytes;
      const unsigned d_o_at = shared_address(shared.d_o) + turn % Shape::kStages * Shape::kRowBytes;
      const int row = Scores::row(warp), column = Scores::column(warp);
      const int first = tile * kRows + shift;
      const float* const key_gates = shared.key_gates + column + lane % 4 * 2;
      const float* const rows = shared.row_terms + turn * Shape::kRowTerms * kRows + row + lane / 4;
      multiply<T, false, false, kDim / 16, true>(
          state.s, OperandReader<kDim>::a(queries_at + HalfTile<kDim>::bytes(row), lane),
          OperandReader<kDim>::b(shared_address(shared.keys) + HalfTile<kDim>::bytes(column),
                                 lane));
      if (first < first_key + kKeys - 1 ||
          (mask.window > 0 && first_key <= first + kRows - 1 - mask.window)) {
        weight_exponents<kRows, kKeys>(state.s, scale, key_gates, rows, mask,
                                       first + row + lane / 4, first_key + column + lane % 4 * 2);
      } else {
        weight_exponents<kRows>(state.s, scale, key_gates, rows);
      }
      weights_and_products<T, kDim / 16>(
          state.s, state.dp, OperandReader<kDim>::a(d_o_at + HalfTile<kDim>::bytes(row), lane),
          OperandReader<kDim>::b(shared_address(shared.values) + HalfTile<kDim>::bytes(column),
                                 lane));
      state.put(state.s, shared.p, row, column, lane);
      const int64_t first_row = (queries.batch * p.heads + head) * p.layout.time + queries.start +
                                tile * kRows + row + lane / 4;
      state.score_gradients(rows, w.row_sums == nullptr ? nullptr : w.row_sums + first_row,
                            queries.length - tile * kRows - row - lane / 4, lane);
      state.put(state.dp, shared.ds, row, column, lane);
      __syncthreads();  // P and dS are there

      const int key = KeySums::row(warp), dim = KeySums::column(warp);
      multiply<T, true, true, kRows / 16, false>(
          state.dv,
          OperandReader<kKeys>::a_transposed(shared_address(shared.p), lane)
              .template from_step<KeySums::kRowTiles>(key / 16),
          OperandReader<kDim>::b_transposed(d_o_at, lane)
              .template from_step<KeySums::kColumnTiles / 2>(dim / 16));
      if (w.dq_sums != nullptr) {
        float dq[QuerySums::kRowTiles][QuerySums::kColumnTiles][4];
        multiply<T, false, true, kKeys / 16, true>(
            dq,
            OperandReader<kKeys>::a(
                shared_address(shared.ds) + HalfTile<kKeys>::bytes(QuerySums::row(warp)), lane),
            OperandReader<kDim>::b_transposed(shared_address(shared.keys), lane)
                .template from_step<QuerySums::kColumnTiles / 2>(QuerySums::column(warp) / 16));
        // In the order in which lanes hold it: see round_dq_kernel.
        const int64_t slot = first_slot(w.query_tiles, static_cast<int>(queries.index)) + tile;
        constexpr int kParts = QuerySums::kRowTiles * QuerySums::kColumnTiles;
        float* const to =
            w.dq_sums + (slot * p.heads + head) * (kRows * kDim) + (warp * kParts * 32 + lane) * 4;
#pragma unroll
        for (int i = 0; i < QuerySums::kRowTiles; ++i) {
#pragma unroll
          for (int j = 0; j < QuerySums::kColumnTiles; ++j) {
            add_four(to + (i * QuerySums::kColumnTiles + j) * 128, dq[i][j]);
          }
        }
      }
      multiply<T, true, true, kRows / 16, false>(
          state.dk,
          OperandReader<kKeys>::a_transposed(shared_address(shared.ds), lane)
              .template from_step<KeySums::kRowTiles>(key / 16),
          OperandReader<kDim>::b_transposed(queries_at, lane)
              .template from_step<KeySums::kColumnTiles / 2>(dim / 16));
      if (more) {
        if (Shape::kStages == 1) {
          __syncthreads();
          load_queries(tile + 1, 0);
          load_gradients(tile + 1, 0);
          commit_copies();
        }
        if (fresh_thread() < kRows) {
          put_row(next, turn ^ 1);
        }
      }
    }

    // Sums over rows: the lanes of a column, then the warps of a column in their order.
    wait_for_copies<0>();
    __syncthreads();
    const int thread = fresh_thread(), lane = thread % 32;
    float* const sums = shared.row_terms;
    static_assert(Scores::kWarpsOfRows * kKeys <= 2 * Shape::kRowTerms * kRows);
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = state.column_sums[j][e];
        x += __shfl_xor_sync(0xffffffffu, x, 4);
        x += __shfl_xor_sync(0xffffffffu, x, 8);
        x += __shfl_xor_sync(0xffffffffu, x, 16);
        if (lane < 4) {
          sums[warp % Scores::kWarpsOfRows * kKeys + Scores::column(warp) + 8 * j + 2 * lane + e] =
              x;
        }
      }
    }
    __syncthreads();
    if (thread < place.cut.tokens) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < Scores::kWarpsOfRows; ++i) {
        sum += sums[i * kKeys + thread];
      }
      w.column_sums[(keys.batch * p.heads + head) * p.key_layout.time + keys.start + first_key +
                    thread] = sum;
    }
  }

  // dk and dv leave through the tiles of keys and values.
  __syncthreads();
  const int thread = fresh_thread(), lane = thread % 32;
  const int key = KeySums::row(warp), dim = KeySums::column(warp);
  const float dk_scale = static_cast<float>(p.scale);
#pragma unroll
  for (int i = 0; i < KeySums::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < KeySums::kColumnTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at =
            HalfTile<kDim>::offset(key + 16 * i + 8 * half + lane / 4, dim / 8 + j) + lane % 4 * 4;
        const float* const dk = state.dk[i][j] + 2 * half;
        const float* const dv = state.dv[i][j] + 2 * half;
        *reinterpret_cast<uint32_t*>(shared.keys + at) =
            pack_pair<T>(dk[0] * dk_scale, dk[1] * dk_scale);
        *reinterpret_cast<uint32_t*>(shared.values + at) = pack_pair<T>(dv[0], dv[1]);
      }
    }
  }
  __syncthreads();
  store_tile<kDim, kKeys, kThreads>(row_address(w.params.dk, keys, key_head, first_key),
                                    row_bytes(w.params.dk), shared.keys, place.cut.tokens, pieces,
                                    thread);
  store_tile<kDim, kKeys, kThreads>(row_address(w.params.dv, keys, key_head, first_key),
                                    row_bytes(w.params.dv), shared.values, place.cut.tokens, pieces,
                                    thread);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    forgetting_backward_kernel(const __grid_constant__ TensorAttention w) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  add_key_gradients<Shape>(w, blockIdx.x, shared_bytes);
}

/// The tiles of heads that are not near, taken one after the other by blocks that stay: where there
/// are no such heads, a block for every tile would take longer to start than these to leave.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    far_backward_kernel(const __grid_constant__ TensorAttention w) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ unsigned taken;
  if (w.reach.far[0] == 0) {
    return;
  }
  const auto blocks = static_cast<unsigned>(w.tiles.slots * w.params.forward.key_heads);
#pragma unroll 1
  for (;;) {
    __syncthreads();  // all are done with the tile before
    if (threadIdx.x == 0) {
      taken = atomicAdd(w.reach.far + 1, 1u);
    }
    __syncthreads();
    if (taken >= blocks) {
      return;
    }
    add_key_gradients<Shape>(w, taken, shared_bytes);
  }
}

/// dq from its sums, a block a tile of queries: they lie in the order in which the warps that made
/// them hold accumulators. The first blocks add up chunks of gates' gradients.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    round_dq_kernel(const __grid_constant__ TensorAttention w,
                    const __grid_constant__ GateChunks<GateGradientScan<float>> gates) {
  static_assert(Shape::kThreads == kGateChunk);
  if (blockIdx.x < gates.blocks()) {
    gates.add_up(blockIdx.x);
    return;
  }
  using T = typename Shape::T;
  using QuerySums = typename Shape::QuerySums;
  constexpr int kDim = Shape::kDim, kRows = Shape::kRows;
  extern __shared__ __align__(128) unsigned char rounded[];
  const ForgettingAttentionParams& p = w.params.forward;
  // From the last head on, whose sums the L2 still has.
  const TileAndHead place(w.query_tiles, p.heads, 1, gridDim.x - 1 - blockIdx.x, false);
  if (place.cut.tokens == 0) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const float scale = static_cast<float>(p.scale);
  constexpr int kParts = QuerySums::kRowTiles * QuerySums::kColumnTiles;
  const float* const from = w.dq_sums + (place.slot * p.heads + place.head) * (kRows * kDim) +
                            (warp * kParts * 32 + lane) * 4;
#pragma unroll
  for (int i = 0; i < QuerySums::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < QuerySums::kColumnTiles; ++j) {
      const float4 x =
          *reinterpret_cast<const float4*>(from + (i * QuerySums::kColumnTiles + j) * 128);
      unsigned char* const to = rounded +
                                HalfTile<kDim>::offset(QuerySums::row(warp) + 16 * i + lane / 4,
                                                       QuerySums::column(warp) / 8 + j) +
                                lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(x.x * scale, x.y * scale);
      *reinterpret_cast<uint32_t*>(to + 8 * HalfTile<kDim>::kRowBytes) =
          pack_pair<T>(x.z * scale, x.w * scale);
    }
  }
  __syncthreads();
  store_tile<kDim, kRows, Shape::kThreads>(
      row_address(w.params.dq, place.cut.sequence, place.head, place.cut.first),
      row_bytes(w.params.dq), rounded, place.cut.tokens, static_cast<int>(p.head_dim / 8), thread);
}

}  // namespace tidegate::kernels
