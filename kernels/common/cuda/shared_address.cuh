#pragma once

namespace tidegate::kernels {

/// The address of a variable in shared memory as PTX instructions take it: 32 bits, counted from
/// the start of the block's window.
__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

}  // namespace tidegate::kernels
