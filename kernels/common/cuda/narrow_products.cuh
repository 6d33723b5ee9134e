#pragma once

// Products by a warpgroup, as hopper.cuh has them, of 32 and 48 columns, which few kernels want:
// those that do not are spared reading them.

#include "kernels/common/cuda/hopper.cuh"

namespace tidegate::kernels::hopper {

template <class T>
struct Product<T, 32> {
  // clang-format off
  /// d = a b + (add ? d : 0), both in shared memory.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void shared(float (&d)[4][4], Operand a, Operand b, bool add) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " "                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "  \
      "%16, %17, p, 1, 1, 0, %19; }"                                                           \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])  \
      : "l"(a.bits), "l"(b.bits), "r"(int{add}), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  // clang-format on
};

template <class T>
struct Product<T, 48> {
  // clang-format off
  /// d = a b + (add ? d : 0), both in shared memory.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void shared(float (&d)[6][4], Operand a, Operand b, bool add) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %26, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n48k16.f32." TYPE "." TYPE " "                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, "  \
      "%24, %25, p, 1, 1, 0, %27; }"                                                           \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])  \
      : "l"(a.bits), "l"(b.bits), "r"(int{add}), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  // clang-format on
};

}  // namespace tidegate::kernels::hopper
