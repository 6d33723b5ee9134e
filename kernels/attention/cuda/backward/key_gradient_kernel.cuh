#pragma once

// dk, dv and, by additions, dq: the five-product backward pass of FlashAttention with a bias.
//
//   S = Q K^T   P = exp(S - lse)   dP = dO V^T   dS = P (dP - delta + dlse)
//   dv += P^T dO      dk += dS^T Q      dq += dS K  (fp32 additions; not in a deterministic pass)
//
// A block takes kKeys keys of one key/value head and iterates over the tiles of kRows queries that
// see them, of every query head that shares the keys. dk and dv stay in registers from the first
// tile to the last. Eight warps divide each product among themselves, S and dP one way, dk and dv
// another, dq a third; P and dS pass between them through shared memory, in 16 bits.
//
// Two barriers a tile. The first, behind wait_for_copies, says that the stage of Q and dO has
// landed and that all warps are done with the stage, P and dS of the tile before. The second says
// that P and dS are written. The next stage's copies start before or among the products of S. With
// one stage of queries, a third barrier after dk frees it, and the next copies start there.
//
// The gate c enters relative to the block's last key (QueryTiles::reference). In the default pass
// the sums of dS over rows and over columns are sums of the same fp32 values, see
// docs/numerics_ops.md; in a deterministic one, the row sums are those of query_gradient_kernel,
// which computes dS again.
//
// What stands where in the loop is measured: two warps a scheduler hide nothing, so whatever is not
// a product stands between products, without a branch. Compare the machine code after an edit
// (scripts/compare_sass.py).

#include "kernels/attention/cuda/backward/query_gradients.cuh"
#include "kernels/attention/cuda/backward/tiles.cuh"
#include "kernels/attention/cuda/pruning.cuh"

namespace tidegate::kernels::attention {

/// One pair of tiles: where a warp finds its operands, and the phases between the barriers.
template <class Shape>
struct TilePair {
  using T = typename Shape::T;
  using Scores = typename Shape::Scores;
  using KeyGradPart = typename Shape::KeyGradPart;
  using QueryGradPart = typename Shape::QueryGradPart;
  using Accumulators = KeyGradientAccumulators<Shape>;
  static constexpr int kDim = Shape::kDim, kRows = Shape::kRows, kKeys = Shape::kKeys;
  // The next stage's copies stand between the products of S: together, they would hold those up.
  using Copies = TileCopies<kDim, kRows, Shape::kThreads>;
  static constexpr bool kCopiesBetween = Shape::kStages > 1 && Copies::kPossible;
  // One block an SM leaves registers: biases are read before the products of S, row sums added up
  // after those of dv.
  static constexpr bool kHasRegisters = Shape::kBlocksPerSm == 1;

  const KeyTile<Shape>& at;
  const QueryTiles<Shape>& tiles;
  const BackwardShared<Shape>& shared;
  int tile, stage;
  bool more;  // tiles after this one
  int lane;
  unsigned queries_at, d_o_at;
  int row, column;  // of the warp's scores
  const float *key_gates, *rows;

  __device__ __forceinline__ TilePair(const KeyTile<Shape>& block, const QueryTiles<Shape>& tiles,
                                      const BackwardShared<Shape>& shared, int tile, int stage,
                                      bool more)
      : at(block), tiles(tiles), shared(shared), tile(tile), stage(stage), more(more) {
    lane = fresh_thread_index() % 32;
    queries_at = shared_address(shared.queries) + stage % Shape::kStages * Shape::kRowBytes;
    d_o_at = shared_address(shared.d_o) + stage % Shape::kStages * Shape::kRowBytes;
    row = Scores::row(at.warp);
    column = Scores::column(at.warp);
    key_gates = shared.key_gates + column + lane % 4 * 2;
    rows = shared.row_stats + stage * Shape::kRowStats * kRows + row + lane / 4;
  }

  /// S = Q K^T, then the exponents log2 of P. Copies of the next stage stand between the products.
  /// What decides on an edge tile is passed as it is: read through `at`, it gives other code.
  __device__ __forceinline__ void compute_scores(Accumulators& acc, PairMask mask,
                                                 const int& block_first_key, int shift) const {
    const int first = tile * kRows + shift;  // position of the tile's first query
    const int first_key = block_first_key;
    const Copies query_copies = next_stage_copies(at.p.q, shared.queries);
    const Copies d_o_copies = next_stage_copies(at.w.params.d_o, shared.d_o);
    const auto copy_between = [&](int step) {
      constexpr int kSteps = kDim / 16, kEach = Copies::kCopies;
      if constexpr (kCopiesBetween) {
#pragma unroll
        for (int i = 0; i < 2 * kEach; ++i) {
          if (i >= step * 2 * kEach / kSteps && i < (step + 1) * 2 * kEach / kSteps) {
            if (i < kEach) {
              query_copies.copy(i);
            } else {
              d_o_copies.copy(i - kEach);
            }
          }
        }
      }
    };
    float2 key_offsets[Scores::kColumnTiles];  // of keys; row_offsets: of rows. See compute_log2_p
    float row_offsets[2 * Scores::kRowTiles];
    if (kHasRegisters) {
#pragma unroll
      for (int i = 0; i < 2 * Scores::kRowTiles; ++i) {
        row_offsets[i] = rows[2 * kRows + 8 * i] - rows[8 * i];
      }
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        key_offsets[j] = *reinterpret_cast<const float2*>(key_gates + 8 * j);
      }
    }
    multiply<T, false, false, kDim / 16, true>(
        acc.s, OperandReader<kDim>::a(queries_at + Tile16Bit<kDim>::bytes(row), lane),
        OperandReader<kDim>::b(shared_address(shared.keys) + Tile16Bit<kDim>::bytes(column), lane),
        copy_between);
    commit_copies();
    // Edge tiles: the diagonal, and the far end of the window.
    if (first < first_key + kKeys - 1 ||
        (mask.window > 0 && first_key <= first + kRows - 1 - mask.window)) {
      compute_log2_p<kRows, kKeys>(acc.s, at.scale, key_gates, rows, mask, first + row + lane / 4,
                                   first_key + column + lane % 4 * 2);
    } else if (kHasRegisters) {
      compute_log2_p(acc.s, at.scale, key_offsets, row_offsets);
    } else {
      compute_log2_p<kRows>(acc.s, at.scale, key_gates, rows);
    }
  }

  /// dP = dO V^T - delta + dlse, with P = exp2 of the exponents between the products.
  __device__ __forceinline__ void compute_p_and_dp(Accumulators& acc) const {
    attention::compute_p_and_dp<T, kRows, kDim / 16>(
        acc.s, acc.dp, rows, OperandReader<kDim>::a(d_o_at + Tile16Bit<kDim>::bytes(row), lane),
        OperandReader<kDim>::b(shared_address(shared.values) + Tile16Bit<kDim>::bytes(column),
                               lane));
  }

  /// Adds the sums of dS over the warp's keys to those of its rows.
  __device__ __forceinline__ void add_row_sums(float* row_sums,
                                               const float (&sums)[2 * Scores::kRowTiles]) const {
    using RowSum = QuadSum<2 * Scores::kRowTiles>;
    const float sum = RowSum::of(sums, lane);
    const int summed = tile * kRows + row + RowSum::row(lane);
    // No branch between products: what is not to be added is zero.
    const bool is_added = RowSum::is_first(lane) && summed < at.queries.length;
    atomicAdd(row_sums + min(summed, at.queries.length - 1), is_added ? sum : 0.0f);
  }

  __device__ __forceinline__ void accumulate_dv(Accumulators& acc) const {
    accumulate_key_gradient(acc.dv, shared.p, d_o_at);
  }
  __device__ __forceinline__ void accumulate_dk(Accumulators& acc) const {
    accumulate_key_gradient(acc.dk, shared.ds, queries_at);
  }

  /// dq += dS K, in device memory.
  __device__ __forceinline__ void add_dq() const {
    float dq[QueryGradPart::kRowTiles][QueryGradPart::kColumnTiles][4];
    multiply<T, false, true, kKeys / 16, true>(
        dq,
        OperandReader<kKeys>::a(
            shared_address(shared.ds) + Tile16Bit<kKeys>::bytes(QueryGradPart::row(at.warp)), lane),
        OperandReader<kDim>::b_transposed(shared_address(shared.keys), lane)
            .template from_step<QueryGradPart::kColumnTiles / 2>(QueryGradPart::column(at.warp) /
                                                                 16));
    constexpr int kParts = QueryGradPart::kRowTiles * QueryGradPart::kColumnTiles;
    const int64_t tile_index =
        first_tile_index(at.w.query_tiles, static_cast<int>(at.queries.index)) + tile;
    float* const to = at.w.dq_sums + (tile_index * at.p.heads + tiles.head) * (kRows * kDim) +
                      (at.warp * kParts * 32 + lane) * 4;
    add_dq_tile<Shape>(dq, to, shared.dq + (at.warp * kParts * 32 + lane) * 4, lane);
  }

 private:
  __device__ __forceinline__ Copies next_stage_copies(const HeadSeries& t,
                                                      const unsigned char* to) const {
    return Copies(shared_address(to) + (stage ^ 1) % Shape::kStages * Shape::kRowBytes,
                  row_address<2>(t, at.queries, tiles.head, (tile + 1) * kRows), row_stride<2>(t),
                  more ? at.queries.length - (tile + 1) * kRows : 0, at.pieces,
                  fresh_thread_index());
  }

  /// dk or dv += scores^T rows, the warp's part of it.
  __device__ __forceinline__ void accumulate_key_gradient(
      float (&gradient)[KeyGradPart::kRowTiles][KeyGradPart::kColumnTiles][4],
      const unsigned char* scores, unsigned rows_at) const {
    const int key = KeyGradPart::row(at.warp), dim = KeyGradPart::column(at.warp);
    multiply<T, true, true, kRows / 16, false>(
        gradient,
        OperandReader<kKeys>::a_transposed(shared_address(scores), lane)
            .template from_step<KeyGradPart::kRowTiles>(key / 16),
        OperandReader<kDim>::b_transposed(rows_at, lane)
            .template from_step<KeyGradPart::kColumnTiles / 2>(dim / 16));
  }
};

/// Sums of dS over queries: over the lanes of a key, then over the warps of a key in their order.
template <class Shape>
__device__ __forceinline__ void store_column_sums(const KeyTile<Shape>& at,
                                                  const BackwardShared<Shape>& shared,
                                                  KeyGradientAccumulators<Shape>& acc, int head) {
  using Scores = typename Shape::Scores;
  constexpr int kKeys = Shape::kKeys;
  wait_for_copies<0>();
  __syncthreads();
  const int thread = fresh_thread_index(), lane = thread % 32;
  float* const sums = shared.row_stats;
  static_assert(Scores::kWarpsOfRows * kKeys <= 2 * Shape::kRowStats * Shape::kRows);
#pragma unroll
  for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float x = acc.column_sum(j, e);
      x += __shfl_xor_sync(0xffffffffu, x, 4);
      x += __shfl_xor_sync(0xffffffffu, x, 8);
      x += __shfl_xor_sync(0xffffffffu, x, 16);
      if (lane < 4) {
        sums[at.warp % Scores::kWarpsOfRows * kKeys + Scores::column(at.warp) + 8 * j + 2 * lane +
             e] = x;
      }
    }
  }
  __syncthreads();
  if (thread < at.place.tile.tokens) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Scores::kWarpsOfRows; ++i) {
      sum += sums[i * kKeys + thread];
    }
    at.w.column_sums[(at.keys.batch * at.p.heads + head) * at.p.key_layout.time + at.keys.start +
                     at.first_key + thread] = sum;
  }
}

/// dk and dv leave through the tiles of keys and values.
template <class Shape>
__device__ __forceinline__ void store_dk_dv(const KeyTile<Shape>& at,
                                            const BackwardShared<Shape>& shared,
                                            const KeyGradientAccumulators<Shape>& acc) {
  using T = typename Shape::T;
  using KeyGradPart = typename Shape::KeyGradPart;
  constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kThreads = Shape::kThreads;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (Shape::kDqViaSmem) {
    wait_for_bulk_additions();
  }
#endif
  __syncthreads();
  const int thread = fresh_thread_index(), lane = thread % 32;
  const int key = KeyGradPart::row(at.warp), dim = KeyGradPart::column(at.warp);
  const float dk_scale = static_cast<float>(at.p.scale);
#pragma unroll
  for (int i = 0; i < KeyGradPart::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < KeyGradPart::kColumnTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int offset =
            Tile16Bit<kDim>::offset(key + 16 * i + 8 * half + lane / 4, dim / 8 + j) + lane % 4 * 4;
        const float* const dk = acc.dk[i][j] + 2 * half;
        const float* const dv = acc.dv[i][j] + 2 * half;
        *reinterpret_cast<uint32_t*>(shared.keys + offset) =
            pack_pair<T>(dk[0] * dk_scale, dk[1] * dk_scale);
        *reinterpret_cast<uint32_t*>(shared.values + offset) = pack_pair<T>(dv[0], dv[1]);
      }
    }
  }
  __syncthreads();
  store_tile<kDim, kKeys, kThreads>(
      row_address<2>(at.w.params.dk, at.keys, at.key_head, at.first_key),
      row_stride<2>(at.w.params.dk), shared.keys, at.place.tile.tokens, at.pieces, thread);
  store_tile<kDim, kKeys, kThreads>(
      row_address<2>(at.w.params.dv, at.keys, at.key_head, at.first_key),
      row_stride<2>(at.w.params.dv), shared.values, at.place.tile.tokens, at.pieces, thread);
}

/// Begins with a query head. When this returns, the head's first tile is on its way, and in shared
/// memory are the tile's statistics and the gates of the block's keys; sums of columns are zero.
/// `tile` is passed as it is: copied, it gives other code.
template <class Shape>
__device__ __forceinline__ void begin_head(QueryTiles<Shape>& queries,
                                           KeyGradientAccumulators<Shape>& acc, const int& tile) {
  __syncthreads();           // the tiles of the head before have been read
  if (tile < queries.end) {  // under way before anything waits for memory
    queries.load_stage(tile, 0);
  }
  commit_copies();
  const RawRowStats row = queries.read_row_stats(tile);
  const auto key_gate = queries.read_key_gate();
  queries.apply_key_extents();
  queries.store_row_stats(row, 0);
  queries.store_key_gate(key_gate);
#pragma unroll
  for (int j = 0; j < Shape::Scores::kColumnTiles; ++j) {
    acc.column_sum(j, 0) = acc.column_sum(j, 1) = 0;
  }
}

/// Block block_index's tile: its dk, dv, sums of columns, and its part of dq and of the sums of
/// rows.
template <class Shape>
__device__ __forceinline__ void compute_key_gradients(const TensorAttention& w,
                                                      unsigned block_index,
                                                      unsigned char* shared_bytes) {
  using Pair = TilePair<Shape>;
  const BackwardShared<Shape> shared(shared_bytes);
  const ForgettingAttentionParams& p = w.params.forward;
  const TileAndHead place(w.tiles, p.key_heads, w.side_by_side, block_index, false);
  if (place.tile.tokens == 0 || !takes_head(w, place.tile.sequence.index, place.head)) {
    return;
  }
  const KeyTile<Shape> block(w, place);
  block.load_keys_and_values(shared);

  KeyGradientAccumulators<Shape> acc;
  for (int head = block.key_head * block.group; head < (block.key_head + 1) * block.group; ++head) {
    QueryTiles<Shape> queries(block, shared, head);
    float* const row_sums =
        w.row_sums + (block.queries.batch * p.heads + head) * p.layout.time + block.queries.start;
    int tile = queries.begin;
    begin_head(queries, acc, tile);

    for (int stage = 0; tile < queries.end; ++tile, stage ^= 1) {
      wait_for_copies<0>();
      __syncthreads();  // the tile is there, and all are done with the one before it
      const bool more = tile + 1 < queries.end;
      const RawRowStats next = queries.read_row_stats(tile + 1);
      if (Shape::kStages > 1 && !Pair::kCopiesBetween && more) {
        queries.load_stage(tile + 1, stage ^ 1);
      }
      const Pair pair(block, queries, shared, tile, stage, more);
      pair.compute_scores(acc, block.mask, block.first_key, block.shift);
      pair.compute_p_and_dp(acc);
      acc.store_smem(acc.s, shared.p, pair.row, pair.column, pair.lane);
      float sums[2 * Shape::Scores::kRowTiles];  // of dS over the warp's keys
      acc.compute_ds(sums);
      if (!Pair::kHasRegisters && w.row_sums != nullptr) {
        pair.add_row_sums(row_sums, sums);
      }
      acc.store_smem(acc.dp, shared.ds, pair.row, pair.column, pair.lane);
      __syncthreads();  // P and dS are there

      queries.store_row_stats(next, stage ^ 1);
      pair.accumulate_dv(acc);
      if (w.dq_sums != nullptr) {
        if (Pair::kHasRegisters) {
          pair.add_row_sums(row_sums, sums);
        }
        pair.add_dq();
      }
      pair.accumulate_dk(acc);
      if (Shape::kStages == 1 && more) {
        __syncthreads();
        queries.load_stage(tile + 1, 0);
        commit_copies();
      }
    }
    store_column_sums(block, shared, acc, head);
  }
  store_dk_dv(block, shared, acc);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    key_gradient_kernel(const __grid_constant__ TensorAttention w) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  compute_key_gradients<Shape>(w, blockIdx.x, shared_bytes);
}

/// The tiles of long-range heads, taken one after the other by blocks that stay: where there
/// are no such heads, a block for every tile would take longer to start than these to leave.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    long_range_key_gradient_kernel(const __grid_constant__ TensorAttention w) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ unsigned taken;
  if (w.extents.long_range[0] == 0) {
    return;
  }
  const auto blocks = static_cast<unsigned>(w.tiles.count * w.params.forward.key_heads);
#pragma unroll 1
  for (;;) {
    __syncthreads();  // all are done with the tile before
    if (threadIdx.x == 0) {
      taken = atomicAdd(w.extents.long_range + 1, 1u);
    }
    __syncthreads();
    if (taken >= blocks) {
      return;
    }
    compute_key_gradients<Shape>(w, taken, shared_bytes);
  }
}

}  // namespace tidegate::kernels::attention
