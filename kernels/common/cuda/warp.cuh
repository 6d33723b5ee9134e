#pragma once

// What the lanes of a warp compute together: sums and largest values over them, and products of
// small matrices on tensor cores.

#include <cuda_bf16.h>
#include <cstdint>

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/shared_memory.cuh"

namespace tidegate::kernels {

// ---- Sums and largest values ----
//
// Each lane gets the result. The order is fixed by the lanes' numbers, so that equal inputs give
// equal bits.

__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

/// The sum over kLanes neighbouring lanes, a power of two: lanes that are far apart first.
template <int kLanes = kWarpSize, class Real>
__device__ inline Real warp_sum(Real x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

template <int kLanes = kWarpSize, class Real>
__device__ inline Real warp_max(Real x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x = larger(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

/// The sum over four neighbouring lanes, those that hold a row of an mma's accumulators:
/// neighbours first.
template <class Real>
__device__ inline Real quad_sum(Real x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x;
}

template <class Real>
__device__ inline Real quad_max(Real x) {
  x = larger(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return larger(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/// Sums kCount values, each over as many lanes as differ in kDistance and the bits below, at the
/// price of about one: every exchange halves the values that a lane still adds up, and with them
/// the lanes it shares them with. A lane is left with the sums of its own, in front.
template <int kCount, int kDistance, class Real>
__device__ inline void scatter_sums(Real* values, int lane) {
  if constexpr (kDistance > 0) {
    if constexpr (kCount > 1) {
      constexpr int kHalf = kCount / 2;
      const bool upper = (lane & kDistance) != 0;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const Real keep = upper ? values[i + kHalf] : values[i];
        const Real give = upper ? values[i] : values[i + kHalf];
        values[i] = keep + __shfl_xor_sync(0xffffffffu, give, kDistance);
      }
      scatter_sums<kHalf, kDistance / 2>(values, lane);
    } else {
      values[0] += __shfl_xor_sync(0xffffffffu, values[0], kDistance);
      scatter_sums<1, kDistance / 2>(values, lane);
    }
  }
}

/// threadIdx.x, read anew: what is derived from it is computed where it is needed, instead of being
/// kept in registers through a loop that has none left, or fetched again and again.
__device__ inline int fresh_thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// ---- Products of small matrices ----
//
// They are made on tensor cores (compute capability 8.0 and later), in registers.
//
// mma_bf16 (mma_f16 with f16 operands) multiplies a 16 x 16 matrix A by a 16 x 8 matrix B. With r =
// lane / 4 and c = lane % 4, a lane holds, two bf16 a register, the lower one first:
//   A[0] = A(r, 2c..2c+1)    A[1] = A(r + 8, 2c..)
//   A[2] = A(r, 2c + 8..)    A[3] = A(r + 8, 2c + 8..)
//   B[0] = B(2c..2c+1, r)    B[1] = B(2c + 8.., r)
// and of the 16 x 8 sum in float
//   D[0..1] = D(r, 2c..2c+1)   D[2..3] = D(r + 8, 2c..2c+1)
// So a D rounded to bf16 pairs is half of an A of the next product, and half of a B that is D^T.
// The order of the inner index is free, as long as A and B agree on it.

/// d += A * B.
__device__ inline void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_bf16(d, a[0], a[1], a[2], a[3], b0, b1);
}

__device__ inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// d += A * B with an inner dimension of 8: A[0], A[1] and B[0] of the above.
__device__ inline void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

/// Loads four 8 x 8 matrices of 16-bit elements from shared memory: lanes 8i .. 8i+7 give the
/// addresses of the rows (16 bytes each, aligned) of matrix i. A lane gets (r, 2c..2c+1) of each.
__device__ inline void load_matrices(uint32_t (&m)[4], unsigned shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_row)
               : "memory");
}
__device__ inline void load_matrices(uint32_t (&m)[4], const void* shared_row) {
  load_matrices(m, shared_address(shared_row));
}

/// Loads four matrices and transposes them: of each, a lane gets (2c..2c+1, r).
__device__ inline void load_matrices_transposed(uint32_t (&m)[4], unsigned shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_row)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&m)[4], const void* shared_row) {
  load_matrices_transposed(m, shared_address(shared_row));
}

/// Transposes an 8 x 8 matrix of 16-bit elements that lies in a warp as the operands do.
__device__ inline uint32_t transpose_matrix(uint32_t m) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
  return transposed;
}

/// Two floats rounded to bf16, `low` in the lower half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

/// Two floats rounded to f16, `low` in the lower half. What is out of its range becomes infinite.
__device__ inline uint32_t pack_f16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

}  // namespace tidegate::kernels
