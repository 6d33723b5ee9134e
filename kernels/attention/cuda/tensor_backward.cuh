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

#include "kernels/attention/cuda/backward_scores.cuh"
#include "kernels/attention/cuda/gate_sums.cuh"
#include "kernels/attention/cuda/half_tiles.cuh"
#include "kernels/attention/cuda/tensor_work.cuh"
#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels::attention {

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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/// Adds kBytes of floats in shared memory to device memory, asynchronously, in a group of the
/// thread's own. The warp that wrote them has met: see add_query_gradients.
template <int kBytes>
__device__ inline void add_bulk(float* to, const float* shared) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(shared_address(shared)), "n"(kBytes)
      : "memory");
}
/// What the thread's groups read may be written again.
__device__ inline void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// What the thread's groups add has been added.
__device__ inline void wait_for_bulk_additions() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/// Lets the copy engine see what this thread wrote to shared memory.
__device__ inline void show_to_copy_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

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
  static constexpr int kRowTerms = 4;  // c_i - c_ref, high and low; lse; dlse - delta
  // dq's sums by way of shared memory, which was slower at D = 128: see add_query_gradients.
  static constexpr bool kStagesSums = kStages > 1 && kDim < 128;
  static constexpr int kSharedBytes = 2 * kKeyBytes + 2 * kStages * kRowBytes + 2 * kScoreBytes +
                                      (2 * kKeys + 2 * kRowTerms * kRows) * int{sizeof(float)};

  /// What a launch asks for.
  static int shared_bytes(const DeviceLimits& limits) {
    const bool staged = kStagesSums && limits.major == 9;
    return kSharedBytes + (staged ? kRows * kDim * int{sizeof(float)} : 0);
  }
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
  float* dq;         // [kRows][kDim], where there is room: see BackwardShape::shared_bytes

  __device__ explicit BackwardShared(unsigned char* shared)
      : keys(shared),
        values(keys + Shape::kKeyBytes),
        queries(values + Shape::kKeyBytes),
        d_o(queries + Shape::kStages * Shape::kRowBytes),
        p(d_o + Shape::kStages * Shape::kRowBytes),
        ds(p + Shape::kScoreBytes),
        key_gates(reinterpret_cast<float*>(ds + Shape::kScoreBytes)),
        row_terms(key_gates + 2 * Shape::kKeys),
        dq(row_terms + 2 * Shape::kRowTerms * Shape::kRows) {}
};

/// Adds a warp's part of a tile of dq to that in device memory, in the order in which lanes hold
/// it: see round_dq_kernel. `to`, `staged`: of the lane's first four floats. On 9.0 by way of
/// shared memory where there is room, from where the copy engine adds it.
template <class Shape>
__device__ __forceinline__ void add_query_gradients(
    const float (&dq)[Shape::QuerySums::kRowTiles][Shape::QuerySums::kColumnTiles][4], float* to,
    float* staged, int lane) {
  using Part = typename Shape::QuerySums;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr bool kStages = Shape::kStagesSums;
  if constexpr (kStages) {
    if (lane == 0) {
      wait_for_bulk_reads();
    }
    __syncwarp();
  }
#else
  constexpr bool kStages = false;
#endif
#pragma unroll
  for (int i = 0; i < Part::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < Part::kColumnTiles; ++j) {
      const int at = (i * Part::kColumnTiles + j) * 128;
      if constexpr (kStages) {
        const float (&x)[4] = dq[i][j];
        *reinterpret_cast<float4*>(staged + at) = make_float4(x[0], x[1], x[2], x[3]);
      } else {
        add_four(to + at, dq[i][j]);
      }
    }
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kStages) {
    show_to_copy_engine();
    __syncwarp();
    if (lane == 0) {
      add_bulk<static_cast<int>(sizeof(dq)) * 32>(to, staged);
    }
  }
#endif
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

  /// dp = dS, adding up its columns here, and its rows, of the lane's columns, in `sums`.
  __device__ __forceinline__ void score_gradients(float (&sums)[2 * kRowTiles]) {
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
          column_sums[j][e] += x;
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
  // The next tile's copies stand between the products of S: together, they would hold those up.
  using Copies = TileCopies<kDim, kRows, kThreads>;
  constexpr bool kCopiesBetween = Shape::kStages > 1 && Copies::kPossible;
  constexpr bool kHasRegisters = Shape::kBlocks == 1;  // to read early and to add up late
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
    // What a row needs is read one tile ahead and worked out later, so that nothing waits for it.
    // All threads do so, those of a row write a part each: a branch for some would hold up the
    // others.
    const auto read_row = [&](int tile) -> RawRow {
      const int row = tile * kRows + fresh_thread() % kRows;
      const bool exists = row < queries.length;
      const int64_t at =
          (queries.batch * p.heads + head) * p.layout.time + queries.start + (exists ? row : 0);
      RawRow read = {gates.at(row + shift), -INFINITY, 0};
      if (exists) {
        read.lse = static_cast<const float*>(p.lse)[at];
        read.term = w.row_terms[at];
      }
      return read;
    };
    const auto put_row = [&](const RawRow& row, int turn) {
      constexpr int kTerms = Shape::kRowTerms, kShares = kThreads / kRows;
      const int thread = fresh_thread(), share = thread / kRows;
      float terms[kTerms];
      put_row_terms<1>(terms, row, reference);
      float* const to = shared.row_terms + turn * kTerms * kRows + thread % kRows;
#pragma unroll
      for (int first = 0; first < kTerms; first += kShares) {
        float x = terms[first];
#pragma unroll
        for (int i = 1; i < kShares && first + i < kTerms; ++i) {
          x = share == i ? terms[first + i] : x;
        }
        if (kShares <= kTerms || share < kTerms) {
          to[(first + share) * kRows] = x;
        }
      }
    };

    // Of the sequence's first query.
    float* const row_sums =
        w.row_sums + (queries.batch * p.heads + head) * p.layout.time + queries.start;

    __syncthreads();   // the last head's tiles have been read
    if (tile < end) {  // under way before anything waits for memory
      load_queries(tile, 0);
      load_gradients(tile, 0);
    }
    commit_copies();
    const RawRow row = read_row(tile);
    const int thread_key = min(fresh_thread(), kKeys - 1);
    const double key_gate = gates.at(first_key + thread_key);
    if (p.prune > 0) {
      static_assert(kKeys % KeyReach::kKeys == 0);
      const int64_t slot =
          first_tile_index(w.reach.keys, static_cast<int>(keys.index)) + last_key / KeyReach::kKeys;
      end = min(end, (w.reach.ends[slot * p.heads + head] + kRows - 1) / kRows);
    }
    put_row(row, 0);
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
      const RawRow next = read_row(tile + 1);
      if (Shape::kStages > 1 && !kCopiesBetween && more) {
        load_queries(tile + 1, turn ^ 1);
        load_gradients(tile + 1, turn ^ 1);
      }

      const int lane = fresh_thread() % 32;
      const unsigned queries_at =
          shared_address(shared.queries) + turn % Shape::kStages * Shape::kRowBytes;
      const unsigned d_o_at = shared_address(shared.d_o) + turn % Shape::kStages * Shape::kRowBytes;
      const int row = Scores::row(warp), column = Scores::column(warp);
      const int first = tile * kRows + shift;
      const float* const key_gates = shared.key_gates + column + lane % 4 * 2;
      const float* const rows = shared.row_terms + turn * Shape::kRowTerms * kRows + row + lane / 4;
      const auto copies_of = [&](const HeadSeries& t, const unsigned char* to) {
        return Copies(shared_address(to) + (turn ^ 1) % Shape::kStages * Shape::kRowBytes,
                      row_address(t, queries, head, (tile + 1) * kRows), row_bytes(t),
                      more ? queries.length - (tile + 1) * kRows : 0, pieces, fresh_thread());
      };
      const Copies query_copies = copies_of(p.q, shared.queries);
      const Copies gradient_copies = copies_of(w.params.d_o, shared.d_o);
      const auto copy_between = [&](int step) {
        constexpr int kSteps = kDim / 16, kEach = Copies::kCopies;
        if constexpr (kCopiesBetween) {
#pragma unroll
          for (int i = 0; i < 2 * kEach; ++i) {
            if (i >= step * 2 * kEach / kSteps && i < (step + 1) * 2 * kEach / kSteps) {
              if (i < kEach) {
                query_copies.copy(i);
              } else {
                gradient_copies.copy(i - kEach);
              }
            }
          }
        }
      };
      float2 offsets[Scores::kColumnTiles];  // of keys; levels: of rows. See weight_exponents
      float levels[2 * Scores::kRowTiles];
      if (kHasRegisters) {
#pragma unroll
        for (int i = 0; i < 2 * Scores::kRowTiles; ++i) {
          levels[i] = rows[2 * kRows + 8 * i] - rows[8 * i];
        }
#pragma unroll
        for (int j = 0; j < Scores::kColumnTiles; ++j) {
          offsets[j] = *reinterpret_cast<const float2*>(key_gates + 8 * j);
        }
      }
      multiply<T, false, false, kDim / 16, true>(
          state.s, OperandReader<kDim>::a(queries_at + HalfTile<kDim>::bytes(row), lane),
          OperandReader<kDim>::b(shared_address(shared.keys) + HalfTile<kDim>::bytes(column), lane),
          copy_between);
      commit_copies();
      if (first < first_key + kKeys - 1 ||
          (mask.window > 0 && first_key <= first + kRows - 1 - mask.window)) {
        weight_exponents<kRows, kKeys>(state.s, scale, key_gates, rows, mask,
                                       first + row + lane / 4, first_key + column + lane % 4 * 2);
      } else if (kHasRegisters) {
        weight_exponents(state.s, scale, offsets, levels);
      } else {
        weight_exponents<kRows>(state.s, scale, key_gates, rows);
      }
      weights_and_products<T, kRows, kDim / 16>(
          state.s, state.dp, rows,
          OperandReader<kDim>::a(d_o_at + HalfTile<kDim>::bytes(row), lane),
          OperandReader<kDim>::b(shared_address(shared.values) + HalfTile<kDim>::bytes(column),
                                 lane));
      state.put(state.s, shared.p, row, column, lane);
      float sums[2 * Scores::kRowTiles];  // over rows
      state.score_gradients(sums);
      const auto add_row_sums = [&] {
        using RowSum = QuadSum<2 * Scores::kRowTiles>;
        const float sum = RowSum::of(sums, lane);
        const int summed = tile * kRows + row + RowSum::row(lane);
        // No branch between products: what is not to be added is zero.
        const bool is_added = RowSum::is_first(lane) && summed < queries.length;
        atomicAdd(row_sums + min(summed, queries.length - 1), is_added ? sum : 0.0f);
      };
      if (!kHasRegisters && w.row_sums != nullptr) {
        add_row_sums();
      }
      state.put(state.dp, shared.ds, row, column, lane);
      __syncthreads();  // P and dS are there

      put_row(next, turn ^ 1);
      const int key = KeySums::row(warp), dim = KeySums::column(warp);
      multiply<T, true, true, kRows / 16, false>(
          state.dv,
          OperandReader<kKeys>::a_transposed(shared_address(shared.p), lane)
              .template from_step<KeySums::kRowTiles>(key / 16),
          OperandReader<kDim>::b_transposed(d_o_at, lane)
              .template from_step<KeySums::kColumnTiles / 2>(dim / 16));
      if (w.dq_sums != nullptr) {
        if (kHasRegisters) {
          add_row_sums();
        }
        float dq[QuerySums::kRowTiles][QuerySums::kColumnTiles][4];
        multiply<T, false, true, kKeys / 16, true>(
            dq,
            OperandReader<kKeys>::a(
                shared_address(shared.ds) + HalfTile<kKeys>::bytes(QuerySums::row(warp)), lane),
            OperandReader<kDim>::b_transposed(shared_address(shared.keys), lane)
                .template from_step<QuerySums::kColumnTiles / 2>(QuerySums::column(warp) / 16));
        constexpr int kParts = QuerySums::kRowTiles * QuerySums::kColumnTiles;
        const int64_t slot =
            first_tile_index(w.query_tiles, static_cast<int>(queries.index)) + tile;
        float* const to =
            w.dq_sums + (slot * p.heads + head) * (kRows * kDim) + (warp * kParts * 32 + lane) * 4;
        add_query_gradients<Shape>(dq, to, shared.dq + (warp * kParts * 32 + lane) * 4, lane);
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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (Shape::kStagesSums) {
    wait_for_bulk_additions();
  }
#endif
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
  const auto blocks = static_cast<unsigned>(w.tiles.count * w.params.forward.key_heads);
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

}  // namespace tidegate::kernels::attention
