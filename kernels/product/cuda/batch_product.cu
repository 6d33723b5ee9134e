// The fused product for batches of up to 64 rows: too many for every block to have all of x.
//
// The blocks of a cluster share the inner channels of some channels of y: each has all rows of its
// part of x in shared memory, normed, and asks for its part of the weights, in a ring, before it
// waits for the kernel before. Two warpgroups multiply all 64 rows with half of the channels each
// (wgmma), and leave the sums in shared memory. The blocks meet, and each reads all parts of some
// of the rows and makes y of them. What a norm sums over a row goes the same way, or earlier where
// it has to (batch_rows.cuh). The order of every sum depends on the numbers of channels alone.

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
#include "kernels/product/cuda/fused_rows.cuh"
#include "kernels/product/cuda/fused_tiles.cuh"
#include "kernels/product/product_cuda.h"

namespace tidegate::kernels::product {
namespace {

/// A warpgroup's ring of weights: its rows of a chunk, in panels of rows of 128 bytes.
template <class E, int kN, bool kMore>
struct BatchRing {
  static constexpr int kOwn = kN / 16;  // rows of a thread

  const FusedProductParams& p;
  const BatchShape& s;
  const BatchWork& work;
  unsigned base;  // of the ring in shared memory
  int items;
  int pass = 0, chunk = 0, slot = 0, asked = 0;
  const E* rows[kOwn] = {};  // of the pass; null: none

  __device__ unsigned item(int at) const {
    return base + static_cast<unsigned>((at * kWarpgroups + work.group) * kN * kRowBytes);
  }
  __device__ int row(int i) const { return i * 16 + work.thread % kGroupThreads / 8; }

  __device__ void find_rows() {
    const int first = pass * kWarpgroups * kN + work.group * kN;  // of the cluster's rows of w
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int tile = (first + row(i)) / kTile, within = row(i) % kTile;
      const int channel =
          (work.first_tile + tile) * s.tile_channels + (p.is_glu ? within % (kTile / 2) : within);
      const bool exists = tile < work.tiles && channel < p.product.outer;
      const int64_t other = p.is_glu && within >= kTile / 2 ? p.product.outer : 0;
      rows[i] = exists ? weight_row<E, kMore>(p, channel + other) : nullptr;
    }
  }

  __device__ void ask() {
    if (asked < items) {
      if (chunk == 0) find_rows();
      const int pack = work.thread % 8;
      const int inner = (work.first_chunk + chunk) * kChunk + pack * kPack;
      const bool exists = inner < p.product.inner;
      const unsigned to = item(slot) + place_in_item(row(0), pack);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        // Sixteen rows further the packs are permuted alike.
        if (rows[i] != nullptr) {
          copy_async_or_zero(to + static_cast<unsigned>(i * 16 * kRowBytes),
                             exists ? rows[i] + inner : rows[i], exists);
        }
      }
      ++asked;
      slot = slot + 1 == s.stages ? 0 : slot + 1;
      if (++chunk == work.chunks) {
        chunk = 0;
        ++pass;
      }
    }
    commit_copies();
  }
};

/// Waits for the oldest of `stages` groups of copies.
[[maybe_unused]] __device__ inline void wait_for_oldest(int stages) {
  switch (stages) {
    case 1:
      return wait_for_copies<0>();
    case 2:
      return wait_for_copies<1>();
    case 3:
      return wait_for_copies<2>();
    case 4:
      return wait_for_copies<3>();
    case 5:
      return wait_for_copies<4>();
    case 6:
      return wait_for_copies<5>();
    case 7:
      return wait_for_copies<6>();
    default:
      return wait_for_copies<kMostBatchStages - 1>();
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
  // Panels of wgmma begin at multiples of 1024 bytes.
  char* const shared = dynamic + ((1024u - (shared_address(dynamic) & 1023u)) & 1023u);
  char* const x = shared;
  float* const parts = reinterpret_cast<float*>(shared + s.parts_at);
  float* const exchanged = reinterpret_cast<float*>(shared + s.main_bytes);
  auto* const barrier =
      reinterpret_cast<uint64_t*>(exchanged + (2 * kMostClusterBlocks + 2) * kBatchRows);
  constexpr int kColumns = kWarpgroups * kN;  // of a pass
  const int passes = s.passes;
  const auto pass_tiles = [&](int pass) {
    return max(0, min(kColumns / kTile, work.tiles - pass * (kColumns / kTile)));
  };
  using Stager = BatchStager<E, kWith == With::kGate>;
  const bool norms_before = p.has_norm && !s.scales_sums;
  if (norms_before && work.thread == 0) {
    mbarrier_init(barrier, 1);
    publish_barriers();
    expect_bytes(shared_address(barrier), Stager::exchanged_bytes(p, s));
  }
  BatchRing<E, kN, kWith == With::kMore> ring{p, s, work, shared_address(shared + s.x_bytes),
                                              passes * work.chunks};
#pragma unroll 1
  for (int i = 0; i < s.stages; ++i) ring.ask();
  char* const constants = reinterpret_cast<char*>(barrier + 2);
  const Stager stager(p, s, work, x, exchanged, constants, shared_address(barrier));
  stager.load_constants(constants);
  if (norms_before) {
    cluster_sync();  // all blocks run, and their barriers wait for bytes
  } else {
    __syncthreads();
  }
  wait_for_kernels_before();
  float square[Stager::kOwn] = {};
  stager.run(square);
  // Mostly all weights are under way by now: then one barrier is enough.
  const bool is_all = ring.asked == ring.items;
  wait_for_copies<0>();
  hopper::fence_async_proxy();
  __syncthreads();

  const unsigned x_at = shared_address(x);
  int slot = 0;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    float d[kN / 8][4];
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
#pragma unroll 1
    for (int c = 0; c < work.chunks; ++c) {
      if (!is_all) {
        wait_for_oldest(s.stages);
        hopper::fence_async_proxy();
        hopper::named_barrier_sync(1 + work.group, kGroupThreads);
      }
      const auto a = hopper::Operand::rows_inner(x_at + static_cast<unsigned>(c * kPanelBytes));
      const auto b = hopper::Operand::rows_inner(ring.item(slot));
      hopper::fence_products();
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        hopper::Product<E, kN>::shared(d, a.advance(32 * k), b.advance(32 * k), true);
      }
      hopper::commit_products();
      slot = slot + 1 == s.stages ? 0 : slot + 1;
      if (!is_all) {
        if (ring.asked < ring.items) {
          hopper::wait_for_products<0>();
          hopper::named_barrier_sync(1 + work.group, kGroupThreads);
        }
        ring.ask();
      }
    }
    if (pass == 0) stager.add_squares_of_copies(square);
    hopper::wait_for_products<0>();
    hopper::keep(d);
    if (pass > 0) {
      cluster_wait();  // the others have read the sums before
    } else {
      __syncthreads();  // nobody reads x and the weights, where the sums may go
      stager.leave_squares(square);
    }
    leave_sums<kN>(d, s, work, pass_tiles(pass) * kTile, parts);
    cluster_arrive();
    BatchOutput<E>(p, s, work, parts, stager.squares, pass * (kColumns / kTile), pass_tiles(pass))
        .run([] { cluster_wait(); });
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
  const dim3 grid(static_cast<unsigned>(s.clusters * s.blocks));
  switch (s.blocks) {
    case 2:
      return launch_in_chain<kKernel, 2>(grid, dim3(kThreads), s.shared_bytes(), stream, p, s);
    case 4:
      return launch_in_chain<kKernel, 4>(grid, dim3(kThreads), s.shared_bytes(), stream, p, s);
    default:
      return launch_in_chain<kKernel, 8>(grid, dim3(kThreads), s.shared_bytes(), stream, p, s);
  }
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
  *fits = shape_of(p, limits).blocks > 0;
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
