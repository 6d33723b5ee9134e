#pragma once

// Barriers in shared memory that one warp arrives at and another waits for: finer than
// __syncthreads, which stops a whole block.

#include <cstdint>

namespace tidegate::kernels {

/// Every phase of the barrier completes after `arrivals` arrivals. One thread initialises; all
/// others may use the barrier after the next __syncthreads (of a cluster: cluster barrier).
__device__ inline void mbarrier_init(uint64_t* barrier, int arrivals) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}

/// Makes initialised barriers visible to the other blocks of a cluster.
__device__ inline void mbarrier_fence_init() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// Arrives once. What this thread wrote, and what it saw before (through __syncwarp, too), is seen
/// by those who wait.
__device__ inline void mbarrier_arrive(uint64_t* barrier) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address)
               : "memory");
}

/// Arrives once, when all copy_async of this thread so far have landed: who waits sees them.
__device__ inline void mbarrier_arrive_after_copies(uint64_t* barrier) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address) : "memory");
}

/// Arrives once, and makes the phase wait for `bytes` more bytes of store_remote.
__device__ inline void mbarrier_arrive_expecting(uint64_t* barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
               : "memory");
#endif
}

/// Stores to the same place in another block of the cluster, and counts the bytes at the same
/// barrier of that block: who waits there sees them. No fence: a release at cluster scope would
/// wait for everything this thread has ever stored, device memory included.
template <class Bits>
__device__ inline void store_remote(Bits* shared, Bits value, uint64_t* barrier, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  unsigned to, at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(to)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(at)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "r"(rank));
  if constexpr (sizeof(Bits) == 4) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
        "r"(value), "r"(at)
        : "memory");
  } else if constexpr (sizeof(Bits) == 8) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::
            "r"(to),
        "r"(value.x), "r"(value.y), "r"(at)
        : "memory");
  } else {
    static_assert(sizeof(Bits) == 16);
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(to),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(at)
        : "memory");
  }
#endif
}

/// Waits for the completion of the phase of the given parity (0 for the first, 1 for the
/// second...).
__device__ inline void mbarrier_wait(uint64_t* barrier, int parity) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  unsigned done = 0;
  while (done == 0) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#endif
  }
}

}  // namespace tidegate::kernels
