#pragma once

// Pairs of 16-bit floats in a register, beyond what common/cuda/warp.cuh has: floats as sums of two
// of bf16, states in f16, and their products.

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::gla {

/// Two elements of type T in a register.
template <class T>
__device__ inline float2 unpack_pair(uint32_t bits) {
  const Pack<T, 2> both = {bits};
  return {both.get(0), both.get(1)};
}

/// Two floats as sums of two of bf16: what rounding to `high` left is rounded to `low`, so that 16
/// bits of each remain.
struct SplitPair {
  uint32_t high, low;
};

__device__ inline SplitPair split_bf16(float first, float second) {
  SplitPair split;
  split.high = pack_bf16(first, second);
  split.low = pack_bf16(first - __uint_as_float(split.high << 16),
                        second - __uint_as_float(split.high & 0xffff0000u));
  return split;
}

/// Two of f16 as bf16.
__device__ inline uint32_t rounded_bf16(uint32_t pair) {
  const float2 both = unpack_pair<__half>(pair);
  return pack_bf16(both.x, both.y);
}

/// A product of two pairs of bf16.
__device__ inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t product;  // minus zero is added
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

}  // namespace tidegate::kernels::gla
