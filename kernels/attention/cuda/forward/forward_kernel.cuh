#pragma once

// The forward pass on tensor cores: FlashAttention with a bias c_i - c_j.
//
//   S = Q K^T + c_i - c_j   m' = max(m, rowmax S)   P = exp(S - m')   l, o *= exp(m - m')
//   l += rowsum P   o += P V            at the end   o /= l   lse = m + log l
//
// A block takes kRows queries of one head, every warp 16 * kRowTiles of them with outputs, maxima
// and sums in registers, and iterates over tiles of kKeys keys from the diagonal to the left,
// kPart keys at a time. Keys and values come by cp.async into two stages.
//
// One barrier a tile, behind wait_for_copies: the stage has landed, and all warps are done with the
// one that is loaded next. Edge tiles (the diagonal, the window's far end) add a vote on values
// that are not finite, and two barriers where there are any.
//
// Registers are short: what only the copy of the next tile needs waits in shared memory
// (BlockConstants), thread indices are read anew where they are needed.

#include "kernels/attention/cuda/forward/online_softmax.cuh"
#include "kernels/attention/cuda/pruning.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels::attention {

/// What only a copy of the next tile needs: kept in shared memory, since the loop has no registers
/// left.
struct BlockConstants {
  const char *k, *v;
  const double* gates;
  double reference;
  int last_key;
};

/// The shared memory of a block.
template <class Shape>
struct ForwardShared {
  unsigned char* queries;
  unsigned char* stages;  // of keys and values
  float* key_gates;       // [2][2][kKeys]: c_ref - c_j, high and low parts
  float* row_gates;       // [2][kRows]: c_i - c_ref
  int* norm;  // largest squared norm of a query: bits of a float of at least 0, NaN the largest
  BlockConstants* constants;

  __device__ explicit ForwardShared(unsigned char* shared)
      : queries(shared),
        stages(queries + Shape::kQueryBytes),
        key_gates(reinterpret_cast<float*>(stages + Shape::kStages * Shape::kStageBytes)),
        row_gates(key_gates + 4 * Shape::kKeys),
        norm(reinterpret_cast<int*>(row_gates + 2 * Shape::kRows)),
        constants(reinterpret_cast<BlockConstants*>(norm + 2)) {}

  __device__ unsigned char* keys(int stage) const { return stages + stage * Shape::kStageBytes; }
  __device__ unsigned char* values(int stage) const { return keys(stage) + Shape::kKeyBytes; }
};

/// The largest squared norm of the tile's queries, the same for every thread.
template <class Shape>
__device__ inline float largest_query(const ForwardShared<Shape>& shared, int thread) {
  using T = typename Shape::T;
  if (thread == 0) {
    *shared.norm = 0;
  }
  __syncthreads();
  for (int row = thread; row < Shape::kRows; row += Shape::kThreads) {
    float square = 0;
    for (int piece = 0; piece < Shape::kDim / 8; ++piece) {
      const auto x = *reinterpret_cast<const Pack<T, 8>*>(
          shared.queries + Tile16Bit<Shape::kDim>::offset(row, piece));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        square = fmaf(x.get(e), x.get(e), square);
      }
    }
    atomicMax(shared.norm, __float_as_int(square) & 0x7fffffff);  // NaN is the largest
  }
  __syncthreads();
  return __int_as_float(*shared.norm);
}

/// The block's queries, the keys that they see, and how both get into shared memory.
template <class Shape>
struct ForwardBlock {
  static constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kThreads = Shape::kThreads;

  const TensorAttention& w;
  const ForgettingAttentionParams& p;
  const ForwardShared<Shape>& shared;
  const TileAndHead& place;
  int rows, head;
  const Sequence& queries;
  Sequence keys;
  int64_t key_head;
  int thread, lane, warp;
  int first, last;  // positions of the rows
  PairMask mask;
  GateSums gates;
  KeyTileRange tiles;
  int pieces;  // of 16 bytes, of a row

  __device__ __forceinline__ ForwardBlock(const TensorAttention& work,
                                          const ForwardShared<Shape>& smem, const TileAndHead& at)
      : w(work),
        p(work.params.forward),
        shared(smem),
        place(at),
        rows(at.tile.tokens),
        head(at.head),
        queries(at.tile.sequence),
        keys(find_sequence(p.key_layout, queries.index)),
        key_head(head / (p.heads / p.key_heads)),
        thread(threadIdx.x),
        lane(thread % 32),
        warp(thread / 32),
        first(at.tile.first + keys.length - queries.length),
        last(first + rows - 1),
        mask{static_cast<int>(p.window)},
        gates(work, keys, head),
        tiles(KeyTileRange::of<kKeys>(first, last, mask.window)),
        pieces(static_cast<int>(p.head_dim / 8)) {}

  __device__ __forceinline__ void store_constants() const {
    volatile BlockConstants& constants = *shared.constants;  // read each time, not kept
    if (thread == 0) {
      constants.k = row_address<2>(p.k, keys, key_head, 0);
      constants.v = row_address<2>(p.v, keys, key_head, 0);
      constants.gates = gates.data();
      constants.reference = gates.at(first);
      constants.last_key = keys.length - 1;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load_stage(int tile, int stage) const {
    const volatile BlockConstants& constants = *shared.constants;
    const int64_t row = int64_t{tile} * kKeys;
    const int thread = fresh_thread_index();
    const int limit = constants.last_key + 1 - tile * kKeys;
    const char* const k = const_cast<const char*>(constants.k);
    const char* const v = const_cast<const char*>(constants.v);
    const unsigned to = shared_address(shared.keys(stage));
    load_tile<kDim, kKeys, kThreads>(to, k + row * row_stride<2>(p.k), row_stride<2>(p.k), limit,
                                     pieces, thread);
    load_tile<kDim, kKeys, kThreads>(to + Shape::kKeyBytes, v + row * row_stride<2>(p.v),
                                     row_stride<2>(p.v), limit, pieces, thread);
  }

  /// A key's c is read one tile ahead and worked out later, so that nothing waits for it.
  __device__ __forceinline__ double read_key_gate(int tile) const {
    const volatile BlockConstants& constants = *shared.constants;
    const int key = tile * kKeys + fresh_thread_index();
    return fresh_thread_index() < kKeys ? constants.gates[min(key, constants.last_key)] : 0.0;
  }
  __device__ __forceinline__ void store_key_gate(double c, int stage) const {
    const volatile BlockConstants& constants = *shared.constants;
    const SplitGate gate = SplitGate::of(constants.reference - c);
    float* const to = shared.key_gates + stage * 2 * kKeys + fresh_thread_index();
    to[0] = gate.high;
    to[kKeys] = gate.low;
  }

  /// The block's queries, its rows' c, and the first stage.
  __device__ __forceinline__ void load_first(double reference) const {
    load_tile<kDim, Shape::kRows, kThreads>(shared_address(shared.queries),
                                            row_address<2>(p.q, queries, head, place.tile.first),
                                            row_stride<2>(p.q), rows, pieces, thread);
    if (tiles.end > tiles.begin) {
      load_stage(tiles.end - 1, 0);
      if (thread < kKeys) {
        store_key_gate(gates.at((tiles.end - 1) * kKeys + thread), 0);
      }
    }
    commit_copies();
    for (int row = thread; row < Shape::kRows; row += kThreads) {
      const SplitGate gate = SplitGate::of(gates.at(first + row) - reference);
      shared.row_gates[row] = gate.high;
      shared.row_gates[Shape::kRows + row] = gate.low;
    }
  }

  /// Leaves out the tiles whose keys all may be dropped: lse_i is at least the score of the key at
  /// the query itself.
  __device__ __forceinline__ void prune(double reference) {
    if (p.prune > 0 && tiles.end > tiles.begin && first > 0) {
      wait_for_copies<0>();
      __syncthreads();
      const double fall = largest_fall(p, keys.length,
                                       2 * largest_score(p, largest_query<Shape>(shared, thread),
                                                         ScoreBounds::key(w, keys.batch, head)));
      tiles.begin = max(tiles.begin, gates.first_not_above(reference + fall, first, lane) / kKeys);
    }
  }
};

/// One warp's part of a block: its rows, their softmax, and the phases of a tile.
template <class Shape>
struct ForwardWarp {
  using T = typename Shape::T;
  static constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kPart = Shape::kPart;
  static constexpr int kThreads = Shape::kThreads;

  const ForwardBlock<Shape>& at;
  const ForwardShared<Shape>& shared;
  int row;          // the warp's first, counted from the block's first
  int first, last;  // positions of the warp's rows
  float scale;
  unsigned queries_at;

  /// Queries that stay in registers, where there are enough.
  using KeptQueries = RegisterOperand<Shape::kRowTiles, Shape::kKeep ? kDim / 16 : 1>;

  __device__ __forceinline__ ForwardWarp(const ForwardBlock<Shape>& block,
                                         const ForwardShared<Shape>& smem)
      : at(block), shared(smem) {
    row = at.warp * Shape::kWarpRows;
    first = at.first + row;
    last = first + Shape::kWarpRows - 1;
    scale = static_cast<float>(at.p.scale) * kLog2E;
    queries_at = shared_address(shared.queries) + Tile16Bit<kDim>::bytes(row);
  }

  __device__ __forceinline__ void keep_queries(KeptQueries& kept) const {
    if constexpr (Shape::kKeep) {
      wait_for_copies<0>();
      __syncthreads();
      kept.fill(OperandReader<kDim>::a(queries_at, at.lane));
    }
  }

  /// softmax.s = the scores of part `part` of tile `tile`, with bias and mask;
  /// softmax.deferred_bias = what of the bias is not in them.
  __device__ __forceinline__ void compute_scores(OnlineSoftmax<Shape>& softmax,
                                                 const KeptQueries& kept, PairMask mask, bool edge,
                                                 int tile, int part, unsigned keys_at,
                                                 const float* key_gates, const float* row_gates,
                                                 int lane) const {
    const int key = tile * kKeys + part * kPart;
    const auto keys = OperandReader<kDim>::b(keys_at, lane);
    if constexpr (Shape::kKeep) {
      multiply<T, false, false, kDim / 16, true>(softmax.s, kept, keys);
    } else {
      multiply<T, false, false, kDim / 16, true>(softmax.s,
                                                 OperandReader<kDim>::a(queries_at, lane), keys);
    }
    if (!edge) {
      softmax.add_bias(scale, key_gates, row_gates);
    } else if (key + kPart - 1 <= first && (mask.window == 0 || key > last - mask.window)) {
      softmax.add_bias_near_diagonal(scale, key_gates, row_gates, shared.row_gates + row);
    } else {
      softmax.add_bias_and_mask(scale, key_gates, row_gates, mask, first + lane / 4,
                                key + lane % 4 * 2);
    }
  }

  /// Weights of zero must not meet values that are not finite: those are added to the rows that see
  /// them, and become zeros. All warps of the block come here.
  __device__ __forceinline__ void move_non_finite(OnlineSoftmax<Shape>& softmax, PairMask mask,
                                                  bool seen, int key, unsigned char* values,
                                                  int lane) const {
    constexpr int kBytes = Tile16Bit<kDim>::bytes(kPart);
    const bool found = has_non_finite<T, kThreads>(values, kBytes, fresh_thread_index());
    if (__syncthreads_or(found ? 1 : 0)) {
      if (seen) {
        softmax.add_non_finite(values, mask, first + lane / 4, key, lane);
      }
      __syncthreads();
      zero_non_finite<T, kThreads>(values, kBytes, fresh_thread_index());
      __syncthreads();
    }
  }

  __device__ __forceinline__ void store_lse(const OnlineSoftmax<Shape>& softmax) const {
    if (at.p.lse != nullptr && at.lane % 4 == 0) {
      float* const lse = static_cast<float*>(at.p.lse) +
                         (at.queries.batch * at.p.heads + at.head) * at.p.layout.time +
                         at.queries.start + at.place.tile.first;
#pragma unroll
      for (int i = 0; i < 2 * Shape::kRowTiles; ++i) {
        const int of_block = row + 8 * i + at.lane / 4;
        if (of_block < at.rows) {
          lse[of_block] = softmax.sum[i] * kLn2;
        }
      }
    }
  }
  /// The outputs, through the tile of queries.
  __device__ __forceinline__ void store_o(const OnlineSoftmax<Shape>& softmax) const {
    unsigned char* const own = shared.queries + Tile16Bit<kDim>::bytes(row);
    __syncwarp();
    softmax.store_smem(own, at.lane);
    __syncwarp();
    char* const o = row_address<2>(at.p.o, at.queries, at.head, at.place.tile.first);
    store_tile<kDim, Shape::kWarpRows, 32>(o + static_cast<int64_t>(row) * row_stride<2>(at.p.o),
                                           row_stride<2>(at.p.o), own, at.rows - row, at.pieces,
                                           at.lane);
  }
};

/// Starts the copies of the tile after `tile`, if there are `more`, and reads its gate of this
/// thread's key, which the result is.
template <class Shape>
__device__ __forceinline__ double load_next(const ForwardBlock<Shape>& at, int tile, int stage,
                                            bool more) {
  double next_gate = 0;
  if (more) {
    at.load_stage(tile - 1, stage ^ 1);
    next_gate = at.read_key_gate(tile - 1);
  }
  commit_copies();
  return next_gate;
}

/// o and the log-sum-exp of the warp's rows.
template <class Shape>
__device__ __forceinline__ void store_outputs(const ForwardBlock<Shape>& at,
                                              const ForwardWarp<Shape>& warp,
                                              OnlineSoftmax<Shape>& softmax) {
  if (at.tiles.end <= at.tiles.begin) {  // the queries that stand where outputs go have not landed
    wait_for_copies<0>();
    __syncthreads();
  }
  softmax.normalize();
  warp.store_lse(softmax);
  warp.store_o(softmax);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    forgetting_attention_forward_kernel(const __grid_constant__ TensorAttention w) {
  constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kPart = Shape::kPart;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  wait_for_kernels_before();  // the scan of gates
  const ForwardShared<Shape> shared(shared_bytes);
  const TileAndHead place(w.tiles, w.params.forward.heads, w.side_by_side, blockIdx.x, true);
  if (place.tile.tokens == 0) {
    return;
  }
  ForwardBlock<Shape> at(w, shared, place);
  at.store_constants();
  const double reference = at.gates.at(at.first);
  at.load_first(reference);
  at.prune(reference);

  OnlineSoftmax<Shape> softmax;
  softmax.start();
  const ForwardWarp<Shape> warp(at, shared);
  typename ForwardWarp<Shape>::KeptQueries kept;
  warp.keep_queries(kept);
  const PairMask mask = at.mask;
  const int first = at.first, last = at.last, warp_first = warp.first, warp_last = warp.last;
  int stage = 0;
  for (int tile = at.tiles.end - 1; tile >= at.tiles.begin; --tile, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // the tile is there, and all are done with the one before it
    const bool more = tile > at.tiles.begin;
    const double next_gate = load_next(at, tile, stage, more);
#pragma unroll 1
    for (int part = kKeys / kPart - 1; part >= 0; --part) {
      const int key = tile * kKeys + part * kPart;
      const bool edge = key + kPart - 1 > first || (mask.window > 0 && key <= last - mask.window);
      const bool seen =
          key <= warp_last && (mask.window == 0 || key + kPart > warp_first - mask.window + 1);
      const int lane = Shape::kKeep ? at.thread % 32 : fresh_thread_index() % 32;
      const float* const key_gates =
          shared.key_gates + stage * 2 * kKeys + part * kPart + lane % 4 * 2;
      const float* const row_gates = shared.row_gates + warp.row + lane / 4;
      const unsigned keys_at =
          shared_address(shared.keys(stage)) + Tile16Bit<kDim>::bytes(part * kPart);
      if (seen) {
        warp.compute_scores(softmax, kept, mask, edge, tile, part, keys_at, key_gates, row_gates,
                            lane);
        softmax.update_row_max();
      }
      if (edge) {
        warp.move_non_finite(softmax, mask, seen, key,
                             shared.values(stage) + Tile16Bit<kDim>::bytes(part * kPart), lane);
      }
      if (seen) {
        softmax.accumulate_pv(OperandReader<kDim>::b_transposed(keys_at + Shape::kKeyBytes, lane));
      }
    }
    if (more && fresh_thread_index() < kKeys) {
      at.store_key_gate(next_gate, stage ^ 1);
    }
  }
  store_outputs(at, warp, softmax);
}

// ---- The launch ----

template <class Shape>
cudaError_t launch_forward(TensorAttention work, const DeviceLimits& limits, cudaStream_t stream) {
  constexpr auto* kKernel = &forgetting_attention_forward_kernel<Shape>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  work.tiles = time_tiles(work.params.forward.layout, Shape::kRows);
  work.side_by_side =
      heads_side_by_side(work.tiles, int64_t{limits.multiprocessors} * Shape::kBlocksPerSm);
  const int64_t blocks = work.tiles.count * work.params.forward.heads;
  return launch_early<kKernel>(blocks, Shape::kThreads, Shape::kSharedBytes, stream, work);
}

template <class Data, HeadDims kDims>
cudaError_t AttentionForwardUnit<Data, kDims>::launch(TensorAttention work, cudaStream_t stream) {
  const ForgettingAttentionParams& p = work.params.forward;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  return with_forward_shape<Data, kDims>(
      p.head_dim, p.plan.tile == AttentionTile::kWide,
      [&]<class Shape>() { return launch_forward<Shape>(work, limits, stream); });
}

}  // namespace tidegate::kernels::attention
