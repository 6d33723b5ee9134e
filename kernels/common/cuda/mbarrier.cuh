#pragma once

// Barriers in shared memory that one warp arrives at and another waits for: finer than
// __syncthreads, which stops a whole block.

#include <cstdint>

#include "kernels/common/cuda/shared_address.cuh"

namespace tidegate::kernels {

/// Every phase of the barrier completes after `arrivals` arrivals. One thread initialises; all
/// others may use the barrier after the next __syncthreads.
__device__ inline void mbarrier_init(uint64_t* barrier, int arrivals) {
  const unsigned address = shared_address(barrier);
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}

/// Arrives once. What this thread wrote, and what it saw before (through __syncwarp, too), is seen
/// by those who wait.
__device__ inline void mbarrier_arrive(uint64_t* barrier) {
  const unsigned address = shared_address(barrier);
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address)
               : "memory");
}

/// Arrives once, when all copy_async of this thread so far have landed: who waits sees them.
__device__ inline void mbarrier_arrive_after_copies(uint64_t* barrier) {
  const unsigned address = shared_address(barrier);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address) : "memory");
}

/// Waits for the completion of the phase of the given parity (0 for the first, 1 for the
/// second...).
__device__ inline void mbarrier_wait(uint64_t* barrier, int parity) {
  const unsigned address = shared_address(barrier);
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
