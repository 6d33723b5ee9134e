#pragma once

// The forward pass on Hopper: the algorithm of forward/forward_kernel.cuh by warpgroups.
//
//   S = Q K^T + c_i - c_j   m' = max(m, rowmax S)   P = exp(S - m')   l, o *= exp(m - m')
//   l += rowsum P   o += P V            at the end   o /= l   lse = m + log l
//
// Blocks stay and take items (a tile of 64 queries a math warpgroup, of one head) from a counter.
// Warpgroup 0 brings data, each warp in a role of its own:
//   loader     takes items; copies Q, and K and V of tiles of kKeys keys from the diagonal leftward
//   key gates  writes c_ref - c_j beside each tile of keys
//   row gates  writes c_i - c_ref of the item's queries; with pruning, finds the first tile left
//   inspector  makes V of an edge tile (the diagonal, the window's far end) safe to meet weights of
//              zero: rows behind a sequence become zeros, others that are not finite are reported
// The math warpgroups take turns to issue products. Each issues S of the next tile and P V of the
// last one together, and computes weights of the one while the other runs.
//
// Who waits for what: barriers of ForwardBarriers, "full" (data is there: what producers complete)
// and "empty" (all math warps are done with it).

#include "kernels/attention/cuda/hopper/forward_math.cuh"
#include "kernels/attention/cuda/hopper/forward_producers.cuh"
#include "kernels/attention/cuda/hopper/forward_tiles.cuh"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels::attention {

// ---- The kernel ----

/// In the math warps all lanes arrive where they have read what other threads then write, and so do
/// the lanes that write gates: compute-sanitizer's racecheck does not see that __syncwarp orders
/// them before one lane's arrival. One lane of a warp arrives for what wgmma has read (q_empty,
/// v_empty), for a producer that has read the item (item_empty), and for values that the inspector
/// has changed (v_full).
template <class Shape>
__device__ inline void init_barriers(ForwardBarriers& barriers) {
  constexpr int kMathWarps = 4 * Shape::kGroups;
  for (int stage = 0; stage < 2; ++stage) {
    mbarrier_init(&barriers.item_known[stage], 1);
    mbarrier_init(&barriers.item_ready[stage], 32);
    mbarrier_init(&barriers.item_bounded[stage], 1);
    mbarrier_init(&barriers.item_empty[stage], 32 * kMathWarps + 3);  // and the other producers
    mbarrier_init(&barriers.q_full[stage], 1);
    mbarrier_init(&barriers.q_empty[stage], kMathWarps);
    mbarrier_init(&barriers.k_full[stage], 1 + 32);  // the loader, the lanes that write gates
    mbarrier_init(&barriers.k_empty[stage], 32 * kMathWarps);
    mbarrier_init(&barriers.v_full[stage], 1);  // the loader, or the inspector
    mbarrier_init(&barriers.v_landed[stage], 1);
    mbarrier_init(&barriers.v_empty[stage], kMathWarps);
  }
  hopper::fence_barrier_init();
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    hopper_forward_kernel(const __grid_constant__ HopperForwardWork w) {
#if TIDEGATE_HOPPER_CODE
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const HopperForwardShared<Shape> shared(shared_bytes);
  if (threadIdx.x == 0) {
    init_barriers<Shape>(shared.barriers());
    for (int stage = 0; stage < 2; ++stage) {
      shared.not_finite(stage) = 0;
    }
    hopper::prefetch_map(&w.q);
    hopper::prefetch_map(&w.k);
    hopper::prefetch_map(&w.v);
  }
  wait_for_kernels_before();  // the scan of gates
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const ForgettingAttentionParams& p = w.attention.params.forward;
  if (warp < 4) {
    hopper::release_registers<Shape::kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) {
        ForwardLoader<Shape>{w, shared}.run();
      }
    } else if (warp == 1) {
      ForwardKeyGates<Shape>{w.attention, shared, lane}.run();
    } else if (warp == 2) {
      ForwardRowGates<Shape>{w.attention, shared, lane}.run();
    } else {
      inspect_values<Shape>(shared, static_cast<int>(p.window), p.prune > 0, lane);
    }
  } else {
    hopper::claim_registers<Shape::kMathRegisters>();
    const int group = warp / 4 - 1;
    ForwardMath<Shape> math{p,
                            shared,
                            shared.barriers(),
                            PairMask{static_cast<int>(p.window)},
                            group,
                            group * 64 + warp % 4 * 16,
                            lane,
                            static_cast<float>(p.scale) * kLog2E};
    math.run();
  }
#endif
}

}  // namespace tidegate::kernels::attention
