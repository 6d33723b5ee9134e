#pragma once

// dk, dv and, by additions, dq on Hopper: the five products of backward/key_gradient_kernel.cuh by
// wgmma, with S and dP transposed, rows of keys, in two kernels: hopper_backward_kernel, a block a
// tile of keys, and hopper_long_range_kernel, whose blocks stay and take such tiles of long-range
// heads where short_range.cuh has the others.
//
//   S^T = K Q^T   P = exp(S - lse)   dP^T = V dO^T   dS = P (dP - delta + dlse)
//   dv += P^T dO      dk += dS^T Q      dq += dS K  (fp32 additions)
//
// A block takes a tile of keys of one key/value head and iterates over the tiles of queries that
// see them, or that pruning leaves, of every query head that shares the keys. Up to a head
// dimension of 128 it has 128 keys. Two warpgroups of math have 64 keys each, with their dk and dv
// in registers, and take a tile 64 queries at a time (HopperMathTiles). P and dS go from
// accumulators straight into the left operand of dv and dk. For dq, of which each warpgroup makes a
// half, dS of both passes through shared memory. Above 128 a block has 64 keys and the math
// warpgroups have roles: backward_roles.cuh says who waits for whom there, beside the producer's
// warps, which are the same.
//
// The producer's first warp fills the stages of Q and dO (queries_full, d_o_full), its second adds
// what the queries' scores need (queries_full, too); a warp of math frees them when its products
// have read them (queries_free, d_o_free), and tells the second warp so of what it has brought
// (kStatsBarrier). The third warp takes dq of a tile and the sums of dS over its rows from shared
// memory (kDqBarrier, dq_free), and adds them to those in device memory, in a deterministic pass
// when the block's turn at the tile has come (add_query_sums). ds_full says that all warps of math
// have written dS of a stage. It needs no barrier that frees it: who writes a stage has waited for
// all to have written the one between.
//
// Up to 128, products are under way beside everything else: dP beside the exponentials, dv beside
// dS, dk beside the sums over rows, dq and the next S beside the additions of dq. A thread's
// kMathRegisters hold two accumulators of scores at a time beside dk and dv: dq takes the place of
// dP, dS that of P.

#include "kernels/attention/cuda/hopper/backward_math.cuh"
#include "kernels/attention/cuda/hopper/backward_roles.cuh"
#include "kernels/attention/cuda/hopper/backward_tiles.cuh"
#include "kernels/attention/cuda/pruning.cuh"

namespace tidegate::kernels::attention {

/// The tiles of a warpgroup of math: the stages and barriers around the phases of its gradients.
template <class Shape>
struct HopperMathTiles {
  static constexpr int kPart = Shape::kPart, kPartBytes = kPart * hopper::kPanelRowBytes;
  const HopperKeyTile<Shape>& at;
  HopperBackwardShared<Shape>& shared;
  HopperKeyGradients<Shape> math;
  hopper::RingPlace<Shape::kStages> stage;
  int dq_parity = 0;

  __device__ __forceinline__ HopperMathTiles(const HopperKeyTile<Shape>& block,
                                             HopperBackwardShared<Shape>& memory, int thread)
      : at(block), shared(memory), math(block.p, thread) {}

  /// Begins S of a part of the stage's queries.
  __device__ __forceinline__ void begin_s(int part) {
    math.start(math.s, shared.stats[stage.stage()].start_s + part * kPart);
    math.multiply_scores(math.s, shared.keys, shared.queries[stage.stage()] + part * kPartBytes);
  }
  /// What dP of a part of the stage's queries starts from.
  __device__ __forceinline__ void start_dp(int part) {
    math.start(math.dp, shared.stats[stage.stage()].start_dp + part * kPart);
  }
  __device__ __forceinline__ void wait_for_s() {
    hopper::wait_for_products<0>();
    hopper::keep(math.s);
  }

  /// Takes a part from S to its share of dv and dk. In the end the product of dk is still under
  /// way, and the part's dS and the sums of it are in shared memory.
  __device__ __forceinline__ void take_part(int tile, int part) {
    const int i = stage.stage(), row = tile * Shape::kRows + part * kPart;
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
    const hopper::RingPlace<Shape::kStages> taken = stage;
    stage.advance();
    if (more) {
      mbarrier_wait(&shared.queries_full[stage.stage()], stage.phase());
    }
    mbarrier_wait(&shared.ds_full[taken.stage()], taken.phase());
    math.multiply_dq(shared.ds[taken.stage()], shared.keys);
    if (more) {
      begin_s(0);
      hopper::wait_for_products<1>();  // dk, dq
    } else {
      hopper::wait_for_products<0>();
    }
    hopper::keep(math.dp);
    hopper::arrive_from(&shared.queries_free[taken.stage()], math.lane);
    hopper::arrive_from(&shared.d_o_free[taken.stage()], math.lane);
    mbarrier_wait(&shared.dq_free, dq_parity ^ 1);
    math.store_dq(shared.dq);
    if (Shape::kStartsEarly && more) {
      start_dp(0);
    }
    hopper::fence_async_proxy();
    hopper::named_barrier_arrive(kDqBarrier, kMathAndWarp);
    hopper::named_barrier_arrive(kStatsBarrier, kMathAndWarp);
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
      mbarrier_wait(&shared.queries_full[stage.stage()], stage.phase());
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
      mbarrier_wait(&shared.d_o_full[stage.stage()], stage.phase());
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
  hopper::named_barrier_sync(kKeysReadBarrier, 256);
  math.store(at, shared);
}

/// A producer's warp: one of three roles.
template <class Shape>
__device__ __forceinline__ void bring_hopper_tiles(const HopperBackwardWork& work,
                                                   const HopperKeyTile<Shape>& at,
                                                   HopperBackwardShared<Shape>& shared,
                                                   int thread) {
  if (thread < 32) {
    load_tiles(work, at, shared, thread);
  } else if (thread < 64) {
    load_row_stats(at, shared, thread - 32);
  } else if (thread < 96) {
    add_query_sums(at, shared, thread - 64);
  }
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
    bring_hopper_tiles(work, at, shared, thread);
  } else {
    hopper::claim_registers<Shape::kMathRegisters>();
    if constexpr (Shape::kHasRoles) {
      compute_hopper_gradients_by_roles(at, shared, thread);
    } else {
      compute_hopper_gradients(at, shared, thread);
    }
  }
#endif
}

/// The next tile of keys of a long-range head, of blocks that stay, with barriers as at a launch's
/// start; negative: there is none. One thread takes it, by `take`, when all are done with the tile
/// before. (No __syncthreads: roles come here in branches of their own.)
template <class Shape, class Take>
__device__ __forceinline__ int next_long_range_tile(HopperBackwardShared<Shape>& shared,
                                                    const Take& take) {
  hopper::fence_async_proxy();  // the copy engine writes where gradients were staged
  const int parity = shared.tiles_taken % 2;
  mbarrier_arrive(&shared.tile_done);
  take();
  mbarrier_wait(&shared.tile_taken, parity);
  return __shfl_sync(0xffffffffu, shared.block, 0);  // known to be the same for a warp
}
template <class Shape>
__device__ inline void take_long_range_tile(const TensorAttention& w,
                                            HopperBackwardShared<Shape>& shared) {
  const auto heads = static_cast<unsigned>(w.params.forward.key_heads);
  const auto blocks = static_cast<unsigned>(w.tiles.count) * heads;
  mbarrier_wait(&shared.tile_done, shared.tiles_taken % 2);
  if (shared.tiles_taken > 0) {
    shared.invalidate_barriers();
  }
  shared.init_barriers();
  int taken = -1;
  for (;;) {
    const unsigned next = atomicAdd(w.extents.long_range + 1, 1u);
    if (next >= blocks) {
      break;
    }
    const TileAndHead place(w.tiles, heads, w.side_by_side, next, false);
    if (place.tile.tokens > 0 && takes_head(w, place.tile.sequence.index, place.head)) {
      taken = static_cast<int>(next);
      break;
    }
  }
  shared.block = taken;
  ++shared.tiles_taken;
  mbarrier_arrive(&shared.tile_taken);
}

/// hopper_backward_kernel for long-range heads where others are taken by a kernel of their own:
/// blocks stay and take tiles. Where there are no such heads, a block for every tile would take
/// longer to start than these to leave.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    hopper_long_range_kernel(const __grid_constant__ HopperBackwardWork work) {
#if TIDEGATE_HOPPER_CODE
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = HopperBackwardShared<Shape>::at(bytes);
  const TensorAttention& w = work.attention;
  const int thread = static_cast<int>(threadIdx.x);
  if (w.extents.long_range[0] == 0) {
    return;
  }
  if (thread == 0) {
    mbarrier_init(&shared.tile_done, Shape::kThreads);
    mbarrier_init(&shared.tile_taken, 1);
    shared.tiles_taken = 0;
  }
  __syncthreads();
  const auto tile_of = [&](int block) {
    return HopperKeyTile<Shape>(w, TileAndHead(w.tiles, w.params.forward.key_heads, w.side_by_side,
                                               static_cast<unsigned>(block), false));
  };
  if (thread < 128) {
    hopper::release_registers<Shape::kProducerRegisters>();
    const auto take = [&] {
      if (thread == 0) {
        take_long_range_tile(w, shared);
      }
      __syncwarp();
    };
    for (int block; (block = next_long_range_tile(shared, take)) >= 0;) {
      bring_hopper_tiles(work, tile_of(block), shared, thread);
    }
  } else {
    hopper::claim_registers<Shape::kMathRegisters>();
    for (int block; (block = next_long_range_tile(shared, [] {})) >= 0;) {
      compute_hopper_gradients(tile_of(block), shared, thread);
    }
  }
#endif
}

}  // namespace tidegate::kernels::attention
