#pragma once

// Where one thread finds its data: the sequence it walks, the channels it owns, and rows of memory
// indexed by the step of the walk rather than by time.

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/sequence.cuh"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::scan {

/// The kVec adjacent channels of one thread. All of them exist: kVec divides D, and threads past
/// the last channel repeat it. They write what its owner writes, so that no access needs a guard.
struct Lane {
  int64_t channel;   // first of them
  int64_t channels;  // D
};

template <int kVec>
__device__ inline Lane find_lane(int64_t thread, int64_t channels) {
  return {min(thread * kVec, channels - kVec), channels};
}

/// One tensor along a walk: step k of the walk is k strides away from its first step. Addresses are
/// one 32 x 32 -> 64 bit multiply-add each, so that a run of rows costs few registers.
template <class T, int kVec>
class Rows {
 public:
  Rows() = default;

  __device__ Rows(const TimeSeries& series, const Sequence& seq, bool backwards, const Lane& lane) {
    const int64_t first = seq.start + (backwards ? seq.length - 1 : 0);
    base_ =
        static_cast<char*>(series.data) +
        (seq.batch * series.stride_b + first * series.stride_t + lane.channel) * int64_t{sizeof(T)};
    const int stride = static_cast<int>(series.stride_t) * static_cast<int>(sizeof(T));
    stride_ = backwards ? -stride : stride;
    // Otherwise the compiler adds the parts of base_ anew, and in 64 bits, for every row.
    asm("" : "+l"(base_), "+r"(stride_));
  }

  /// Row k + i. Where i is a constant, its address is one multiply-add from row k's.
  /// `shift`: bytes further on in the row.
  __device__ void store(int k, int i, const Pack<T, kVec>& p, int shift = 0) const {
    *reinterpret_cast<typename Pack<T, kVec>::Bits*>(further(at(k), i) + shift) = p.bits;
  }

  __device__ char* at(int k) const { return further(base_, k); }

 private:
  __device__ char* further(char* from, int rows) const {
    char* to;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(rows), "r"(stride_), "l"(from));
    return to;
  }

  char* base_ = nullptr;
  int stride_ = 0;  // bytes
};

// Sources: where the inputs of one step come from. An op lists its inputs once, as calls
// source(pack, rows, k) in a fixed order, and the source decides what such a call does.

/// Loads them from device memory.
struct DirectSource {
  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>& pack, const Rows<T, kVec>& rows, int k, int shift = 0) {
    pack = load_streaming<T, kVec>(rows.at(k) + shift);
  }
};

/// Starts their copies into this thread's part of a slot of shared memory. A warp's slot holds, for
/// every input in turn, the packs of its 32 threads side by side.
struct FetchSource {
  char* slot;
  int lane;

  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>&, const Rows<T, kVec>& rows, int k, int shift = 0) {
    constexpr int kBytes = sizeof(Pack<T, kVec>);
    copy_async<kBytes>(slot + lane * kBytes, rows.at(k) + shift);
    slot += kWarpSize * kBytes;
  }
};

/// Copies 16 bytes, and has L2 read both lines of the 256 bytes that they lie in.
__device__ inline void copy_async_bringing_neighbour(void* shared, const void* global) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(global)
               : "memory");
}

/// Like FetchSource, for rows that are whole and aligned to 16 bytes: the warp copies several steps
/// at once, 16 bytes a thread. Thread by thread, `k` is the step that the thread copies for, and
/// `slot` that step's slot; the packs must be of kPackBytes. kBringsNeighbour: L2 reads the line
/// beside a row's, too. A channel tile's row is one line; the neighbouring tile, which another
/// block walks at the same time, finds the other one there, and memory is read by longer pieces.
/// Where the line beside is nobody's, as in a part of a wider row, that is in vain.
template <int kPackBytes, bool kBringsNeighbour>
struct WideFetchSource {
  static constexpr int kThreadsARow = kWarpSize * kPackBytes / 16;
  static constexpr int kStepsAtOnce = kWarpSize / kThreadsARow;
  char* slot;
  int lane;

  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>&, const Rows<T, kVec>& rows, int k, int shift = 0) {
    static_assert(sizeof(Pack<T, kVec>) == kPackBytes);
    const int offset = lane % kThreadsARow * 16;
    const char* const from = rows.at(k) + (offset - lane * kPackBytes + shift);
    if constexpr (kBringsNeighbour) {
      copy_async_bringing_neighbour(slot + offset, from);
    } else {
      copy_async<16>(slot + offset, from);
    }
    slot += kWarpSize * kPackBytes;
  }
};

/// Takes them from the slot.
struct SlotSource {
  const char* slot;
  int lane;

  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>& pack, const Rows<T, kVec>&, int, int = 0) {
    constexpr int kBytes = sizeof(Pack<T, kVec>);
    pack = *reinterpret_cast<const Pack<T, kVec>*>(slot + lane * kBytes);
    slot += kWarpSize * kBytes;
  }
};

/// Reads a per-channel parameter [D], or `missing` where there is none.
template <class Real, int kVec>
__device__ inline void load_channels(Real (&out)[kVec], const void* data, const Lane& lane,
                                     Real missing) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    out[v] = data != nullptr ? static_cast<const Real*>(data)[lane.channel + v] : missing;
  }
}

/// A state tensor of one row a sequence: [N, D] real, [N, D] of interleaved complex numbers, or
/// [N, 2D] = [Re | Im]. Null reads as zero.
template <class Number, int kVec, bool kHalves>
struct StateRow;

template <class Number, int kVec>
struct StateRow<Number, kVec, false> {
  static __device__ void load(Number (&out)[kVec], const void* data, int64_t n, const Lane& lane) {
    const int64_t at = n * lane.channels + lane.channel;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      out[v] = data != nullptr ? static_cast<const Number*>(data)[at + v] : Number{};
    }
  }
  static __device__ void store(void* data, int64_t n, const Lane& lane, const Number (&x)[kVec]) {
    const int64_t at = n * lane.channels + lane.channel;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      static_cast<Number*>(data)[at + v] = x[v];
    }
  }
};

template <class Real, int kVec>
struct StateRow<Complex<Real>, kVec, true> {
  static __device__ void load(Complex<Real> (&out)[kVec], const void* data, int64_t n,
                              const Lane& lane) {
    const Real* re = static_cast<const Real*>(data) + 2 * n * lane.channels + lane.channel;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      out[v] = data != nullptr ? Complex<Real>{re[v], re[v + lane.channels]} : Complex<Real>{};
    }
  }
  static __device__ void store(void* data, int64_t n, const Lane& lane,
                               const Complex<Real> (&x)[kVec]) {
    Real* re = static_cast<Real*>(data) + 2 * n * lane.channels + lane.channel;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      re[v] = x[v].re;
      re[v + lane.channels] = x[v].im;
    }
  }
};

}  // namespace tidegate::kernels::scan
