#pragma once

// Copies from device to shared memory that pass no registers (cp.async), and addresses as PTX wants
// them. Copies are issued one by one, gathered into groups, and waited for group by group; or an
// mbarrier counts them (mbarrier_arrive_after_copies).

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/shared_address.cuh"

namespace tidegate::kernels {

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

}  // namespace tidegate::kernels
