#pragma once

// What blocks of a cluster tell each other: stores into each other's shared memory, and the
// mbarriers that count their bytes (compute capability 9.0). Addresses are those of
// shared_address().

#include <cstdint>

namespace tidegate::kernels {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ inline int cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

/// All threads of all blocks; what they wrote before, shared memory of others included, is seen
/// after.
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// Makes initialised barriers known to the other blocks, before cluster_sync().
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Where the variable at `address` of this block's shared memory lies in that of block `rank`.
__device__ inline unsigned address_in_block(unsigned address, int rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

/// Arrives once, and announces that this phase has to see `bytes` besides.
__device__ inline void expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
          barrier),
      "r"(bytes)
      : "memory");
}

/// What arrived is seen after, of shared memory only: a plain acquire at the cluster's scope would
/// wait for the loads from device memory that are on their way, and empty the first-level cache.
__device__ inline void wait_for_bytes(unsigned barrier, unsigned parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "fence.acquire.sync_restrict::shared::cluster.cluster; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Stores into a block's shared memory; that block's barrier counts the bytes when they are there.
__device__ inline void store_remote(unsigned address, float value, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address),
      "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
}
__device__ inline void store_remote(unsigned address, float4 value, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)),
      "r"(__float_as_uint(value.w)), "r"(barrier)
      : "memory");
}

#else  // never called: the planner chooses clusters where code for 9.0a is loaded

__device__ inline int cluster_rank() { return 0; }
__device__ inline void cluster_sync() {}
__device__ inline void publish_barriers() {}
__device__ inline unsigned address_in_block(unsigned address, int) { return address; }
__device__ inline void expect_bytes(unsigned, unsigned) {}
__device__ inline void wait_for_bytes(unsigned, unsigned) {}
__device__ inline void store_remote(unsigned, float, unsigned) {}
__device__ inline void store_remote(unsigned, float4, unsigned) {}

#endif

}  // namespace tidegate::kernels
