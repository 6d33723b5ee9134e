// The fused product for batches of up to 64 rows: too many for every block to have all of x.
//
// The blocks of a cluster share the inner channels of some channels of y: each has all rows of its
// part of x in shared memory, normed, and asks for its part of the weights, in a ring, before it
// waits for the kernel that makes x. Two warpgroups multiply all 64 rows with half of the channels
// each (wgmma), and leave the sums in shared memory. The blocks meet, and each reads all parts of
// some of the rows and makes y of them. A norm's sums over rows are exchanged along with those, or
// before the products where the products need them (batch_rows.cuh). The order of every sum depends
// on the numbers of channels alone.

#include <algorithm>

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/hopper.cuh"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/product/cuda/batch_output.cuh"
#include "kernels/product/cuda/batch_rows.cuh"
#include "kernels/product/cuda/batch_shape.cuh"
#include "kernels/product/cuda/batch_tiles.cuh"
#include "kernels/product/cuda/fused_rows.cuh"
#include "kernels/product/cuda/fused_tiles.cuh"
#include "kernels/product/product_cuda.h"

namespace tidegate::kernels::product {
namespace {

/// Finds where the row of w lies that makes a given column of a cluster's tiles; null past the
/// last.
template <class E, bool kMore>
struct BatchWeights {
  const FusedProductParams& p;
  const BatchShape& s;
  const BatchWork& work;

  __device__ __forceinline__ const E* operator()(int column) const {
    const int tile = column / kTile, within = column % kTile;
    const int channel =
        (work.first_tile + tile) * s.tile_channels + (p.is_glu ? within % (kTile / 2) : within);
    if (tile >= work.tiles || channel >= p.product.outer) return nullptr;
    const int64_t other = p.is_glu && within >= kTile / 2 ? p.product.outer : 0;
    return weight_row<E, kMore>(p, channel + other);
  }
};

/// How many tiles a pass has, which takes `columns` columns at most.
[[maybe_unused]] __device__ __forceinline__ int tiles_of_pass(const BatchWork& work, int pass,
                                                              int columns) {
  return max(0, min(columns / kTile, work.tiles - pass * (columns / kTile)));
}

/// The barrier on which a block waits for what the cluster's others send of their rows' norms.
[[maybe_unused]] __device__ __forceinline__ void open_exchange(uint64_t* barrier, int bytes) {
  mbarrier_init(barrier, 1);
  publish_barriers();
  expect_bytes(shared_address(barrier), bytes);
}

/// Returns when the sums of `pass` may be written where those of the pass before, or x, have been.
template <class Stager, int kOwn>
__device__ __forceinline__ void wait_for_place_of_sums(const Stager& stager, int pass,
                                                       float (&square)[kOwn]) {
  if (pass > 0) {
    cluster_wait();  // the others have read the sums before
  } else {
    __syncthreads();  // nobody reads x and the weights, where the sums may go
    stager.leave_squares(square);
  }
}

template <class E, int kN, With kWith>
__global__ void __launch_bounds__(kThreads, 2)
    batch_product_kernel(const __grid_constant__ FusedProductParams p,
                         const __grid_constant__ BatchShape s) {
#if TIDEGATE_HOPPER_CODE  // elsewhere nobody launches it
  extern __shared__ __align__(128) char dynamic[];
  let_next_kernel_begin();
  const BatchWork work(s);
  char* const shared = aligned_panels(dynamic);
  char* const x = shared;
  float* const parts = reinterpret_cast<float*>(shared + s.parts_at);
  float* const exchanged = reinterpret_cast<float*>(shared + s.main_bytes);
  auto* const barrier =
      reinterpret_cast<uint64_t*>(exchanged + (2 * kMostClusterBlocks + 2) * kBatchRows);
  constexpr int kColumns = kWarpgroups * kN;  // of a pass
  const int passes = s.passes;
  using Stager = BatchStager<E, kWith == With::kGate>;
  const bool norms_before = p.has_norm && !s.scales_sums;
  if (norms_before && work.thread == 0) open_exchange(barrier, Stager::exchanged_bytes(p, s));
  using Weights = BatchWeights<E, kWith == With::kMore>;
  BatchRing<E, kN, Weights> ring{
      p, s, work, Weights{p, s, work}, shared_address(shared + s.x_bytes), passes * work.chunks};
#pragma unroll 1
  for (int i = 0; i < s.stages; ++i) ring.ask();
  char* const constants = reinterpret_cast<char*>(barrier + 2);
  const Stager stager(p, s, work, x, exchanged, constants, shared_address(barrier));
  stager.load_constants(constants);
  if (norms_before) {
    cluster_meet();  // all blocks run, and their barriers wait for bytes
  } else {
    __syncthreads();
  }
  wait_for_kernels_before();
  float square[Stager::kOwn] = {};
  stager.run(square);
  const bool is_all = wait_for_all(ring);

  int slot = 0;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    BatchSums<kN> d;
    multiply_chunks(ring, shared_address(x), is_all, slot, d);
    if (pass == 0) stager.add_squares_of_copies(square);
    hopper::wait_for_products<0>();
    hopper::keep(d);
    wait_for_place_of_sums(stager, pass, square);
    const int tiles = tiles_of_pass(work, pass, kColumns);
    leave_sums<kN>(d, s, work, work.group * kN, tiles * kTile, parts);
    publish_shared();
    cluster_arrive();
    BatchOutput<E>(p, s, work, parts, stager.squares, pass * (kColumns / kTile), tiles).run([] {
      cluster_wait();
    });
    cluster_arrive();
  }
  wait_for_copies<0>();
  cluster_wait();  // no block ends whose sums others still read
#endif
}

template <class E, int kN, With kWith>
cudaError_t launch(const FusedProductParams& p, const BatchShape& s, cudaStream_t stream) {
  constexpr auto* kKernel = &batch_product_kernel<E, kN, kWith>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(s.shared_bytes()));
  return launch_clusters<kKernel>(s, s.shared_bytes(), stream, p, s);
}

}  // namespace

cudaError_t batch_product_runs(bool* runs) {
  return can_cluster<&batch_product_kernel<__nv_bfloat16, 32, With::kNothing>>(runs);
}

cudaError_t batch_product_fits(const FusedProductParams& p, bool* fits) {
  TIDEGATE_RETURN_IF_CUDA_ERROR(batch_product_runs(fits));
  if (!*fits) return cudaSuccess;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const BatchShape s = shape_of(p, limits);
  *fits = s.blocks > 0 && (p.squares == nullptr || (s.scales_sums && s.copies_x));
  return cudaSuccess;
}

cudaError_t batch_product_cuda(const FusedProductParams& p, cudaStream_t stream) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const BatchShape s = shape_of(p, limits);
  return dispatch_16_bit(p.product.dtype, [&]<class E>() {
    const auto with = [&]<With kWith>() {
      switch (s.columns) {
        case 32:
          return launch<E, 32, kWith>(p, s, stream);
        case 48:
          return launch<E, 48, kWith>(p, s, stream);
        default:
          return launch<E, 96, kWith>(p, s, stream);
      }
    };
    return p.gate != nullptr        ? with.template operator()<With::kGate>()
           : p.more[0].w != nullptr ? with.template operator()<With::kMore>()
                                    : with.template operator()<With::kNothing>();
  });
}

}  // namespace tidegate::kernels::product
