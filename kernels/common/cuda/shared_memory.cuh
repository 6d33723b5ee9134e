#pragma once

// What PTX offers for a block's shared memory: addresses as its instructions take them, copies from
// device memory that pass no registers, and barriers.

#include <cstdint>

#include "kernels/common/cuda/numeric.cuh"

namespace tidegate::kernels {

// ---- Addresses ----

/// The address of a variable in shared memory as PTX instructions take it: 32 bits, counted from
/// the start of the block's window.
__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// ---- Copies (cp.async) ----
//
// Copies are issued one by one, gathered into groups, and waited for group by group; or an mbarrier
// counts them (mbarrier_arrive_after_copies).

/// Copies kBytes from device to shared memory without passing through registers. The copy is seen
/// by the thread that issued it, once it has waited for its group.
template <int kBytes>
__device__ inline void copy_async(void* shared, const void* global) {
  if constexpr (kBytes >= 4) {
    const auto to = shared_address(shared);
    if constexpr (kBytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes)
                   : "memory");
    }
  } else {  // too narrow for the hardware
    using Bits = typename BitsOf<kBytes>::type;
    *static_cast<Bits*>(shared) = *static_cast<const Bits*>(global);
  }
}

/// Copies sixteen bytes to an address of shared memory.
__device__ inline void copy_async_16(unsigned shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

/// Copies sixteen bytes, or writes as many zeros where `exists` is false: then `global` is not
/// read.
__device__ inline void copy_async_or_zero(unsigned shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(exists ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async_or_zero(void* shared, const void* global, bool exists) {
  copy_async_or_zero(shared_address(shared), global, exists);
}

/// Copies sixteen bytes, and has L2 read both lines of the 256 bytes that they lie in.
__device__ inline void copy_async_16_prefetch_256(void* shared, const void* global) {
  const unsigned to = shared_address(shared);
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(global)
               : "memory");
}

/// Brings the line of 128 bytes that `global` lies in into the L2 cache.
__device__ inline void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending groups of this thread are under way.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Barriers ----
//
// A warp arrives at a barrier, another waits for it: finer than __syncthreads, which stops a whole
// block.

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
/// second...), asking for it again and again: a warp is on its way as soon as the phase is
/// complete, and takes issue slots from the others until then.
__device__ inline void mbarrier_poll(uint64_t* barrier, int parity) {
  const unsigned address = shared_address(barrier);
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  }
}

/// Waits as mbarrier_poll does, but from compute capability 9.0 on the hardware suspends the warp
/// until then (mbarrier.try_wait).
__device__ inline void mbarrier_wait(uint64_t* barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const unsigned address = shared_address(barrier);
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  }
#else
  mbarrier_poll(barrier, parity);
#endif
}

}  // namespace tidegate::kernels
