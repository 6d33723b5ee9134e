#pragma once

// Where one thread finds its data: the channels it owns, rows of memory indexed by the step of the
// scan rather than by time, states, and the partial sums it writes.

#include <type_traits>

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/precise.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/time_series.h"
#include "kernels/scan/cuda/engine/op.cuh"
#include "kernels/scan/cuda/engine/unaligned.cuh"

namespace tidegate::kernels::scan {

/// The kVec adjacent channels of one thread. All of them exist: kVec divides D, a last tile that
/// would reach past D begins earlier, and where D is less than a tile, threads past the last
/// channel repeat it. What two threads own they compute and write alike, so that no access needs a
/// guard.
struct Channels {
  int64_t first;
  int64_t total;  // D
  // What the engine knows more where rows are unaligned (unaligned.cuh).
  int in_tile = 0;      // channels of the tile's row before the first, other sequences' among them
  int tile = 0;         // channels of the tile, of this sequence
  bool single = false;  // D is one, and kVec two

  /// The channel whose parameters the thread's channel number v has, and whether that exists: what
  /// is found for one that does not is never written.
  __device__ int64_t at(int v) const { return first + offset(v); }
  __device__ int offset(int v) const { return single ? 0 : v; }
  __device__ bool exists(int v) const { return v == 0 || !single; }
};

template <int kVec>
__device__ inline Channels find_channels(int64_t tile, int lane, int64_t channels) {
  constexpr int kTileChannels = kWarpSize * kVec;
  const int64_t tile_first = min(tile * kTileChannels, max(channels - kTileChannels, int64_t{0}));
  return {min(tile_first + lane * kVec, channels - kVec), channels};
}

/// One tensor along a scan: step k of the scan is k strides away from its first step. Addresses are
/// one 32 x 32 -> 64 bit multiply-add each, so that a chunk of rows costs few registers.
template <class T, int kVec>
class Rows {
 public:
  Rows() = default;

  __device__ Rows(const TimeSeries& series, const Sequence& seq, bool backwards,
                  const Channels& channels) {
    const int64_t first = first_token(seq, backwards);
    base_ = static_cast<char*>(series.data) +
            element_offset(series, seq.batch, first, channels.first) * int64_t{sizeof(T)};
    const int stride = static_cast<int>(series.stride_t) * static_cast<int>(sizeof(T));
    stride_ = backwards ? -stride : stride;
    // Without this, the compiler adds the parts of base_ anew, and in 64 bits, for every row.
    asm("" : "+l"(base_), "+r"(stride_));
  }

  /// Row k + i. Where i is a constant, its address is one multiply-add from row k's.
  /// `shift`: bytes further on in the row.
  __device__ void store(int k, int i, const Pack<T, kVec>& p, int shift = 0) const {
    *reinterpret_cast<typename Pack<T, kVec>::Bits*>(further(at(k), i) + shift) = p.bits;
  }

  __device__ char* at(int k) const { return further(base_, k); }

  __device__ Pack<T, kVec> load(int k) const { return load_streaming<T, kVec>(at(k)); }

 protected:
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

/// Loads a step's inputs from device memory.
struct DirectSource {
  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>& pack, const Rows<T, kVec>& rows, int k, int shift = 0) {
    pack = load_streaming<T, kVec>(rows.at(k) + shift);
  }
};

/// Starts the copies of a step's inputs into this thread's part of a slot of shared memory. A
/// warp's slot holds, for every input in turn, the packs of its 32 threads side by side.
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

/// Like FetchSource, for rows that are whole and aligned to 16 bytes: the warp copies several steps
/// at once, 16 bytes a thread. Thread by thread, `k` is the step that the thread copies for, and
/// `slot` that step's slot; the packs must be of kPackBytes. kPrefetchNeighbourLine: L2 reads the
/// line beside a row's, too. A channel tile's row is one line; the neighbouring tile, which another
/// block scans at the same time, finds the other one there, and memory is read by longer pieces.
/// Where the line beside is nobody's, as in a part of a wider row, that is in vain.
template <int kPackBytes, bool kPrefetchNeighbourLine>
struct WideFetchSource {
  static constexpr int kThreadsARow = kWarpSize * kPackBytes / 16;
  static constexpr int kStepsAtOnce = kWarpSize / kThreadsARow;
  char* slot;
  int lane;

  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>&, const Rows<T, kVec>& rows, int k, int shift = 0) {
    static_assert(sizeof(Pack<T, kVec>) == kPackBytes);
    const int offset = lane % kThreadsARow * 16;
    // rows.at is where this lane's own channels are; the row begins lane packs before.
    const char* const from = rows.at(k) + (offset - lane * kPackBytes + shift);
    if constexpr (kPrefetchNeighbourLine) {
      copy_async_16_prefetch_256(slot + offset, from);
    } else {
      copy_async<16>(slot + offset, from);
    }
    slot += kWarpSize * kPackBytes;
  }
};

/// Takes a step's inputs from its slot.
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
__device__ inline void load_channels(Real (&out)[kVec], const void* data, const Channels& channels,
                                     Real missing) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    out[v] = data != nullptr ? static_cast<const Real*>(data)[channels.at(v)] : missing;
  }
}

/// A state tensor of one row a sequence: [N, D] real, [N, D] of interleaved complex numbers, or
/// [N, 2D] = [Re | Im]. Null reads as zero.
template <class Number, int kVec, bool kHalves>
struct StateRow;

template <class Number, int kVec>
struct StateRow<Number, kVec, false> {
  static __device__ void load(Number (&out)[kVec], const void* data, int64_t n,
                              const Channels& channels) {
    const int64_t row = n * channels.total;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      out[v] = data != nullptr ? static_cast<const Number*>(data)[row + channels.at(v)] : Number{};
    }
  }
  static __device__ void store(void* data, int64_t n, const Channels& channels,
                               const Number (&x)[kVec]) {
    const int64_t row = n * channels.total;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      if (channels.exists(v)) {
        static_cast<Number*>(data)[row + channels.at(v)] = x[v];
      }
    }
  }
};

template <class Real, int kVec>
struct StateRow<Complex<Real>, kVec, true> {
  static __device__ void load(Complex<Real> (&out)[kVec], const void* data, int64_t n,
                              const Channels& channels) {
    const Real* re = static_cast<const Real*>(data) + 2 * n * channels.total + channels.first;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const int at = channels.offset(v);
      out[v] = data != nullptr ? Complex<Real>{re[at], re[at + channels.total]} : Complex<Real>{};
    }
  }
  static __device__ void store(void* data, int64_t n, const Channels& channels,
                               const Complex<Real> (&x)[kVec]) {
    Real* re = static_cast<Real*>(data) + 2 * n * channels.total + channels.first;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      if (channels.exists(v)) {
        const int at = channels.offset(v);
        re[at] = x[v].re;
        re[at + channels.total] = x[v].im;
      }
    }
  }
};

/// What an Op is over real numbers in rows of [.., D], or complex ones in the two halves of rows of
/// [.., 2D].
template <class Data_, bool kComplex_, int kVec_>
struct Parts : OpDefaults {
  using Data = Data_;
  using Real = typename Register<Data>::type;
  using Number = std::conditional_t<kComplex_, Complex<Real>, Real>;
  using State = StateRow<Number, kVec_, kComplex_>;
  static constexpr bool kComplex = kComplex_;
  static constexpr int kVec = kVec_;
  static constexpr int kParts = kComplex ? 2 : 1;

  /// Elements of the parts as one number.
  static __device__ Number number(const Pack<Data, kVec> (&parts)[kParts], int v) {
    if constexpr (kComplex) {
      return {parts[0].get(v), parts[1].get(v)};
    } else {
      return parts[0].get(v);
    }
  }
  static __device__ void split(const Number (&x)[kVec], Pack<Data, kVec> (&parts)[kParts]) {
    if constexpr (kComplex) {
      Real re[kVec], im[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        re[v] = x[v].re;
        im[v] = x[v].im;
      }
      parts[0] = pack<Data, kVec>(re);
      parts[1] = pack<Data, kVec>(im);
    } else {
      parts[0] = pack<Data, kVec>(x);
    }
  }
};

/// [B, T, D] rows, or the two halves of [B, T, 2D] rows.
template <class Data, int kVec, int kParts>
class PartRows {
 public:
  __device__ PartRows(const TimeSeries& series, const Sequence& seq, bool backwards,
                      const Channels& channels)
      : first_(series, seq, backwards, channels),
        half_(static_cast<int>(channels.total) * static_cast<int>(sizeof(Data))) {}

  template <class Source>
  __device__ void gather(Source& source, Pack<Data, kVec> (&out)[kParts], int k) const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      source(out[p], first_, k, p * half_);
    }
  }
  __device__ void store(int k, int i, const Pack<Data, kVec> (&x)[kParts]) const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      first_.store(k, i, x[p], p * half_);
    }
  }

 private:
  Rows<Data, kVec> first_;
  int half_;  // bytes
};

// Sums over time of per-channel quantities: gradients of the arguments that have no time axis. Each
// warp group writes one row of partial sums; the rows are added up by the caller.

template <class Number, int kVec>
__device__ inline void write_partial(const Number (&sum)[kVec], void* partial, int64_t row,
                                     const Channels& channels) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    if (partial != nullptr && channels.exists(v)) {
      static_cast<Number*>(partial)[row * channels.total + channels.at(v)] = sum[v];
    }
  }
}

template <class Number, bool kPrecise, int kVec>
__device__ inline void write_partial(const Sum<Number, kPrecise> (&sum)[kVec], void* partial,
                                     int64_t row, const Channels& channels) {
  Number values[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    values[v] = sum[v].value();
  }
  write_partial(values, partial, row, channels);
}

/// Adds the warps' sums in the order of the warps. `scratch` is shared memory for warps * 32 packs.
/// Called by all threads of a block, or by none.
template <class Number, bool kPrecise, int kVec>
__device__ inline void sum_over_warps(const Sum<Number, kPrecise> (&sum)[kVec], void* partial,
                                      int64_t row, const Channels& channels, void* scratch,
                                      int warp, int warps, int lane) {
  if (partial == nullptr) {
    return;
  }
  auto* sums = static_cast<Pack<Number, kVec>(*)[kWarpSize]>(scratch);
  Number values[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    values[v] = sum[v].value();
  }
  __syncthreads();
  sums[warp][lane] = pack<Number, kVec>(values);
  __syncthreads();
  if (warp != 0) {
    return;
  }
  Sum<Number, kPrecise> total[kVec];
  for (int w = 0; w < warps; ++w) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      total[v].add(sums[w][lane].get(v));
    }
  }
  write_partial(total, partial, row, channels);
}

}  // namespace tidegate::kernels::scan
