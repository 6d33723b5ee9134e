#pragma once

// Instructions of compute capability 9.0a (Hopper), each behind a function of its name: barriers
// that count bytes, copies of tiles by the copy engine (TMA), and products by a warpgroup (wgmma).
// What each does is in the PTX ISA under the name given beside it; what is said here is how the
// kernels use it. The bodies exist in code for 9.0a only (TIDEGATE_HOPPER_CODE).
//
// A warpgroup is four neighbouring warps, the first of them a multiple of four. Shared memory is
// read by the copy engine and by wgmma in a way of their own ("the async proxy"): what threads
// wrote there is seen by them only after fence_async_proxy() in the writing thread and a barrier.

#include <cuda.h>  // CUtensorMap; nothing of libcuda is linked
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

#include "kernels/common/cuda/shared_memory.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TIDEGATE_HOPPER_CODE 1
#else
#define TIDEGATE_HOPPER_CODE 0
#endif

namespace tidegate::kernels::hopper {

// ---- Barriers ----

/// Makes mbarrier_init of this thread known to the copy engine (fence.mbarrier_init).
__device__ inline void fence_barrier_init() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// Makes a barrier ordinary memory again, which mbarrier_init may be called for (mbarrier.inval).
__device__ inline void invalidate_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Arrives once, and has the phase wait for so many bytes of copies besides
/// (mbarrier.arrive.expect_tx).
__device__ inline void arrive_expecting(uint64_t* barrier, int bytes) {
#if TIDEGATE_HOPPER_CODE
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

/// The thread's writes to shared memory become visible to wgmma and the copy engine
/// (fence.proxy.async).
__device__ inline void fence_async_proxy() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Arrives once for the warp, after all its lanes have come here. `lane`: the caller's.
__device__ inline void arrive_from(uint64_t* barrier, int lane) {
  __syncwarp();
  if (lane == 0) {
    mbarrier_arrive(barrier);
  }
}

// A place in a ring of stages: which stage, and the parity of its phase. Two forms with one
// interface. RingCount is one register and has them worked out; RingPlace keeps both. Where
// registers are short the one is faster, where instructions are the other: the forward kernels of
// attention lose 1 to 3 % with RingPlace, the backward ones 1 to 2 % with RingCount.
//
// Whoever waits may skip no phase. A wait tells phases apart by their parity alone: it returns
// while the last phase that has ended is of that parity, so also where that is the phase two
// before. A thread therefore waits for every phase of a barrier in turn, or knows otherwise, from
// another barrier that it has waited for, that the phase before the one it waits for has ended.

template <int kStages = 2>
struct RingCount {
  unsigned count = 0;  // of the stages taken before
  __device__ int stage() const { return static_cast<int>(count % kStages); }
  __device__ int phase() const { return static_cast<int>(count / kStages % 2); }
  __device__ RingCount next() const { return {count + 1}; }
  __device__ void advance() { ++count; }
};

template <int kStages = 2>
struct RingPlace {
  int index = 0, parity = 0;
  __device__ int stage() const { return index; }
  __device__ int phase() const { return parity; }
  __device__ RingPlace next() const {
    return index == kStages - 1 ? RingPlace{0, parity ^ 1} : RingPlace{index + 1, parity};
  }
  __device__ void advance() {
    parity ^= index == kStages - 1 ? 1 : 0;
    index = index == kStages - 1 ? 0 : index + 1;
  }
};

/// Waits until `threads` threads have come to barrier `id` of the block, 1 to 15 (bar.sync).
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Counts as coming there, and goes on (bar.arrive).
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// The warps of this warpgroup give up registers, or wait for more, until each thread has kCount,
/// a multiple of 8 (setmaxnreg).
template <int kCount>
__device__ inline void release_registers() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ inline void claim_registers() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// ---- Tiles by the copy engine ----
//
// A tile of 16-bit elements lies in shared memory as panels of 64 columns: rows of 128 bytes, whose
// pieces of 16 bytes are permuted by the row (the 128-byte swizzle of TMA and wgmma). A panel
// starts at a multiple of 1024 bytes.

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

/// Where the elements of a tile of kRows rows lie, in bytes.
template <int kRows>
struct Panels {
  static constexpr int kPanelBytes = kRows * kPanelRowBytes;
  static constexpr __host__ __device__ int bytes(int columns) {
    return (columns + kPanelColumns - 1) / kPanelColumns * kPanelBytes;
  }
  /// Bytes from the tile's start to piece `piece`, of 8 elements, of a row.
  static __device__ int offset(int row, int piece) {
    return piece / 8 * kPanelBytes + row * kPanelRowBytes + (((piece ^ row) & 7) << 4);
  }
};

/// Has the description of a tensor at hand before it is needed (prefetch.tensormap).
__device__ inline void prefetch_map(const CUtensorMap* map) {
#if TIDEGATE_HOPPER_CODE
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

/// Copies a box of a tensor [B, T, H, D] described by tensor_map_of_rows: the map's rows from
/// (batch, token) on of one head, columns from `column` on, zeros where the tensor ends. The
/// barrier is told of the bytes (cp.async.bulk.tensor). One thread issues it.
__device__ inline void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int column,
                                int head, int token, int batch) {
#if TIDEGATE_HOPPER_CODE
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(head), "r"(token), "r"(batch)
      : "memory");
#endif
}

/// All panels of a tile of kRows rows and kColumns columns.
template <int kRows, int kColumns>
__device__ inline void copy_tile(unsigned char* shared, const CUtensorMap* map, uint64_t* barrier,
                                 int head, int token, int batch) {
#pragma unroll
  for (int column = 0; column < kColumns; column += kPanelColumns) {
    copy_box(shared + column / kPanelColumns * Panels<kRows>::kPanelBytes, map, barrier, column,
             head, token, batch);
  }
}

// ---- Products by a warpgroup (wgmma) ----
//
// d += a b of 64 rows, N columns and 16 inner elements; a in registers or in shared memory, b in
// shared memory. A warp has 16 of the rows, and a lane of d what it has of mma's accumulators of 16
// rows: d[j] are columns 8 j + lane % 4 * 2 and the next, of row lane / 4, and of 8 rows below.
// Products are asynchronous: fence_products, any number of them, commit_products, and d, and an a
// in registers, may be touched again after wait_for_products and then keep() of each.

/// Orders earlier accesses of the registers that products will use (wgmma.fence).
__device__ inline void fence_products() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void commit_products() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/// Waits until at most kPending groups are under way.
template <int kPending>
__device__ inline void wait_for_products() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}
/// Keeps the compiler from moving accesses of these registers across this point.
template <int kCount>
__device__ __forceinline__ void keep(float (&d)[kCount][4]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      asm volatile("" : "+f"(d[j][e])::"memory");
    }
  }
}

/// Transposes four by four: lane `part` of four neighbouring ones gets x[part] of each of them.
__device__ inline void transpose_quad(uint32_t (&x)[4], int part) {
  // Pairs of lanes, then pairs of pairs, exchange what lies off the diagonal.
  const bool odd = part & 1, high = part & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t sent = odd ? x[i] : x[i + 1];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, 1);
    x[i] = odd ? got : x[i];
    x[i + 1] = odd ? x[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t sent = high ? x[i] : x[i + 2];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, 2);
    x[i] = high ? got : x[i];
    x[i + 2] = high ? x[i + 2] : got;
  }
}

/// How wgmma finds an operand of 16 bits in panels ("matrix descriptor"). Two forms:
///   rows_inner:  rows of the tile are rows of a or columns of b; its columns are the inner index;
///   inner_rows:  rows of the tile are the inner index ("transposed"), its columns those of b.
/// advance() moves it by a number of bytes: 32 for 16 inner columns of a panel, 2048 for 16 inner
/// rows, kPanelBytes for the next panel.
struct Operand {
  uint64_t bits;

  static __device__ Operand rows_inner(unsigned address) { return of(address, 1, 64); }
  static __device__ Operand inner_rows(unsigned address, int panel_bytes) {
    return of(address, panel_bytes >> 4, 64);
  }
  __device__ Operand advance(int bytes) const { return {bits + (bytes >> 4)}; }

 private:
  static __device__ Operand of(unsigned address, uint64_t leading, uint64_t stride) {
    constexpr uint64_t kSwizzle128 = 1;
    return {uint64_t{(address & 0x3ffff) >> 4} | leading << 16 | stride << 32 | kSwizzle128 << 62};
  }
};

/// Products of N columns: shared() for those of up to 128, registers() for 64 and more.
/// kTransposed: b is Operand::inner_rows.
template <class T, int kColumns>
struct Product;

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

template <class T>
struct Product<T, 64> {
  // clang-format off
  /// d = a b + (add ? d : 0), both in shared memory.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void shared(float (&d)[8][4], Operand a, Operand b, bool add) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "  \
      "%32, %33, p, 1, 1, 0, %35; }"                                                           \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])  \
      : "l"(a.bits), "l"(b.bits), "r"(int{add}), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  /// d += a b, with a in registers as mma's A of 16 rows a warp.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void registers(float (&d)[8][4], const uint32_t (&a)[4], Operand b) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "                   \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "  \
      "{%32, %33, %34, %35}, %36, 1, 1, 1, %37;"                                               \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  // clang-format on
};

template <class T>
struct Product<T, 80> {
  // clang-format off
  /// d = a b + (add ? d : 0), both in shared memory.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void shared(float (&d)[10][4], Operand a, Operand b, bool add) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %42, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n80k16.f32." TYPE "." TYPE " "                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, "  \
      "%40, %41, p, 1, 1, 0, %43; }"                                                           \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3])  \
      : "l"(a.bits), "l"(b.bits), "r"(int{add}), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  // clang-format on
};

template <class T>
struct Product<T, 96> {
  // clang-format off
  /// d = a b + (add ? d : 0), both in shared memory.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void shared(float (&d)[12][4], Operand a, Operand b, bool add) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %50, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n96k16.f32." TYPE "." TYPE " "                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "  \
      "%48, %49, p, 1, 1, 0, %51; }"                                                           \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])  \
      : "l"(a.bits), "l"(b.bits), "r"(int{add}), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  /// d += a b, with a in registers as mma's A of 16 rows a warp.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void registers(float (&d)[12][4], const uint32_t (&a)[4], Operand b) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32." TYPE "." TYPE " "                   \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "  \
      "{%48, %49, %50, %51}, %52, 1, 1, 1, %53;"                                               \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  // clang-format on
};

template <class T>
struct Product<T, 128> {
  // clang-format off
  /// d = a b + (add ? d : 0), both in shared memory.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void shared(float (&d)[16][4], Operand a, Operand b, bool add) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "  \
      "%64, %65, p, 1, 1, 0, %67; }"                                                           \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])  \
      : "l"(a.bits), "l"(b.bits), "r"(int{add}), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  /// d += a b, with a in registers as mma's A of 16 rows a warp.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void registers(float (&d)[16][4], const uint32_t (&a)[4], Operand b) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                   \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "  \
      "{%64, %65, %66, %67}, %68, 1, 1, 1, %69;"                                               \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  // clang-format on
};

template <class T>
struct Product<T, 192> {
  // clang-format off
  /// d += a b, with a in registers as mma's A of 16 rows a warp.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void registers(float (&d)[24][4], const uint32_t (&a)[4], Operand b) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE " "                   \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "  \
      "{%96, %97, %98, %99}, %100, 1, 1, 1, %101;"                                               \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]), "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]), "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3])  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  // clang-format on
};

template <class T>
struct Product<T, 256> {
  // clang-format off
  /// d += a b, with a in registers as mma's A of 16 rows a warp.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void registers(float (&d)[32][4], const uint32_t (&a)[4], Operand b) {
#if TIDEGATE_HOPPER_CODE
#define TIDEGATE_WGMMA(TYPE)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " "                   \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "  \
      "{%128, %129, %130, %131}, %132, 1, 1, 1, %133;"                                               \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]), "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]), "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3]), "+f"(d[24][0]), "+f"(d[24][1]), "+f"(d[24][2]), "+f"(d[24][3]), "+f"(d[25][0]), "+f"(d[25][1]), "+f"(d[25][2]), "+f"(d[25][3]), "+f"(d[26][0]), "+f"(d[26][1]), "+f"(d[26][2]), "+f"(d[26][3]), "+f"(d[27][0]), "+f"(d[27][1]), "+f"(d[27][2]), "+f"(d[27][3]), "+f"(d[28][0]), "+f"(d[28][1]), "+f"(d[28][2]), "+f"(d[28][3]), "+f"(d[29][0]), "+f"(d[29][1]), "+f"(d[29][2]), "+f"(d[29][3]), "+f"(d[30][0]), "+f"(d[30][1]), "+f"(d[30][2]), "+f"(d[30][3]), "+f"(d[31][0]), "+f"(d[31][1]), "+f"(d[31][2]), "+f"(d[31][3])  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(kTransposed ? 1 : 0))
    if constexpr (std::is_same_v<T, __half>) { TIDEGATE_WGMMA("f16"); } else { TIDEGATE_WGMMA("bf16"); }
#undef TIDEGATE_WGMMA
#endif
  }
  // clang-format on
};

// ---- Accumulators to shared memory ----

/// Stores four 8 x 8 matrices of 16-bit elements, each transposed: x[m] are two neighbours of a row
/// of matrix m, as a lane has them of mma's operands; `address` is of a row of 16 bytes of matrix
/// lane / 8 as it is stored (stmatrix.trans).
__device__ inline void store_matrices_transposed(unsigned address, const uint32_t (&x)[4]) {
#if TIDEGATE_HOPPER_CODE
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
#endif
}

/// Stores the matrices as they are, not transposed (stmatrix).
__device__ inline void store_matrices(unsigned address, const uint32_t (&x)[4]) {
#if TIDEGATE_HOPPER_CODE
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
#endif
}

}  // namespace tidegate::kernels::hopper
