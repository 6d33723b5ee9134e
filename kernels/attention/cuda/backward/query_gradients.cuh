#pragma once

// dq, which a backward pass makes in one of two ways: by additions of the key-gradient kernel to
// sums in device memory, which are converted in the end, or, where the portable kernels must be
// deterministic, by a kernel of its own. (On Hopper such a pass puts the additions in order.)

#include "kernels/attention/cuda/backward/tiles.cuh"
#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/pruning.cuh"
#include "kernels/attention/cuda/smem_tiles.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/attention/cuda/work.cuh"

namespace tidegate::kernels::attention {

// ---- By additions ----
//
// dq where several blocks add to it: the five-product backward pass keeps it in fp32, in the order
// in which the warps of the key-gradient kernel hold its accumulators, so that an addition is whole
// 16-byte pieces and nothing has to be rearranged in the hot loop. Here are both ends of that
// layout: how a warp adds its part of a tile, and the kernel that converts the sums to dq's dtype.

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
/// thread's own. After a __syncwarp of the warp that wrote them.
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

/// Adds a warp's part of a tile of dq to that in device memory, in the order in which lanes hold
/// it: see convert_dq_kernel. `to`, `staged`: of the lane's first four floats. On 9.0, where
/// kDqViaSmem, by way of shared memory, from where the copy engine adds it.
template <class Shape>
__device__ __forceinline__ void add_dq_tile(
    const float (&dq)[Shape::QueryGradPart::kRowTiles][Shape::QueryGradPart::kColumnTiles][4],
    float* to, float* staged, int lane) {
  using Part = typename Shape::QueryGradPart;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr bool kDqViaSmem = Shape::kDqViaSmem;
  if constexpr (kDqViaSmem) {
    if (lane == 0) {
      wait_for_bulk_reads();
    }
    __syncwarp();
  }
#else
  constexpr bool kDqViaSmem = false;
#endif
#pragma unroll
  for (int i = 0; i < Part::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < Part::kColumnTiles; ++j) {
      const int at = (i * Part::kColumnTiles + j) * 128;
      if constexpr (kDqViaSmem) {
        const float (&x)[4] = dq[i][j];
        *reinterpret_cast<float4*>(staged + at) = make_float4(x[0], x[1], x[2], x[3]);
      } else {
        add_four(to + at, dq[i][j]);
      }
    }
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kDqViaSmem) {
    show_to_copy_engine();
    __syncwarp();
    if (lane == 0) {
      add_bulk<static_cast<int>(sizeof(dq)) * 32>(to, staged);
    }
  }
#endif
}

/// dq of a tile of queries from its sums: they lie in the order in which the warps that made them
/// hold accumulators. `rounded`: Shape::kRowBytes of shared memory.
template <class Shape>
__device__ __forceinline__ void convert_dq_tile(const TensorAttention& w, const TileAndHead& place,
                                                unsigned char* rounded) {
  using T = typename Shape::T;
  using QueryGradPart = typename Shape::QueryGradPart;
  constexpr int kDim = Shape::kDim, kRows = Shape::kRows;
  const ForgettingAttentionParams& p = w.params.forward;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const float scale = static_cast<float>(p.scale);
  constexpr int kParts = QueryGradPart::kRowTiles * QueryGradPart::kColumnTiles;
  const float* const from = w.dq_sums + (place.tile_index * p.heads + place.head) * (kRows * kDim) +
                            (warp * kParts * 32 + lane) * 4;
#pragma unroll
  for (int i = 0; i < QueryGradPart::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < QueryGradPart::kColumnTiles; ++j) {
      const float4 x =
          *reinterpret_cast<const float4*>(from + (i * QueryGradPart::kColumnTiles + j) * 128);
      unsigned char* const to =
          rounded +
          Tile16Bit<kDim>::offset(QueryGradPart::row(warp) + 16 * i + lane / 4,
                                  QueryGradPart::column(warp) / 8 + j) +
          lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(x.x * scale, x.y * scale);
      *reinterpret_cast<uint32_t*>(to + 8 * Tile16Bit<kDim>::kRowBytes) =
          pack_pair<T>(x.z * scale, x.w * scale);
    }
  }
  __syncthreads();
  store_tile<kDim, kRows, Shape::kThreads>(
      row_address<2>(w.params.dq, place.tile.sequence, place.head, place.tile.first),
      row_stride<2>(w.params.dq), rounded, place.tile.tokens, static_cast<int>(p.head_dim / 8),
      thread);
}

/// dq from its sums, a block a tile of queries. The first blocks add up chunks of gates' gradients.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    convert_dq_kernel(const __grid_constant__ TensorAttention w,
                      const __grid_constant__ GateChunks<GateGradientScan<float>> gates) {
  static_assert(Shape::kThreads == kGateChunk);
  if (blockIdx.x < gates.blocks()) {
    gates.add_up(blockIdx.x);
    return;
  }
  extern __shared__ __align__(128) unsigned char rounded[];
  // Blocks go from the last head on, whose sums the L2 still has.
  const TileAndHead place(w.query_tiles, w.params.forward.heads, 1, gridDim.x - 1 - blockIdx.x,
                          false);
  if (place.tile.tokens > 0) {
    convert_dq_tile<Shape>(w, place, rounded);
  }
}

// Where a pass has sums for long-range heads alone (TensorAttention::has_short_range), blocks stay:
// where there are no such heads, a block for every tile would take longer to start than these to
// leave.

/// Calls take(place) for the tiles of queries of long-range heads that are this block's, one of
/// `blocks`.
template <class F>
__device__ __forceinline__ void for_each_long_range_tile(const TensorAttention& w, unsigned block,
                                                         unsigned blocks, const F& take) {
  const ForgettingAttentionParams& p = w.params.forward;
  const auto count = static_cast<unsigned>(w.query_tiles.count * p.heads);
  const int group = static_cast<int>(p.heads / p.key_heads);
  if (w.extents.long_range[0] == 0) {
    return;
  }
#pragma unroll 1
  for (; block < count; block += blocks) {
    const TileAndHead place(w.query_tiles, p.heads, 1, block, false);
    if (place.tile.tokens > 0 && takes_head(w, place.tile.sequence.index, place.head / group)) {
      take(place);
    }
  }
}

/// convert_dq_kernel for the long-range heads alone.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads) convert_long_range_dq_kernel(
    const __grid_constant__ TensorAttention w,
    const __grid_constant__ GateChunks<GateGradientScan<float>> gates) {
  if (blockIdx.x < gates.blocks()) {
    gates.add_up(blockIdx.x);
    return;
  }
  extern __shared__ __align__(128) unsigned char rounded[];
  for_each_long_range_tile(w, blockIdx.x - gates.blocks(), gridDim.x - gates.blocks(),
                           [&](const TileAndHead& place) {
                             convert_dq_tile<Shape>(w, place, rounded);
                             __syncthreads();  // all have read what the next tile overwrites
                           });
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    clear_long_range_dq_kernel(const __grid_constant__ TensorAttention w) {
  constexpr int kFloats = Shape::kRows * Shape::kDim;
  for_each_long_range_tile(w, blockIdx.x, gridDim.x, [&](const TileAndHead& place) {
    auto* const to = reinterpret_cast<float4*>(
        w.dq_sums + (place.tile_index * w.params.forward.heads + place.head) * kFloats);
#pragma unroll
    for (int i = 0; i < kFloats / 4; i += Shape::kThreads) {
      to[i + threadIdx.x] = float4{};
    }
  });
}

// ---- By a kernel of its own ----
//
// dq and the sums of dS over rows without additions in device memory: the second kernel of a
// deterministic backward pass, which computes S, dP and dS again (seven products instead of five).
//
//   S = Q K^T   P = exp(S - lse)   dP = dO V^T   dS = P (dP - delta + dlse)   dq += dS K
//
// A block takes kRows queries of one head, as in the forward pass: every warp its own 16 *
// kRowTiles rows, with dq in registers, iterating over tiles of kKeys keys from the diagonal to the
// left. dS goes from the accumulators of dP straight into the operand of the last product.
//
// Keys and values come by cp.async into two stages. One barrier a tile, behind wait_for_copies,
// says that the stage has landed and that all warps are done with the one that is loaded next.

template <class Shape>
struct QueryGradientShared {
  unsigned char* queries;
  unsigned char* d_o;
  unsigned char* stages;  // two of keys and values
  float* key_gates;       // [2][2][kKeys]: c_ref - c_j, high and low parts
  float* row_stats;       // [4][kRows], see write_row_stats

  __device__ __forceinline__ explicit QueryGradientShared(unsigned char* shared)
      : queries(shared),
        d_o(queries + Shape::kRowBytes),
        stages(d_o + Shape::kRowBytes),
        key_gates(reinterpret_cast<float*>(stages + 2 * Shape::kStageBytes)),
        row_stats(key_gates + 4 * Shape::kKeys) {}
};

/// The block's queries, the keys that they see, and how both get into shared memory.
template <class Shape>
struct QueryBlock {
  static constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kRows = Shape::kRows;
  static constexpr int kThreads = Shape::kThreads;

  const TensorAttention& w;
  const ForgettingAttentionParams& p;
  const QueryGradientShared<Shape>& shared;
  const TileAndHead& place;
  int rows, head;
  const Sequence& queries;
  Sequence keys;
  int64_t key_head;
  int warp;
  int first, last;  // positions of the rows
  PairMask mask;
  GateSums gates;
  KeyTileRange tiles;
  int pieces;  // of 16 bytes, of a row
  double reference;
  const char *k, *v;
  int64_t first_row;

  __device__ __forceinline__ QueryBlock(const TensorAttention& work,
                                        const QueryGradientShared<Shape>& smem,
                                        const TileAndHead& at)
      : w(work),
        p(work.params.forward),
        shared(smem),
        place(at),
        rows(at.tile.tokens),
        head(at.head),
        queries(at.tile.sequence),
        keys(find_sequence(p.key_layout, queries.index)),
        key_head(head / (p.heads / p.key_heads)),
        warp(static_cast<int>(threadIdx.x) / 32),
        first(at.tile.first + keys.length - queries.length),
        last(first + rows - 1),
        mask{static_cast<int>(p.window)},
        gates(work, keys, head),
        tiles(KeyTileRange::of<kKeys>(first, last, mask.window)),
        pieces(static_cast<int>(p.head_dim / 8)),
        reference(gates.at(first)) {
    if (p.prune > 0 && first > 0) {
      const double fall = largest_fall(p, keys.length, ScoreBounds::score(w, keys.batch, head));
      const int oldest = gates.first_not_above(reference + fall, first, fresh_thread_index() % 32);
      tiles.begin = max(tiles.begin, oldest / kKeys);
    }
    k = row_address<2>(p.k, keys, key_head, 0);
    v = row_address<2>(p.v, keys, key_head, 0);
    first_row = (queries.batch * p.heads + head) * p.layout.time + queries.start + at.tile.first;
  }

  __device__ __forceinline__ void load_stage(int tile, int stage) const {
    const int64_t row = int64_t{tile} * kKeys;
    const int thread = fresh_thread_index(), limit = keys.length - tile * kKeys;
    const unsigned to = shared_address(shared.stages) + stage * Shape::kStageBytes;
    load_tile<kDim, kKeys, kThreads>(to, k + row * row_stride<2>(p.k), row_stride<2>(p.k), limit,
                                     pieces, thread);
    load_tile<kDim, kKeys, kThreads>(to + Shape::kKeyBytes, v + row * row_stride<2>(p.v),
                                     row_stride<2>(p.v), limit, pieces, thread);
  }
  __device__ __forceinline__ void store_key_gate(double c, int stage) const {
    const SplitGate gate = SplitGate::of(reference - c);
    float* const to = shared.key_gates + stage * 2 * kKeys + fresh_thread_index();
    to[0] = gate.high;
    to[kKeys] = gate.low;
  }

  /// The block's Q and dO, its rows' statistics, and the first stage.
  __device__ __forceinline__ void load_first() const {
    const int thread = fresh_thread_index();
    load_rows(p.q, shared.queries, thread);
    load_rows(w.params.d_o, shared.d_o, thread);
    if (tiles.end > tiles.begin) {
      load_stage(tiles.end - 1, 0);
      if (thread < kKeys) {
        store_key_gate(gates.at((tiles.end - 1) * kKeys + thread), 0);
      }
    }
    commit_copies();
    for (int row = thread; row < kRows; row += kThreads) {
      const bool exists = row < rows;
      write_row_stats<kRows>(
          shared.row_stats + row,
          {gates.at(first + row),
           exists ? static_cast<const float*>(p.lse)[first_row + row] : -INFINITY,
           exists ? w.delta_minus_dlse[first_row + row] : 0.0f},
          reference);
    }
  }

 private:
  __device__ __forceinline__ void load_rows(const HeadSeries& t, unsigned char* to,
                                            int thread) const {
    load_tile<kDim, kRows, kThreads>(shared_address(to),
                                     row_address<2>(t, queries, head, place.tile.first),
                                     row_stride<2>(t), rows, pieces, thread);
  }
};

/// One warp's rows: dq and the sums of dS, and the phases of a tile of keys.
template <class Shape>
struct QueryGradientWarp {
  using T = typename Shape::T;
  static constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kRows = Shape::kRows;
  static constexpr int kRowTiles = Shape::kRowTiles, kColumnTiles = kKeys / 8;
  using Scores = float[kRowTiles][kColumnTiles][4];

  float dq[kRowTiles][kDim / 8][4] = {};
  float sums[2 * kRowTiles] = {};

  /// dq += dS K for one tile of keys; `key` is its first.
  __device__ __forceinline__ void accumulate(const QueryBlock<Shape>& at, int warp_row,
                                             int warp_first, float scale, int key, int stage) {
    const int lane = fresh_thread_index() % 32;
    const float* const key_gates = at.shared.key_gates + stage * 2 * kKeys + lane % 4 * 2;
    const float* const stats = at.shared.row_stats + warp_row + lane / 4;
    const unsigned keys_at = shared_address(at.shared.stages) + stage * Shape::kStageBytes;
    const int own = Tile16Bit<kDim>::bytes(warp_row);
    Scores s, dp;
    multiply<T, false, false, kDim / 16, true>(
        s, OperandReader<kDim>::a(shared_address(at.shared.queries) + own, lane),
        OperandReader<kDim>::b(keys_at, lane));
    if (key + kKeys - 1 > at.first || (at.mask.window > 0 && key <= at.last - at.mask.window)) {
      compute_log2_p<kRows, kKeys>(s, scale, key_gates, stats, at.mask, warp_first + lane / 4,
                                   key + lane % 4 * 2);
    } else {
      compute_log2_p<kRows>(s, scale, key_gates, stats);
    }
    compute_p_and_dp<T, kRows, kDim / 16>(
        s, dp, stats, OperandReader<kDim>::a(shared_address(at.shared.d_o) + own, lane),
        OperandReader<kDim>::b(keys_at + Shape::kKeyBytes, lane));
    compute_ds(dp, s);
    accumulate_dq(dp, OperandReader<kDim>::b_transposed(keys_at, lane));
  }

  /// The rows' sums of dS, and dq through the tile of queries.
  __device__ __forceinline__ void store(const QueryBlock<Shape>& at, int warp_row) {
    const int lane = fresh_thread_index() % 32;
    unsigned char* const own = at.shared.queries + Tile16Bit<kDim>::bytes(warp_row);
    const float dq_scale = static_cast<float>(at.p.scale);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      sums[i] = quad_sum(sums[i]);
      const int row = 8 * i + lane / 4;
      if (lane % 4 == 0 && warp_row + row < at.rows) {
        at.w.row_sums[at.first_row + warp_row + row] = sums[i];
      }
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const float* const x = dq[i / 2][j] + i % 2 * 2;
        *reinterpret_cast<uint32_t*>(own + Tile16Bit<kDim>::offset(row, j) + lane % 4 * 4) =
            pack_pair<T>(x[0] * dq_scale, x[1] * dq_scale);
      }
    }
    __syncwarp();
    store_tile<kDim, Shape::kWarpRows, 32>(
        row_address<2>(at.w.params.dq, at.queries, at.head, at.place.tile.first + warp_row),
        row_stride<2>(at.w.params.dq), own, at.rows - warp_row, at.pieces, lane);
  }

 private:
  /// dp = dS = P dp, adding up its rows.
  __device__ __forceinline__ void compute_ds(Scores& dp, const Scores& s) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = dp[i / 2][j][i % 2 * 2 + e];
          x *= s[i / 2][j][i % 2 * 2 + e];
          sums[i] += x;
        }
      }
    }
  }

  __device__ __forceinline__ void accumulate_dq(const Scores& ds, const OperandReader<kDim>& keys) {
#pragma unroll
    for (int chunk = 0; chunk < kKeys / 16; ++chunk) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&x)[4] = ds[i][2 * chunk + half];
          a[i][2 * half] = pack_pair<T>(x[0], x[1]);
          a[i][2 * half + 1] = pack_pair<T>(x[2], x[3]);
        }
      }
#pragma unroll
      for (int pair = 0; pair < kDim / 16; ++pair) {
        uint32_t b[4];
        keys.transposed(b, 16 * chunk, pair);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            mma<T>(dq[i][2 * pair + half], a[i], b[2 * half], b[2 * half + 1]);
          }
        }
      }
    }
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    query_gradient_kernel(const __grid_constant__ TensorAttention w) {
  constexpr int kKeys = Shape::kKeys;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const QueryGradientShared<Shape> shared(shared_bytes);
  const TileAndHead place(w.tiles, w.params.forward.heads, w.side_by_side, blockIdx.x, true);
  if (place.tile.tokens == 0) {
    return;
  }
  const QueryBlock<Shape> at(w, shared, place);
  at.load_first();

  QueryGradientWarp<Shape> state;
  const int warp_row = at.warp * Shape::kWarpRows;
  const int warp_first = at.first + warp_row, warp_last = warp_first + Shape::kWarpRows - 1;
  const float scale = static_cast<float>(at.p.scale) * kLog2E;
  int stage = 0;
  for (int tile = at.tiles.end - 1; tile >= at.tiles.begin; --tile, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // the tile is there, and all are done with the one before it
    double next_gate = 0;
    const bool more = tile > at.tiles.begin;
    if (more) {
      at.load_stage(tile - 1, stage ^ 1);
      const int thread = fresh_thread_index();
      next_gate = thread < kKeys ? at.gates.at((tile - 1) * kKeys + thread) : 0.0;
    }
    commit_copies();
    const int key = tile * kKeys;
    if (key <= warp_last &&
        (at.mask.window == 0 || key + kKeys > warp_first - at.mask.window + 1)) {
      state.accumulate(at, warp_row, warp_first, scale, key, stage);
    }
    if (more && fresh_thread_index() < kKeys) {
      at.store_key_gate(next_gate, stage ^ 1);
    }
  }
  if (at.tiles.end <= at.tiles.begin) {  // the queries that stand where dq goes have not landed
    wait_for_copies<0>();
    __syncthreads();
  }
  state.store(at, warp_row);
}

}  // namespace tidegate::kernels::attention
