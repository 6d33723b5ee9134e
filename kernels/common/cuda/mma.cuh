#pragma once

// Products of small matrices on tensor cores (compute capability 8.0 and later), in registers.
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

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/cuda/shared_address.cuh"

namespace tidegate::kernels {

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
/// addresses of the rows (16 bytes each, aligned) of matrix i. Of each, a lane gets (r, 2c..2c+1).
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
